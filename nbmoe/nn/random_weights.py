"""A random NVFP4 layer with realistic scales, for demonstrations without a checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe.checkpoints.weights import ExpertWeights
from nbmoe.codecs import decode_e4m3, encode_bf16, encode_e2m1, encode_e4m3, pack_nibbles
from nbmoe.formats import E2M1, E4M3, NVFP4

F32Array = npt.NDArray[np.float32]

_CALIBRATION_TOKENS = 64
_WEIGHTS_STREAM = 1  # weights drawn from the stream of the tokens would correlate with them
_FULL_SCALE = E2M1.max_value * E4M3.max_value  # largest |value| with second-level scale 1


def random_weights(
    *, num_experts: int, hidden_size: int, moe_dim: int, top_k: int, seed: int
) -> ExpertWeights:
    """Draws a layer from normal distributions and quantizes it as an exporter would.

    Second-level scales are amax / 2688: of the weights, and of activations calibrated on random
    tokens, so that block scales use the range of e4m3 as in a real checkpoint.

    Args:
        num_experts: E.
        hidden_size: H, a multiple of 16 [elements].
        moe_dim: D, a multiple of 16 [elements].
        top_k: Experts per token.
        seed: Seed of numpy's default generator.
    """
    rng = np.random.default_rng([seed, _WEIGHTS_STREAM])
    gate_up = _normal(rng, (num_experts, 2 * moe_dim, hidden_size), hidden_size**-0.5)
    down = _normal(rng, (num_experts, hidden_size, moe_dim), moe_dim**-0.5)
    router = _normal(rng, (num_experts, hidden_size), hidden_size**-0.5)
    tokens = _normal(rng, (_CALIBRATION_TOKENS, hidden_size), 1.0)

    product = tokens @ gate_up.transpose(0, 2, 1)
    gate, up = product[..., :moe_dim], product[..., moe_dim:]
    inner_amax = np.abs(gate / (1 + np.exp(-gate)) * up).max(axis=(1, 2))
    gate_up_codes, gate_up_scales, gate_up_weight_scale = _quantize(gate_up)
    down_codes, down_scales, down_weight_scale = _quantize(down)
    input_scale = np.float32(np.abs(tokens).max() / _FULL_SCALE)
    return ExpertWeights(
        gate_up=gate_up_codes,
        gate_up_scales=gate_up_scales,
        gate_up_weight_scale=gate_up_weight_scale,
        gate_up_input_scale=np.full(num_experts, input_scale),
        down=down_codes,
        down_scales=down_scales,
        down_weight_scale=down_weight_scale,
        down_input_scale=(inner_amax / _FULL_SCALE).astype(np.float32),
        router=encode_bf16(router),
        top_k=top_k,
        renormalize=True,
        source=f"random layer (seed {seed})",
    )


def random_tokens(tokens: int, hidden_size: int, seed: int) -> npt.NDArray[Any]:
    """Standard normal tokens of `numpy.random.default_rng(seed)`, rounded to bf16 [T, H]."""
    return encode_bf16(_normal(np.random.default_rng(seed), (tokens, hidden_size), 1.0))


def _normal(rng: np.random.Generator, shape: tuple[int, ...], deviation: float) -> F32Array:
    return rng.standard_normal(shape, np.float32) * np.float32(deviation)


def _quantize(
    weights: F32Array,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], F32Array]:
    """NVFP4 as in modelopt: codes [E, N, K/2], block scales [E, N, K/16], weight scales [E]."""
    blocks = weights.reshape(*weights.shape[:-1], -1, NVFP4.block)
    tensor_scale = (np.abs(weights).max(axis=(1, 2)) / _FULL_SCALE).astype(np.float32)
    factor = tensor_scale[:, None, None]
    scales = encode_e4m3(np.abs(blocks).max(axis=-1) / (np.float32(E2M1.max_value) * factor))
    divisor = (decode_e4m3(scales) * factor)[..., None]
    codes = encode_e2m1(blocks / np.where(divisor == 0, np.float32(1), divisor))
    return pack_nibbles(codes.reshape(weights.shape)), scales, tensor_scale
