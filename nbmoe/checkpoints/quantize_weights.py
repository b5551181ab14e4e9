"""Quantizes float32 weights as an exporter would, for layers that no checkpoint holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe.checkpoints.stack import WEIGHT_FORMATS
from nbmoe.codecs import (
    decode_e4m3,
    decode_e8m0,
    encode_bf16,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    pack_nibbles,
)
from nbmoe.errors import ConfigError, message
from nbmoe.formats import E2M1, E4M3, MXFP4, MXFP8, NVFP4, BlockFormat

F32Array = npt.NDArray[np.float32]
U8Array = npt.NDArray[np.uint8]

FULL_SCALE = E2M1.max_value * E4M3.max_value
"""Largest |value| that NVFP4 holds with a second-level scale of 1."""

_MX = {"mxfp4": MXFP4, "mxfp8": MXFP8}


def quantize_weights(
    gate_up: F32Array, down: F32Array, format: str
) -> dict[str, npt.NDArray[Any] | None]:
    """Codes and scales of a stack of experts, all but the scales of activations.

    Second-level NVFP4 scales are amax / 2688 of an expert (1 if it is all zeros), FP8 scales
    amax / 448 of a block, a row or a projection, e8m0 scales the smallest power of two that keeps
    a block in range.

    Args:
        gate_up: [E, 2D, H], gate rows and then up rows.
        down: [E, H, D].
        format: A key of `WEIGHT_FORMATS`.

    Returns:
        Fields of `ExpertStack`: gate_up, gate_up_scales, down, down_scales, and for NVFP4
        gate_up_weight_scale and down_weight_scale.

    Raises:
        ConfigError: The format is unknown.
    """
    if format not in WEIGHT_FORMATS:
        rule = f"one of {tuple(WEIGHT_FORMATS)}"
        raise ConfigError(message("quantize_weights", "format", rule, repr(format)))
    fields: dict[str, npt.NDArray[Any] | None] = {}
    for name, weights in (("gate_up", gate_up), ("down", down)):
        if format == "bf16":
            fields[name] = encode_bf16(weights)
        elif format == "nvfp4":
            codes, scales, factor = _nvfp4(weights)
            fields |= {name: codes, f"{name}_scales": scales, f"{name}_weight_scale": factor}
        elif format in _MX:
            codes, scales = _mx(weights, _MX[format])
            fields |= {name: codes, f"{name}_scales": scales}
        else:
            # Blocks and tensors of gate and of up are their own.
            parts = np.split(weights, 2, axis=1) if name == "gate_up" else [weights]
            quantized = [_fp8(part, format) for part in parts]
            fields[name] = np.concatenate([codes for codes, _ in quantized], axis=1)
            fields[f"{name}_scales"] = np.concatenate([s for _, s in quantized], axis=1)
    return fields


def _nvfp4(weights: F32Array) -> tuple[U8Array, U8Array, F32Array]:
    blocks = weights.reshape(*weights.shape[:-1], -1, NVFP4.block)
    amax = np.abs(weights).max(axis=(1, 2))
    tensor_scale = np.where(amax == 0, 1, amax / FULL_SCALE).astype(np.float32)
    factor = tensor_scale[:, None, None]
    scales = encode_e4m3(np.abs(blocks).max(axis=-1) / (np.float32(E2M1.max_value) * factor))
    codes = encode_e2m1(_divided(blocks, (decode_e4m3(scales) * factor)[..., None]))
    return pack_nibbles(codes.reshape(weights.shape)), scales, tensor_scale


def _mx(weights: F32Array, fmt: BlockFormat) -> tuple[U8Array, U8Array]:
    blocks = weights.reshape(*weights.shape[:-1], -1, fmt.block)
    scales = encode_e8m0(np.abs(blocks).max(axis=-1), fmt.element)
    divided = _divided(blocks, decode_e8m0(scales)[..., None]).reshape(weights.shape)
    if fmt.per_byte == 2:
        return pack_nibbles(encode_e2m1(divided)), scales
    return encode_e4m3(divided), scales


def _fp8(weights: F32Array, format: str) -> tuple[U8Array, F32Array]:
    _, n, k = weights.shape
    magnitudes = np.abs(weights)
    if format == "fp8_tensor":
        amax = np.broadcast_to(magnitudes.max(axis=(1, 2), keepdims=True), (len(weights), n, 1))
    elif format == "fp8_row":
        amax = magnitudes.max(axis=2, keepdims=True)
    else:
        rows, columns = WEIGHT_FORMATS[format].scale_block
        amax = np.maximum.reduceat(magnitudes, range(0, n, rows), axis=1)
        amax = np.maximum.reduceat(amax, range(0, k, columns), axis=2)
    scales: F32Array = (amax / np.float32(E4M3.max_value)).astype(np.float32)
    if format != "fp8_block":
        return encode_e4m3(_divided(weights, scales)), scales
    wide = np.repeat(np.repeat(scales, rows, axis=1)[:, :n], columns, axis=2)[:, :, :k]
    return encode_e4m3(_divided(weights, wide)), scales


def _divided(values: F32Array, divisors: F32Array) -> F32Array:
    """values / divisors, where a divisor of 0 belongs to zeros alone."""
    return np.divide(values, np.where(divisors == 0, 1, divisors), dtype=np.float32)
