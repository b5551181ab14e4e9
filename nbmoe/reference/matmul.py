"""The block-scaled grouped matmul: lossless decode to float16, tensor-core sums, float32 scales."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nbmoe import codecs, layouts
from nbmoe.codecs import F32Array, U8Array
from nbmoe.formats import NVFP4
from nbmoe.reference import tensor_core
from nbmoe.reference.quantize import load_scale_tiles

OPERAND_EXPONENT: Final = -14  # puts every code * scale on float16's grid
ACCUMULATOR_FACTOR: Final = np.float32(2.0 ** (-2 * OPERAND_EXPONENT))


def decode_operand(packed: U8Array, scales: U8Array) -> npt.NDArray[np.float16]:
    """Decodes NVFP4 to float16 operands in the order in which the matmul sums them.

    code * scale * 2**-14 is exact: e4m3 times e2m1 has at most 6 significant bits, and its last
    bit weighs at least 2**-10 * 2**-14, float16's smallest subnormal. A NaN scale makes its whole
    block NaN, zeros included.

    Args:
        packed: (R, K/2) codes.
        scales: (R, K/16) e4m3 bytes, row-major.

    Returns:
        (R, ceil(K/64) * 64) float16, K padded with zeros and grouped into steps
        (`nbmoe.layouts.group_k`).
    """
    codes = codecs.decode_e2m1(codecs.unpack_nibbles(packed))
    rows, k = codes.shape
    blocks = codes.reshape(rows, k // NVFP4.block, NVFP4.block)
    scale = codecs.decode_e4m3(scales) * np.float32(2.0**OPERAND_EXPONENT)
    padded_k = layouts.ceil_div(k, layouts.K_BLOCK) * layouts.K_BLOCK
    operand = np.zeros((rows, padded_k), np.float16)
    operand[:, :k] = (blocks * scale[..., np.newaxis]).reshape(rows, k)
    return layouts.group_k(operand).reshape(rows, padded_k)


def scaled_products(
    hidden: U8Array,
    weight: U8Array,
    a_scales: U8Array,
    b_scales: U8Array,
    expert_start: npt.NDArray[np.uint32],
    a_scale_offsets: npt.NDArray[np.uint32],
    expert_ids: npt.NDArray[np.int32],
    expert_scales: F32Array,
    a_row_scales: npt.NDArray[Any] | None = None,
) -> F32Array:
    """The float32 results of the grouped matmul before they are stored: what epilogues start from.

    v = acc * 2**28, times expert_scales[e], times the row's scale if there is one; each product
    rounds once. Arguments as in `grouped_matmul_block_scaled`. Rows of no slot are 0.

    Returns:
        (M, N) float32.
    """
    m, n, k = len(hidden), weight.shape[1], 2 * hidden.shape[1]
    result = np.zeros((m, n), np.float32)
    first_tiles = layouts.tile_starts(expert_start, a_scale_offsets)
    for slot, expert in enumerate(expert_ids):
        start, stop = int(expert_start[slot]), int(expert_start[slot + 1])
        if expert < 0 or start == stop:
            continue
        columns = k // NVFP4.block
        sfa = load_scale_tiles(a_scales, int(first_tiles[slot]), stop - start, columns)
        sfb = layouts.deinterleave_scales(b_scales[expert], n, columns)
        a = decode_operand(hidden[start:stop], sfa)
        b = decode_operand(weight[expert], sfb)
        with np.errstate(all="ignore"):
            v = tensor_core.matmul(a, b) * ACCUMULATOR_FACTOR
            v = v * np.float32(expert_scales[expert])
            if a_row_scales is not None:
                v = v * codecs.decode_bf16(a_row_scales[start:stop])[:, np.newaxis]
        result[start:stop] = v
    return result


def grouped_matmul_block_scaled(
    hidden: U8Array,
    weight: U8Array,
    a_scales: U8Array,
    b_scales: U8Array,
    expert_start: npt.NDArray[np.uint32],
    a_scale_offsets: npt.NDArray[np.uint32],
    expert_ids: npt.NDArray[np.int32],
    expert_scales: F32Array,
    *,
    estimated_total_m: int | None = None,
    a_row_scales: npt.NDArray[Any] | None = None,
) -> npt.NDArray[Any]:
    """Multiplies each group of rows by its expert's weight: A @ W[e].T, scaled, in bf16.

    Args:
        hidden: (M, K/2) packed NVFP4 codes.
        weight: (E, N, K/2) packed NVFP4 codes, N % 8 == 0.
        a_scales: (tiles, ceil(K/64), 32, 4, 4) scale tiles of `hidden`.
        b_scales: (E, ceil(N/128), ceil(K/64), 32, 4, 4) scale tiles of `weight`.
        expert_start: (S + 1,) prefix sums: slot s owns rows expert_start[s]..expert_start[s + 1].
        a_scale_offsets: (S,) see `nbmoe.layouts.scales_offset` [128-row tiles].
        expert_ids: (S,) expert of each slot. The rows of a slot with -1 are 0.
        expert_scales: (E,) float32 factors of the result, by expert id.
        estimated_total_m: Sizing hint of the kernels [rows]. It never changes the result.
        a_row_scales: (M,) bf16 further factors, by row.

    Returns:
        (M, N) bfloat16, rounded once from float32.
    """
    del estimated_total_m
    return codecs.encode_bf16(
        scaled_products(
            hidden,
            weight,
            a_scales,
            b_scales,
            expert_start,
            a_scale_offsets,
            expert_ids,
            expert_scales,
            a_row_scales,
        )
    )
