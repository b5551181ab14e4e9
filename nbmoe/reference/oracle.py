"""The same layer in float64, unrounded: what the error of a result is measured against.

Inputs are the quantized tensors themselves, so a difference shows what the arithmetic of the
bit-exact stages costs. Nothing of theirs is used but decode tables, except by `fake_quantize`, with
which a caller may add what quantization costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe import codecs, layouts
from nbmoe.activation import SILU, GatedActivation
from nbmoe.codecs import F32Array
from nbmoe.formats import NVFP4, BlockFormat
from nbmoe.reference import quantize
from nbmoe.reference.float32 import FLT_MAX

F64Array = npt.NDArray[np.float64]


def dequantize(
    codes: npt.NDArray[Any],
    scales: npt.NDArray[Any],
    fmt: BlockFormat = NVFP4,
    tensor_scale: float = 1.0,
) -> F64Array:
    """code * scale * tensor_scale, exact up to float64.

    Args:
        codes: (..., K) codes, packed (..., K/2) for FP4 formats.
        scales: (..., K/block) scale bytes, row-major.
        fmt: The format of both.
        tensor_scale: The factor of the whole tensor, a multiplier.

    Returns:
        (..., K) float64.
    """
    elements = codes.view(np.uint8)
    if fmt.per_byte == 2:
        elements = codecs.unpack_nibbles(elements)
    decode_scale = codecs.decode_e4m3 if fmt.scale == "e4m3" else codecs.decode_e8m0
    scale = decode_scale(scales.view(np.uint8)).astype(np.float64) * tensor_scale
    values = codecs.decode(elements, fmt.element).astype(np.float64)
    blocks = values.reshape(*scale.shape, fmt.block)
    return (blocks * scale[..., np.newaxis]).reshape(elements.shape)


def fake_quantize(values: F64Array, fmt: BlockFormat = NVFP4, tensor_sf: float = 1.0) -> F64Array:
    """Quantizes and back: the nearest that a quantized tensor comes to `values`.

    Args:
        values: (..., K), K a multiple of the block.
        fmt: The format.
        tensor_sf: The inverse of the calibrated input scale, for NVFP4.
    """
    factor = np.float32(tensor_sf)
    codes, scales = quantize.quantize_blocks(values.astype(np.float32), fmt, factor)
    return dequantize(codes, scales, fmt, 1.0 / tensor_sf)


def dequantize_groups(
    codes: npt.NDArray[Any],
    tiles: npt.NDArray[Any],
    expert_start: npt.NDArray[np.uint32],
    scale_offsets: npt.NDArray[np.uint32],
    fmt: BlockFormat = NVFP4,
) -> F64Array:
    """Dequantizes grouped activations with tiled scales; rows of no group are 0.

    Args:
        codes: (M, K) codes, packed (M, K/2) for FP4 formats.
        tiles: (tiles, ceil(K/(4 * block)), 32, 4, 4) scales.
        expert_start: (S + 1,) prefix sums [rows].
        scale_offsets: (S,) [128-row tiles].
        fmt: The format of both.

    Returns:
        (M, K) float64, without the tensor scale.
    """
    k = codes.shape[1] * fmt.per_byte
    values = np.zeros((len(codes), k))
    first_rows = layouts.tile_starts(expert_start, scale_offsets) * layouts.TILE_ROWS
    down, across = tiles.shape[:2]
    scales = layouts.deinterleave_scales(tiles, down * layouts.TILE_ROWS, 4 * across)
    for slot, first_row in enumerate(first_rows):
        start, stop = int(expert_start[slot]), int(expert_start[slot + 1])
        used = scales[first_row : first_row + stop - start, : k // fmt.block]
        values[start:stop] = dequantize(codes[start:stop], used, fmt)
    return values


def grouped_matmul(
    hidden: F64Array,
    weight: F64Array,
    expert_start: npt.NDArray[np.uint32],
    expert_ids: npt.NDArray[np.int32],
    expert_scales: F32Array | None = None,
    a_row_scales: npt.NDArray[Any] | None = None,
    bias: npt.NDArray[Any] | None = None,
) -> F64Array:
    """expert_scales[e] * hidden @ weight[e].T + bias[e] for each group; rows of no slot are 0.

    Args:
        hidden: (M, K) dequantized activations.
        weight: (E, N, K) dequantized weights.
        expert_start: (S + 1,) prefix sums [rows].
        expert_ids: (S,) expert of each slot, -1 to skip.
        expert_scales: (E,) by expert id.
        a_row_scales: (M,) bf16 by row.
        bias: (E, N) bf16 by expert id.
    """
    result = np.zeros((len(hidden), weight.shape[1]))
    for slot, expert in enumerate(expert_ids):
        rows = slice(int(expert_start[slot]), int(expert_start[slot + 1]))
        if expert < 0:
            continue
        product = hidden[rows] @ weight[expert].T
        if expert_scales is not None:
            product *= float(expert_scales[expert])
        if a_row_scales is not None:
            product *= codecs.decode_bf16(a_row_scales[rows]).astype(np.float64)[:, np.newaxis]
        if bias is not None:
            product += codecs.decode_bf16(bias[expert])
        result[rows] = product
    return result


def gated_activation(
    gate: F64Array, up: F64Array, activation: GatedActivation | None = None
) -> F64Array:
    """The activation of gates, times up values, in float64.

    Args:
        gate: Any shape.
        up: The same shape.
        activation: Which one, None for silu without a limit.
    """
    chosen = activation or SILU
    if chosen.gated_activation_fn is not None:
        each = np.vectorize(chosen.gated_activation_fn, otypes=[np.float64])
        applied: F64Array = each(gate, up)
        return applied
    gate = np.maximum(gate, -float(FLT_MAX))  # -infinity has the limit 0
    limit = float(np.float32(chosen.limit))
    if limit:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    with np.errstate(over="ignore"):
        if chosen.fused_activation == "silu":
            return np.asarray(gate / (1 + np.exp(-gate)) * up)
        if chosen.fused_activation == "swigluoai":
            return np.asarray(
                gate / (1 + np.exp(-float(np.float32(chosen.alpha)) * gate)) * (up + 1)
            )
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return np.asarray(0.5 * gate * (1 + np.tanh(inner)) * up)


def moe_layer(
    x: F64Array,
    topk_ids: npt.NDArray[np.int32],
    topk_weights: F32Array,
    gate_up: F64Array,
    down: F64Array,
    quantize_intermediate: Callable[[F64Array, int], F64Array] | None = None,
    *,
    activation: GatedActivation | None = None,
    gate_up_bias: F64Array | None = None,
    down_bias: F64Array | None = None,
) -> F64Array:
    """The whole layer: sum over a token's experts of weight * down(activation(gate_up(x))).

    Args:
        x: (T, H) token values, dequantized if the layer under test quantizes them.
        topk_ids: (T, k) expert ids, -1 contributes nothing.
        topk_weights: (T, k) routing weights.
        gate_up: (E, 2D, H) weights, gate rows then up rows, all scales applied.
        down: (E, H, D) weights, all scales applied.
        quantize_intermediate: Called with the (m, D) activations of an expert and its id, returns
            what the down projection sees. Rows are in the order of the grouped rows: by token,
            then by j. None leaves them as they are.
        activation: The gated activation, None for silu.
        gate_up_bias: (E, 2D) added before the activation, gate then up.
        down_bias: (E, H) added after the down projection.

    Returns:
        (T, H) float64.
    """
    out = np.zeros((len(x), down.shape[1]))
    d = down.shape[2]
    for expert in np.unique(topk_ids[topk_ids >= 0]):
        tokens, slots = np.nonzero(topk_ids == expert)
        projected = x[tokens] @ gate_up[expert].T
        if gate_up_bias is not None:
            projected = projected + gate_up_bias[expert]
        z = gated_activation(projected[:, :d], projected[:, d:], activation)
        if quantize_intermediate is not None:
            z = quantize_intermediate(z, int(expert))
        weights = topk_weights[tokens, slots].astype(np.float64)
        y = z @ down[expert].T
        if down_bias is not None:
            y = y + down_bias[expert]
        np.add.at(out, tokens, weights[:, np.newaxis] * y)
    return out
