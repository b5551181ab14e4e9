"""The block-scaled grouped matmul: decode to 16 bits, tensor-core sums, float32 scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nbmoe import codecs, layouts
from nbmoe.codecs import F32Array
from nbmoe.formats import MXFP4, MXFP8, NVFP4, BlockFormat, block_format
from nbmoe.reference import tensor_core
from nbmoe.reference.quantize import load_scale_tiles

OPERAND_EXPONENT: Final = -14  # puts every NVFP4 code * scale on float16's grid
ACCUMULATOR_FACTOR: Final = np.float32(2.0 ** (-2 * OPERAND_EXPONENT))

Operand = npt.NDArray[Any]


def formats_of(
    hidden: npt.NDArray[Any],
    weight: npt.NDArray[Any],
    a_scales: npt.NDArray[Any],
    fmt: str | BlockFormat | None,
    weight_fmt: str | BlockFormat | None,
) -> tuple[BlockFormat, BlockFormat]:
    """The formats of activations and weights: as named, else by element types.

    e4m3 codes are MXFP8, other codes with e8m0 scales MXFP4, all else NVFP4. Weights have the
    activations' format, except that packed ones beside MXFP8 are MXFP4.

    Raises:
        ConfigError: A name is no format.
    """
    if fmt is None and hidden.dtype.name == "float8_e4m3fn":
        fmt = MXFP8
    elif fmt is None:
        fmt = MXFP4 if a_scales.dtype.name == "float8_e8m0fnu" else NVFP4
    a_format = block_format(fmt, "formats_of", "format")
    if weight_fmt is None:
        is_packed = 2 * weight.shape[-1] == hidden.shape[-1]
        weight_fmt = MXFP4 if a_format is MXFP8 and is_packed else a_format
    return a_format, block_format(weight_fmt, "formats_of", "weight_format")


def decode_operand(codes: npt.NDArray[Any], scales: npt.NDArray[Any], fmt: BlockFormat) -> Operand:
    """Decodes a block format to tensor-core operands in the order in which the matmul sums them.

    NVFP4 becomes float16: code * scale * 2**-14 is exact, since e4m3 times e2m1 has at most 6
    significant bits, and its last bit weighs at least 2**-10 * 2**-14, float16's smallest
    subnormal. MX formats become bfloat16: code * scale, exact but at the ends of the exponent
    range, where it rounds to nearest even or to infinity. A NaN scale makes its whole block NaN,
    zeros included.

    Args:
        codes: (R, K) or packed (R, K/2) codes.
        scales: (R, K/block) scale bytes, row-major.
        fmt: The format of both.

    Returns:
        (R, ceil(K/64) * 64) float16 or bfloat16, K padded with zeros and grouped into steps
        (`nbmoe.layouts.group_k`).
    """
    with np.errstate(over="ignore", invalid="ignore"):
        values = decode_blocks(codes, scales, fmt)
        if fmt is NVFP4:
            return in_steps((values * np.float32(2.0**OPERAND_EXPONENT)).astype(np.float16))
    return in_steps(codecs.encode_bf16(values))


def decode_blocks(codes: npt.NDArray[Any], scales: npt.NDArray[Any], fmt: BlockFormat) -> F32Array:
    """code * scale in float32: (..., K) from codes (..., K) or (..., K/2) and row-major scales.

    Exact, except that products of MXFP8 from 2**128 on are infinite.
    """
    elements = codes.view(np.uint8)
    if fmt.per_byte == 2:
        elements = codecs.unpack_nibbles(elements)
    decode_scale = codecs.decode_e4m3 if fmt.scale == "e4m3" else codecs.decode_e8m0
    scale = decode_scale(scales.view(np.uint8))
    values = codecs.decode(elements, fmt.element).reshape(*scale.shape, fmt.block)
    with np.errstate(over="ignore"):
        return (values * scale[..., np.newaxis]).reshape(elements.shape)


def in_steps(operand: Operand) -> Operand:
    """Pads K with zeros to whole blocks of 64 and puts it in the order of the matmul's steps."""
    rows, k = operand.shape
    padded = np.zeros((rows, layouts.ceil_div(k, layouts.K_BLOCK) * layouts.K_BLOCK), operand.dtype)
    padded[:, :k] = operand
    return layouts.group_k(padded).reshape(padded.shape)


