"""The same layer in float64, unrounded: what the error of a result is measured against.

Inputs are the quantized tensors themselves, so a difference shows what the arithmetic of the
bit-exact stages costs. Nothing of theirs is used but decode tables, except by
`fake_quantize_nvfp4`, with which a caller may add what quantization costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe import codecs, layouts
from nbmoe.codecs import F32Array, U8Array
from nbmoe.formats import NVFP4
from nbmoe.reference.quantize import quantize_nvfp4

F64Array = npt.NDArray[np.float64]


def dequantize_nvfp4(packed: U8Array, scales: U8Array, tensor_scale: float = 1.0) -> F64Array:
    """code * scale * tensor_scale, exact up to float64.

    Args:
        packed: (..., K/2) codes.
        scales: (..., K/16) e4m3 bytes, row-major.
        tensor_scale: The factor of the whole tensor, a multiplier.

    Returns:
        (..., K) float64.
    """
    codes = codecs.decode_e2m1(codecs.unpack_nibbles(packed)).astype(np.float64)
    scale = codecs.decode_e4m3(scales).astype(np.float64) * tensor_scale
    blocks = codes.reshape(*scale.shape, NVFP4.block)
    return (blocks * scale[..., np.newaxis]).reshape(codes.shape)


def fake_quantize_nvfp4(values: F64Array, tensor_sf: float) -> F64Array:
    """Quantizes to NVFP4 and back: the nearest that a quantized tensor comes to `values`.

    Args:
        values: (..., K), K % 16 == 0.
        tensor_sf: The inverse of the calibrated input scale.
    """
    packed, scales = quantize_nvfp4(values.astype(np.float32), np.float32(tensor_sf))
    return dequantize_nvfp4(packed, scales, 1.0 / tensor_sf)


def dequantize_groups(
    packed: U8Array,
    tiles: U8Array,
    expert_start: npt.NDArray[np.uint32],
    scale_offsets: npt.NDArray[np.uint32],
) -> F64Array:
    """Dequantizes grouped activations with tiled scales; rows of no group are 0.

    Args:
        packed: (M, K/2) codes.
        tiles: (tiles, ceil(K/64), 32, 4, 4) scales.
        expert_start: (S + 1,) prefix sums [rows].
        scale_offsets: (S,) [128-row tiles].

    Returns:
        (M, K) float64, without the tensor scale.
    """
    k = 2 * packed.shape[1]
    values = np.zeros((len(packed), k))
    first_rows = layouts.tile_starts(expert_start, scale_offsets) * layouts.TILE_ROWS
    down, across = tiles.shape[:2]
    scales = layouts.deinterleave_scales(tiles, down * layouts.TILE_ROWS, 4 * across)
    for slot, first_row in enumerate(first_rows):
        start, stop = int(expert_start[slot]), int(expert_start[slot + 1])
        used = scales[first_row : first_row + stop - start, : k // NVFP4.block]
        values[start:stop] = dequantize_nvfp4(packed[start:stop], used)
    return values


def grouped_matmul(
    hidden: F64Array,
    weight: F64Array,
    expert_start: npt.NDArray[np.uint32],
    expert_ids: npt.NDArray[np.int32],
    expert_scales: F32Array,
    a_row_scales: npt.NDArray[Any] | None = None,
) -> F64Array:
    """expert_scales[e] * hidden @ weight[e].T for each group; rows of no slot are 0.

    Args:
        hidden: (M, K) dequantized activations.
        weight: (E, N, K) dequantized weights.
        expert_start: (S + 1,) prefix sums [rows].
        expert_ids: (S,) expert of each slot, -1 to skip.
        expert_scales: (E,) by expert id.
        a_row_scales: (M,) bf16 by row.
    """
    result = np.zeros((len(hidden), weight.shape[1]))
    for slot, expert in enumerate(expert_ids):
        rows = slice(int(expert_start[slot]), int(expert_start[slot + 1]))
        if expert >= 0:
            result[rows] = hidden[rows] @ weight[expert].T * float(expert_scales[expert])
    if a_row_scales is not None:
        result *= codecs.decode_bf16(a_row_scales).astype(np.float64)[:, np.newaxis]
    return result


def swiglu(gate: F64Array, up: F64Array) -> F64Array:
    """gate * sigmoid(gate) * up in float64."""
    with np.errstate(over="ignore"):
        result: F64Array = gate / (1 + np.exp(-gate)) * up
    return result


def moe_layer(
    x: F64Array,
    topk_ids: npt.NDArray[np.int32],
    topk_weights: F32Array,
    gate_up: F64Array,
    down: F64Array,
    quantize_intermediate: Callable[[F64Array, int], F64Array] | None = None,
) -> F64Array:
    """The whole layer: sum over a token's experts of weight * down(swiglu(gate_up(x))).

    Args:
        x: (T, H) token values, dequantized if the layer under test quantizes them.
        topk_ids: (T, k) expert ids, -1 contributes nothing.
        topk_weights: (T, k) routing weights.
        gate_up: (E, 2D, H) weights, gate rows then up rows, all scales applied.
        down: (E, H, D) weights, all scales applied.
        quantize_intermediate: Called with the (m, D) activations of an expert and its id, returns
            what the down projection sees. Rows are in the order of the grouped rows: by token,
            then by j. None leaves them as they are.

    Returns:
        (T, H) float64.
    """
    out = np.zeros((len(x), down.shape[1]))
    d = down.shape[2]
    for expert in np.unique(topk_ids[topk_ids >= 0]):
        tokens, slots = np.nonzero(topk_ids == expert)
        projected = x[tokens] @ gate_up[expert].T
        z = swiglu(projected[:, :d], projected[:, d:])
        if quantize_intermediate is not None:
            z = quantize_intermediate(z, int(expert))
        weights = topk_weights[tokens, slots].astype(np.float64)
        np.add.at(out, tokens, weights[:, np.newaxis] * (z @ down[expert].T))
    return out
