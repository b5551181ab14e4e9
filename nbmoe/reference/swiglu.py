"""The gate/up matmul with a gated activation and requantization in its epilogue."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe import codecs, layouts
from nbmoe.activation import GatedActivation
from nbmoe.codecs import F32Array
from nbmoe.formats import BlockFormat
from nbmoe.reference.activation import gated_activation
from nbmoe.reference.matmul import formats_of, scaled_products
from nbmoe.reference.quantize import (
    check_tensor_factor,
    quantize_blocks,
    store_scale_tiles,
    typed,
)


def grouped_matmul_blocked_swiglu(
    hidden: npt.NDArray[Any],
    weight: npt.NDArray[Any],
    a_scales: npt.NDArray[Any],
    b_scales: npt.NDArray[Any],
    expert_start: npt.NDArray[np.uint32],
    a_scale_offsets: npt.NDArray[np.uint32],
    expert_ids: npt.NDArray[np.int32],
    *,
    expert_scales: F32Array | None = None,
    c_input_scales: F32Array | None = None,
    format: str | BlockFormat | None = None,
    weight_format: str | BlockFormat | None = None,
    bias: npt.NDArray[Any] | None = None,
    activation: GatedActivation | None = None,
    estimated_total_m: int | None = None,
    a_row_scales: npt.NDArray[Any] | None = None,
    match_bf16: bool = True,
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Grouped matmul with gate/up weights, a gated activation, and quantization of the result.

    Args:
        hidden: (M, K) codes, packed (M, K/2) for FP4 formats.
        weight: (E, 2D, K) or packed (E, 2D, K/2) codes, rows in sigma order (gate 0, up 0, gate 1,
            ...; `nbmoe.layouts.sigma_permute`), D a multiple of the block.
        a_scales: (tiles, ceil(K/(4 * block)), 32, 4, 4) scale tiles of `hidden`.
        b_scales: (E, ceil(2D/128), ceil(K/(4 * block)), 32, 4, 4) scale tiles of `weight`, sigma
            order.
        expert_start: (S + 1,) prefix sums: slot s owns rows expert_start[s]..expert_start[s + 1].
        a_scale_offsets: (S,) see `nbmoe.layouts.scales_offset`; the output's scales use it too.
        expert_ids: (S,) expert of each slot. The rows of a slot with -1 get codes 0, scales 0.
        expert_scales: (E,) float32 factors of gate and up, by expert id; None for ones.
        c_input_scales: (S,) float32 inverse input scales of the down projection, by slot.
            NVFP4 needs them; None for MX.
        format: Format of `hidden` and of the result, None to tell by element types.
        weight_format: Format of `weight`, None for that of `hidden` (MXFP4 if packed beside MXFP8).
        bias: (E, 2D) bf16 added after all factors, in the order of the weight's rows.
        activation: What to apply, None for silu.
        estimated_total_m: Sizing hint of the kernels [rows]. It never changes the result.
        a_row_scales: (M,) bf16 further factors of gate and up, by row.
        match_bf16: Round gate and up to bf16 first, which makes the result equal to that of a
            matmul with bf16 output followed by the activation.

    Returns:
        Codes (M, D), packed (M, D/2) for FP4 formats, and scale tiles
        (a_scales.shape[0], ceil(D/(4 * block)), 32, 4, 4). Padding in the tiles, and everything
        that belongs to no slot, is 0.

    Raises:
        ScaleError: NVFP4 without c_input_scales.
        ConfigError: an MX format with them.
    """
    del estimated_total_m
    fmt, weight_fmt = formats_of(hidden, weight, a_scales, format, weight_format)
    check_tensor_factor("grouped_matmul_blocked_swiglu", "c_input_scales", fmt, c_input_scales)
    v = scaled_products(
        hidden,
        weight,
        a_scales,
        b_scales,
        expert_start,
        a_scale_offsets,
        expert_ids,
        expert_scales,
        format=fmt,
        weight_format=weight_fmt,
        a_row_scales=a_row_scales,
        bias=bias,
    )
    return activate_and_quantize(
        v,
        fmt,
        expert_start,
        a_scale_offsets,
        expert_ids,
        c_input_scales,
        num_tiles=len(a_scales),
        activation=activation,
        match_bf16=match_bf16,
    )


def activate_and_quantize(
    v: F32Array,
    fmt: BlockFormat,
    expert_start: npt.NDArray[np.uint32],
    a_scale_offsets: npt.NDArray[np.uint32],
    expert_ids: npt.NDArray[np.int32],
    c_input_scales: F32Array | None,
    *,
    num_tiles: int,
    activation: GatedActivation | None,
    match_bf16: bool,
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The second half of `grouped_matmul_blocked_swiglu`, from its float32 products (M, 2D).

    Args:
        num_tiles: Scale tiles of the result.

    The other arguments and the results are those of that function.
    """
    if match_bf16:
        v = codecs.decode_bf16(codecs.encode_bf16(v))
    z = gated_activation(v[:, 0::2], v[:, 1::2], activation)

    m, d = z.shape
    codes = np.zeros((m, fmt.packed_k(d)), np.uint8)
    across = layouts.ceil_div(d, fmt.tile_columns)
    tiles = np.zeros((num_tiles, across, *layouts.TILE_SHAPE), np.uint8)
    first_tiles = layouts.tile_starts(expert_start, a_scale_offsets)
    for slot, expert in enumerate(expert_ids):
        rows = slice(int(expert_start[slot]), int(expert_start[slot + 1]))
        if expert < 0 or rows.start == rows.stop:
            continue
        factor = np.float32(1) if c_input_scales is None else c_input_scales[slot]
        slot_codes, scales = quantize_blocks(z[rows], fmt, factor)
        codes[rows] = slot_codes
        store_scale_tiles(tiles, int(first_tiles[slot]), scales)
    return typed(fmt, codes, tiles)