def grouped_products(
    shape: tuple[int, int],
    expert_start: npt.NDArray[np.uint32],
    expert_ids: npt.NDArray[np.int32],
    a_of: Callable[[int, slice], Operand],
    b_of: Callable[[int], Operand],
    scaled: Callable[[F32Array, int, slice], F32Array] = lambda v, expert, rows: v,
) -> F32Array:
    """The accumulators of a grouped matmul, through a function of the caller's.

    Args:
        shape: (M, N) of the result.
        expert_start: (S + 1,) prefix sums [rows].
        expert_ids: (S,) expert of each slot, -1 to skip it.
        a_of: Operand of the rows of a slot, in steps, from slot and rows.
        b_of: Operand of an expert's weight, in steps.
        scaled: What becomes of the accumulators of some rows of an expert.

    Returns:
        (M, N) float32. Rows of no slot, or of a skipped one, are 0.
    """
    result = np.zeros(shape, np.float32)
    for slot, expert in enumerate(expert_ids):
        rows = slice(int(expert_start[slot]), int(expert_start[slot + 1]))
        if expert < 0 or rows.start == rows.stop:
            continue
        accumulators = tensor_core.matmul(a_of(slot, rows), b_of(expert))
        with np.errstate(all="ignore"):
            result[rows] = scaled(accumulators, int(expert), rows)
    return result


def scaled_products(
    hidden: npt.NDArray[Any],
    weight: npt.NDArray[Any],
    a_scales: npt.NDArray[Any],
    b_scales: npt.NDArray[Any],
    expert_start: npt.NDArray[np.uint32],
    a_scale_offsets: npt.NDArray[np.uint32],
    expert_ids: npt.NDArray[np.int32],
    expert_scales: F32Array | None = None,
    *,
    format: str | BlockFormat | None = None,
    weight_format: str | BlockFormat | None = None,
    a_row_scales: npt.NDArray[Any] | None = None,
    bias: npt.NDArray[Any] | None = None,
) -> F32Array:
    """The float32 results of the grouped matmul before they are stored: what epilogues start from.

    v = acc (* 2**28 for NVFP4), times expert_scales[e], times the row's scale if there is one, plus
    bias[e]; each operation rounds once. Arguments as in `grouped_matmul_block_scaled`. Rows of no
    slot are 0.

    Returns:
        (M, N) float32.
    """
    a_format, b_format = formats_of(hidden, weight, a_scales, format, weight_format)
    n, k = weight.shape[1], hidden.shape[1] * a_format.per_byte
    first_tiles = layouts.tile_starts(expert_start, a_scale_offsets)
    a_bytes = a_scales.view(np.uint8)

    def a_of(slot: int, rows: slice) -> Operand:
        count, columns = rows.stop - rows.start, a_format.scale_columns(k)
        scales = load_scale_tiles(a_bytes, int(first_tiles[slot]), count, columns)
        return decode_operand(hidden[rows], scales, a_format)

    def b_of(expert: int) -> Operand:
        scales = layouts.deinterleave_scales(b_scales[expert], n, b_format.scale_columns(k))
        return decode_operand(weight[expert], scales, b_format)

    def scaled(v: F32Array, expert: int, rows: slice) -> F32Array:
        if a_format is NVFP4:
            v = v * ACCUMULATOR_FACTOR
        if expert_scales is not None:
            v = v * np.float32(expert_scales[expert])
        if a_row_scales is not None:
            v = v * codecs.decode_bf16(a_row_scales[rows])[:, np.newaxis]
        return v if bias is None else v + codecs.decode_bf16(bias[expert])

    return grouped_products((len(hidden), n), expert_start, expert_ids, a_of, b_of, scaled)


def grouped_matmul_block_scaled(
    hidden: npt.NDArray[Any],
    weight: npt.NDArray[Any],
    a_scales: npt.NDArray[Any],
    b_scales: npt.NDArray[Any],
    expert_start: npt.NDArray[np.uint32],
    a_scale_offsets: npt.NDArray[np.uint32],
    expert_ids: npt.NDArray[np.int32],
    expert_scales: F32Array | None = None,
    *,
    format: str | BlockFormat | None = None,
    weight_format: str | BlockFormat | None = None,
    bias: npt.NDArray[Any] | None = None,
    estimated_total_m: int | None = None,
    a_row_scales: npt.NDArray[Any] | None = None,
) -> npt.NDArray[Any]:
    """Multiplies each group of rows by its expert's weight: A @ W[e].T, scaled, in bf16.

    Args:
        hidden: (M, K) codes, packed (M, K/2) for FP4 formats.
        weight: (E, N, K) or packed (E, N, K/2) codes.
        a_scales: (tiles, ceil(K/(4 * block)), 32, 4, 4) scale tiles of `hidden`.
        b_scales: (E, ceil(N/128), ceil(K/(4 * block)), 32, 4, 4) scale tiles of `weight`.
        expert_start: (S + 1,) prefix sums: slot s owns rows expert_start[s]..expert_start[s + 1].
        a_scale_offsets: (S,) see `nbmoe.layouts.scales_offset` [128-row tiles].
        expert_ids: (S,) expert of each slot. The rows of a slot with -1 are 0.
        expert_scales: (E,) float32 factors of the result, by expert id; None for ones.
        format: Format of `hidden`, None to tell by element types.
        weight_format: Format of `weight`, None for that of `hidden` (MXFP4 if packed beside MXFP8).
        bias: (E, N) bf16 added after all factors, by expert id.
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
            format=format,
            weight_format=weight_format,
            a_row_scales=a_row_scales,
            bias=bias,
        )
    )
