"""Small random layers in every format, and the tokens for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from nbmoe.checkpoints import ExpertWeights
from nbmoe.checkpoints.router import Router
from nbmoe.checkpoints.stack import ExpertStack
from nbmoe.codecs import encode_e4m3

BF16 = ml_dtypes.bfloat16

FORMATS = (
    ("bf16", ""),
    ("nvfp4", ""),
    ("mxfp4", ""),
    ("mxfp4", "mxfp8"),
    ("mxfp4", "bf16"),
    ("mxfp8", ""),
    ("fp8_block", ""),
    ("fp8_row", ""),
    ("fp8_tensor", ""),
)
"""Formats of weights and of activations; "" is that of the weights."""


def normal(rng: np.random.Generator, shape: tuple[int, ...], deviation: float = 1.0) -> Any:
    return (rng.standard_normal(shape) * deviation).astype(np.float32)


def codes_and_scales(rng: np.random.Generator, fmt: str, experts: int, n: int, k: int) -> Any:
    """Random codes and scales whose values have a deviation near K**-0.5."""
    if fmt == "bf16":
        return normal(rng, (experts, n, k), k**-0.5).astype(BF16), None
    exponent = round(np.log2(k**-0.5))
    if fmt in ("nvfp4", "mxfp4"):
        codes = rng.integers(0, 256, (experts, n, k // 2), dtype=np.uint8)
        if fmt == "nvfp4":
            return codes, rng.integers(0x30, 0x40, (experts, n, k // 16), dtype=np.uint8)
        low = 127 + exponent - 2
        return codes, rng.integers(low, low + 2, (experts, n, k // 32), dtype=np.uint8)
    codes = encode_e4m3(normal(rng, (experts, n, k)))
    if fmt == "mxfp8":
        low = 127 + exponent
        return codes, rng.integers(low, low + 2, (experts, n, k // 32), dtype=np.uint8)
    shape = (n, 1) if fmt != "fp8_block" else (-(-n // 128), -(-k // 128))
    return codes, rng.uniform(0.5, 1, (experts, *shape)).astype(np.float32) * k**-0.5


def random_stack(
    seed: int,
    fmt: str,
    input_format: str = "",
    *,
    experts: int = 4,
    hidden: int = 64,
    moe: int = 32,
    biased: bool = False,
    **fields: Any,
) -> ExpertStack:
    """Experts of random weights; input scales fit standard normal tokens."""
    rng = np.random.default_rng(seed)
    gate, gate_scales = codes_and_scales(rng, fmt, experts, moe, hidden)
    up, up_scales = codes_and_scales(rng, fmt, experts, moe, hidden)
    down, down_scales = codes_and_scales(rng, fmt, experts, hidden, moe)
    if gate_scales is not None:
        gate_scales = np.concatenate([gate_scales, up_scales], axis=1)
    if fmt in ("nvfp4", "fp8_tensor"):
        full = np.float32(2688 if fmt == "nvfp4" else 448)
        fields["gate_up_input_scale"] = rng.uniform(3, 5, experts).astype(np.float32) / full
        fields["down_input_scale"] = rng.uniform(10, 14, experts).astype(np.float32) / full
    if fmt == "nvfp4":
        for leg, k in (("gate_up", hidden), ("down", moe)):
            scale = rng.uniform(0.5, 1, experts).astype(np.float32) * np.float32(k**-0.5 / 3)
            fields[f"{leg}_weight_scale"] = scale
    if biased:
        fields["gate_up_bias"] = normal(rng, (experts, 2 * moe)).astype(BF16)
        fields["down_bias"] = normal(rng, (experts, hidden)).astype(BF16)
    return ExpertStack(
        format=fmt,
        input_format=input_format,
        gate_up=np.concatenate([gate, up], axis=1),
        gate_up_scales=gate_scales,
        down=down,
        down_scales=down_scales,
        source=f"random {fmt}",
        **fields,
    )


def random_router(seed: int, experts: int, hidden: int, top_k: int, **fields: Any) -> Router:
    """A router whose logits have a deviation near 1."""
    rng = np.random.default_rng([seed, 7])
    weight = normal(rng, (experts, hidden), hidden**-0.5).astype(BF16)
    return Router(weight=weight, top_k=top_k, **fields)


def join(stack: ExpertStack, router: Router, **fields: Any) -> ExpertWeights:
    """A layer of its parts."""
    own = {f.name: getattr(stack, f.name) for f in dataclasses.fields(ExpertStack)}
    return ExpertWeights(**own, router=router, **fields)


def random_layer(
    seed: int,
    fmt: str,
    input_format: str = "",
    *,
    experts: int = 4,
    hidden: int = 64,
    moe: int = 32,
    top_k: int = 2,
    shared: ExpertStack | None = None,
    router: Router | None = None,
    **fields: Any,
) -> ExpertWeights:
    """A layer of random weights."""
    stack = random_stack(seed, fmt, input_format, experts=experts, hidden=hidden, moe=moe, **fields)
    router = router or random_router(seed, experts, hidden, top_k)
    return join(stack, router, shared=shared)
