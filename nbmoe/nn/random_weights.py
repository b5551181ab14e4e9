"""A random layer with realistic scales, for demonstrations without a checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe.checkpoints.quantize_weights import FULL_SCALE, quantize_weights
from nbmoe.checkpoints.router import Router
from nbmoe.checkpoints.stack import WEIGHT_FORMATS
from nbmoe.checkpoints.weights import ExpertWeights
from nbmoe.codecs import encode_bf16
from nbmoe.formats import E4M3

F32Array = npt.NDArray[np.float32]

_CALIBRATION_TOKENS = 64
_WEIGHTS_STREAM = 1  # weights drawn from the stream of the tokens would correlate with them


def random_weights(
    *,
    num_experts: int,
    hidden_size: int,
    moe_dim: int,
    top_k: int,
    seed: int,
    format: str = "nvfp4",
) -> ExpertWeights:
    """Draws a layer from normal distributions and quantizes it as an exporter would.

    Calibrated input scales are amax / 2688 (NVFP4) and amax / 448 (FP8) of activations of random
    tokens, so that scales use their range as in a real checkpoint.

    Args:
        num_experts: E.
        hidden_size: H, a multiple of what the format demands [elements].
        moe_dim: D, likewise [elements].
        top_k: Experts per token.
        seed: Seed of numpy's default generator.
        format: Format of weights and activations, a key of `nbmoe.checkpoints.stack`'s table.
    """
    rng = np.random.default_rng([seed, _WEIGHTS_STREAM])
    gate_up = _normal(rng, (num_experts, 2 * moe_dim, hidden_size), hidden_size**-0.5)
    down = _normal(rng, (num_experts, hidden_size, moe_dim), moe_dim**-0.5)
    router = _normal(rng, (num_experts, hidden_size), hidden_size**-0.5)
    tokens = _normal(rng, (_CALIBRATION_TOKENS, hidden_size), 1.0)

    fields = quantize_weights(gate_up, down, format)
    if WEIGHT_FORMATS[format].input_scales:
        largest = FULL_SCALE if format == "nvfp4" else E4M3.max_value
        product = tokens @ gate_up.transpose(0, 2, 1)
        gate, up = product[..., :moe_dim], product[..., moe_dim:]
        inner_amax = np.abs(gate / (1 + np.exp(-gate)) * up).max(axis=(1, 2))
        input_scale = np.float32(np.abs(tokens).max() / largest)
        fields["gate_up_input_scale"] = np.full(num_experts, input_scale)
        fields["down_input_scale"] = (inner_amax / largest).astype(np.float32)
    return ExpertWeights(
        **fields,  # type: ignore[arg-type]
        format=format,
        router=Router(weight=encode_bf16(router), top_k=top_k),
        source=f"random layer (seed {seed})",
    )


def random_tokens(tokens: int, hidden_size: int, seed: int) -> npt.NDArray[Any]:
    """Standard normal tokens of `numpy.random.default_rng(seed)`, rounded to bf16 [T, H]."""
    return encode_bf16(_normal(np.random.default_rng(seed), (tokens, hidden_size), 1.0))


def _normal(rng: np.random.Generator, shape: tuple[int, ...], deviation: float) -> F32Array:
    return rng.standard_normal(shape, np.float32) * np.float32(deviation)
