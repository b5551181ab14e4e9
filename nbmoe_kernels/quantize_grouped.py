"""Block quantize: bf16 rows to codes and 5-D tiles of block scales, in three kernels of one body.

For each block of 16 (NVFP4) or 32 (MX) columns of a row: the scale of its largest magnitude and the
code of every element; `block_quantizer` has the formats' arithmetic. Output row m reads input row
m, or indices[m] // indices_divisor.

    grouped      rows in slots; NVFP4 under sf_tensor[expert_ids[slot]]
    row_scaled   rows in slots, each times 1 / row_scales[m] and rounded to bf16 before; with relu2
                 x is bf16(max(x, 0)^2) first; NVFP4 under 1
    rows         all rows are one group; NVFP4 under tensor_scale

Shapes: output (M, K/2) u8, for e4m3 codes (M, K); scales (tiles, ceil(K/(4 block)), 32, 4, 4) u8;
input (R, K) bf16; row_offsets (S + 1,) u32; scales_offsets (S,) u32; expert_ids (S,) i32; sf_tensor
(E,) f32; indices (M,) u32; row_scales (M,) bf16. K is a multiple of the block. Arrays that a kernel
has no use for are not read, nor are expert_ids without has_ids.

Thread map: block (x, y) handles scale tile x (128 rows of one slot) and columns [64 y, 64 y + 64),
or 128 columns for blocks of 32; its threads as in `quantize_tile`. Scale bytes meet in shared
memory and leave as one contiguous 512-byte tile.

Padding: rows past the slot's last and columns past K get scale 0 and no codes; tiles that belong to
no slot are not written. A slot with expert id -1 gets zeros.

Synchronisation: blocks of 32 join two lanes' maxima by a butterfly shuffle of the whole warp; one
block barrier between the scale bytes' stores and the tile's stores (128 threads arrive and wait).
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.math import div_rn
from nbmoe_kernels.device.memory import load_shared_word
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.quantize_tile import (
    PASSES,
    THREADS,
    amax_of_words,
    load_16,
    make_quantize_tile,
    pair_max,
    rescale_16,
)
from nbmoe_kernels.search import TILE_ROWS, locate_rows

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
THREAD_WORDS = 8 * PASSES


@device_function
def locate_in_slot(row_offsets, scales_offsets, num_active, num_rows, tile):
    """(slot, first row, rows) of a tile of a slot."""
    return locate_rows(row_offsets, scales_offsets, num_active, tile, np.uint32(0))


@device_function
def locate_in_all(row_offsets, scales_offsets, num_active, num_rows, tile):
    """(0, first row, rows) of a tile of all rows."""
    first_row = np.uint32(tile * TILE_ROWS)
    return np.uint32(0), first_row, np.uint32(num_rows - first_row)


@device_function
def divide_by_row_scale(words, at, row_scales, row, relu2):
    """Rescale the 16 bf16 in words[at : at + 8]."""
    rescale_16(words, at, np.uint32(row_scales[np.uint64(row)]), relu2)


@device_function
def leave(words, at, row_scales, row, relu2):
    """Keep the bf16 as they are."""


@functools.cache
def make_quantize(kind: str, format: str = "nvfp4", rule: str = "rceil") -> Kernel:
    """The kernel of a kind: "grouped", "row_scaled" (NVFP4 only) or "rows".

    Args:
        kind: see above.
        format: "nvfp4", "mxfp4" or "mxfp8".
        rule: how MX formats choose a scale, "rceil", "even" or "floor".
    """
    has_slots = kind != "rows"
    locate = locate_in_slot if has_slots else locate_in_all
    prepare = divide_by_row_scale if kind == "row_scaled" else leave
    has_factors = kind == "grouped" and format == "nvfp4"
    tile_map = make_quantize_tile(format, rule)
    block_scale = tile_map.quantizer.block_scale
    encode_words, store_codes = tile_map.encode_words, tile_map.store_codes
    shares_block, scale_shift = tile_map.shares_block, np.uint32(tile_map.shares_block)
    groups, pass_rows = tile_map.groups, tile_map.pass_rows
    lane_bits = tile_map.lanes.bit_length() - 1
    columns, word_shift = tile_map.columns, np.uint32(tile_map.word_shift)
    suffix = format if rule == "rceil" else f"{format}_{rule}"

    @kernel(
        "global u32* output, global u32* scales, global u32* input, global u32* row_offsets, "
        "global u32* scales_offsets, global i32* expert_ids, global f32* sf_tensor, "
        "global u32* indices, global u16* row_scales, u32 num_active, u32 num_rows, u32 num_cols, "
        "u32 indices_divisor, u32 has_indices, u32 has_ids, u32 relu2, f32 tensor_scale",
        threads=THREADS,
        name=f"quantize_{kind}_{suffix}",
    )
    def quantize(
        output,
        scales,
        input,
        row_offsets,
        scales_offsets,
        expert_ids,
        sf_tensor,
        indices,
        row_scales,
        num_active,
        num_rows,
        num_cols,
        indices_divisor,
        has_indices,
        has_ids,
        relu2,
        tensor_scale,
    ):
        scale_bytes = cuda.shared.array(512, np.uint8, alignment=16)
        tile = np.uint32(cuda.blockIdx.x)
        column_tile = np.uint32(cuda.blockIdx.y)
        thread = np.uint32(cuda.threadIdx.x)
        expert = np.int32(0)
        slot, first_row, rows = locate(row_offsets, scales_offsets, num_active, num_rows, tile)
        if rows > np.uint32(0):
            if has_slots and has_ids != np.uint32(0):
                expert = expert_ids[np.uint64(slot)]
            if has_factors and expert >= np.int32(0):
                tensor_scale = sf_tensor[np.uint64(expert)]
            lane_row = np.uint32(thread >> np.uint32(lane_bits))
            lane = np.uint32(thread & np.uint32((1 << lane_bits) - 1))
            column = np.uint32(
                np.uint32(column_tile * np.uint32(columns)) + np.uint32(lane * np.uint32(16))
            )
            is_active = expert >= np.int32(0)
            inverse = div_rn(_ONE, tensor_scale)
            words = cuda.local.array(THREAD_WORDS, np.uint32)
            for group in unroll(range(groups)):
                # All loads of a group are issued before the first is used.
                for p in unroll(range(PASSES)):
                    row = np.uint32(lane_row + np.uint32(pass_rows * (PASSES * group + p)))
                    if column < num_cols and is_active and row < rows:
                        source = np.uint32(first_row + row)
                        if has_indices != np.uint32(0):
                            source = np.uint32(indices[np.uint64(source)] // indices_divisor)
                        at = np.uint64(source) * np.uint64(num_cols >> np.uint32(1)) + np.uint64(
                            column >> np.uint32(1)
                        )
                        load_16(input, at, words, 8 * p)
                for p in unroll(range(PASSES)):
                    row = np.uint32(lane_row + np.uint32(pass_rows * (PASSES * group + p)))
                    is_row = row < rows and column < num_cols
                    if is_row and is_active:
                        prepare(words, 8 * p, row_scales, np.uint32(first_row + row), relu2)
                    amax = _ZERO
                    if shares_block:
                        if is_row and is_active:
                            amax = amax_of_words(words, 8 * p)
                        amax = pair_max(amax)
                    code = np.uint32(0)
                    if is_row:
                        w0 = np.uint32(0)
                        w1 = np.uint32(0)
                        w2 = np.uint32(0)
                        w3 = np.uint32(0)
                        if is_active:
                            if not shares_block:
                                amax = amax_of_words(words, 8 * p)
                            code, multiplier = block_scale(amax, tensor_scale, inverse)
                            w0, w1, w2, w3 = encode_words(words, 8 * p, code, multiplier)
                        at = np.uint64(np.uint32(first_row + row)) * np.uint64(
                            num_cols >> word_shift
                        ) + np.uint64(column >> word_shift)
                        store_codes(output, at, w0, w1, w2, w3)
                    in_tile = pass_rows * (PASSES * group + p)
                    byte = np.uint32(
                        np.uint32(lane_row + np.uint32(in_tile % 32)) * np.uint32(16)
                    ) + np.uint32(4 * (in_tile // 32))
                    byte = np.uint32(byte + np.uint32(lane >> scale_shift))
                    if not shares_block or lane & np.uint32(1) == np.uint32(0):
                        scale_bytes[byte] = np.uint8(code)
            cuda.syncthreads()
            column_tiles = np.uint64(cuda.gridDim.y)
            at = (np.uint64(tile) * column_tiles + np.uint64(column_tile)) * np.uint64(128)
            scales[at + np.uint64(thread)] = load_shared_word(
                scale_bytes, np.uint32(thread * np.uint32(4))
            )

    return quantize


def launch_quantize_grouped(
    executor: Executor,
    output: Any,
    scales: Any,
    input: Any,
    row_offsets: Any,
    scales_offsets: Any,
    expert_ids: Any,
    sf_tensor: Any,
    indices: Any,
    *,
    num_active: int,
    num_cols: int,
    num_tiles: int,
    indices_divisor: int,
    has_indices: bool,
    format: str = "nvfp4",
    scale_rule: str = "rceil",
    stream: Any = None,
) -> None:
    """Launch on flat arrays, in the kernel's parameter types.

    ``num_active`` is the number of slots, ``num_tiles`` the first dimension of ``scales``. Without
    ``has_indices`` the array ``indices`` is not read, for MX formats nor is ``sf_tensor``.
    """
    columns = make_quantize_tile(format, scale_rule).columns
    make_quantize("grouped", format, scale_rule).launch(
        executor,
        (num_tiles, -(-num_cols // columns), 1),
        output,
        scales,
        input,
        row_offsets,
        scales_offsets,
        expert_ids,
        sf_tensor,
        indices,
        indices,
        num_active,
        0,
        num_cols,
        indices_divisor,
        has_indices,
        True,
        False,
        1.0,
        stream=stream,
    )


def launch_quantize_row_scaled(
    executor: Executor,
    output: Any,
    scales: Any,
    row_scales: Any,
    input: Any,
    row_offsets: Any,
    scales_offsets: Any,
    expert_ids: Any,
    indices: Any,
    *,
    num_active: int,
    num_cols: int,
    num_tiles: int,
    indices_divisor: int,
    has_indices: bool,
    has_ids: bool,
    relu2: bool,
    stream: Any = None,
) -> None:
    """Launch on flat arrays; ``row_scales`` is read, so `launch_row_scales` comes before."""
    columns = make_quantize_tile("nvfp4", "rceil").columns
    make_quantize("row_scaled").launch(
        executor,
        (num_tiles, -(-num_cols // columns), 1),
        output,
        scales,
        input,
        row_offsets,
        scales_offsets,
        expert_ids,
        indices,
        indices,
        row_scales,
        num_active,
        0,
        num_cols,
        indices_divisor,
        has_indices,
        has_ids,
        relu2,
        1.0,
        stream=stream,
    )


def launch_quantize_rows(
    executor: Executor,
    output: Any,
    scales: Any,
    input: Any,
    nothing: Any,
    *,
    num_rows: int,
    num_cols: int,
    tensor_scale: float,
    format: str,
    scale_rule: str,
    stream: Any = None,
) -> None:
    """Launch on all ``num_rows`` rows; ``nothing`` stands for the arrays that are not read."""
    columns = make_quantize_tile(format, scale_rule).columns
    make_quantize("rows", format, scale_rule).launch(
        executor,
        (-(-num_rows // 128), -(-num_cols // columns), 1),
        output,
        scales,
        input,
        nothing,
        nothing,
        nothing,
        nothing,
        nothing,
        nothing,
        0,
        num_rows,
        num_cols,
        1,
        False,
        False,
        False,
        tensor_scale,
        stream=stream,
    )
