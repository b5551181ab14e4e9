"""Packed tokens to prepared tokens (`prepared_tokens`): code * scale as 16-bit operands, in panels.

Shapes: output (ceil(K/64), R, 128) u8 with R = panel_rows; input (M, K/2) or, for e4m3 codes,
(M, K) u8, or (M, K) bf16; scales (tiles, ceil(K/(4 block)), 32, 4, 4) u8, not read for bf16;
row_offsets (S + 1,) u32; scales_offsets (S,) u32, not read for bf16. K is a multiple of the block,
of 8 for bf16. Without slots neither offsets are read.

Thread map: as in `quantize_grouped`; in a pass lane 4 g + t has the 16-block t of row g of eight,
and four passes are in flight.

Padding: elements past K are 0. Rows that no slot owns are not written.

Synchronisation: each warp meets between its stores to shared memory and its loads of them, and
again before the next stores there. Warps share nothing. The kernel may start while the previous
one ends, and waits for it before it reads memory.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.decode import pair_halves
from nbmoe_kernels.device.grid_dependency import allow_next_grid, wait_for_previous_grid
from nbmoe_kernels.device.memory import load_v2, load_v4
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.warp import sync_warp
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.prepared_tokens import PREPARED_CC, TOKEN_FORMATS, token_base, token_rows
from nbmoe_kernels.quantize_tile import THREADS, column_blocks_of, place_of_warp, split_of
from nbmoe_kernels.search import TILE_ROWS, locate_row_block, row_blocks
from nbmoe_kernels.slot_search import locate_tile
from nbmoe_kernels.token_store import (
    PAIRS_OF,
    PASS_WORDS,
    ROW_WORDS,
    panel_word,
    stage_pairs,
    store_pass,
)

PASSES = 4
MIN_BLOCKS = 8
"""Blocks on an SM, so that enough loads are in flight."""

_ONE, _TWO, _THREE = np.uint32(1), np.uint32(2), np.uint32(3)


@device_function
def _locate_tile(row_offsets, scales_offsets, num_active, num_rows, tile, lane):
    """(first row, rows, first panel row) of a scale tile."""
    slot, first, rows = locate_tile(row_offsets, scales_offsets, num_active, tile, lane)
    start = row_offsets[np.uint64(slot)]
    return first, rows, np.uint32(token_base(start, slot) + np.uint32(first - start))


@device_function
def _locate_block(row_offsets, scales_offsets, num_active, num_rows, tile, lane):
    """(first row, rows, first panel row) of the tile-th block of 128 rows of a slot."""
    slot, row, rows = locate_row_block(row_offsets, num_active, tile, TILE_ROWS)
    start = row_offsets[np.uint64(slot)]
    return np.uint32(start + row), rows, np.uint32(token_base(start, slot) + row)


@device_function
def _locate_in_all(row_offsets, scales_offsets, num_active, num_rows, tile, lane):
    """(first row, rows, first panel row) of a tile of all rows."""
    first = np.uint32(tile * TILE_ROWS)
    return first, np.uint32(num_rows - first), first


@device_function
def _load_e2m1(input, row, k, column, words, at):
    i = np.uint64(row) * np.uint64(k >> _THREE) + np.uint64(column >> _THREE)
    words[at], words[at + 1] = load_v2(input, i)


@device_function
def _load_e4m3(input, row, k, column, words, at):
    i = np.uint64(row) * np.uint64(k >> _TWO) + np.uint64(column >> _TWO)
    words[at], words[at + 1], words[at + 2], words[at + 3] = load_v4(input, i)


@device_function
def _load_bf16(input, row, k, column, words, at):
    i = np.uint64(row) * np.uint64(k >> _ONE) + np.uint64(column >> _ONE)
    words[at], words[at + 1], words[at + 2], words[at + 3] = load_v4(input, i)
    # K may end in the middle of the 16.
    half = np.uint32(column + np.uint32(8)) < k
    for j in unroll(range(4, 8)):
        words[at + j] = np.uint32(0)
    if half:
        a, b, c, d = load_v4(input, i + np.uint64(4))
        words[at + 4], words[at + 5], words[at + 6], words[at + 7] = a, b, c, d


_LOADS = {"nvfp4": (_load_e2m1, 2), "mxfp4": (_load_e2m1, 2), "mxfp8": (_load_e4m3, 4)}
_LOADS["bf16"] = (_load_bf16, 8)
"""By format: loads a lane's 16 elements, and their words."""


def _make_decode(format: str) -> Callable[..., Any]:
    """``(words, at, byte, pairs)`` makes pairs of the 16 elements from words[at] on."""
    width = _LOADS[format][1]
    if format == "bf16":

        @device_function
        def pair_bf16(words, at, byte, pairs):
            a, b, c, d = words[at], words[at + 1], words[at + 2], words[at + 3]
            pair_halves(a, b, c, d, pairs, 0, 2)
            a, b, c, d = words[at + 4], words[at + 5], words[at + 6], words[at + 7]
            pair_halves(a, b, c, d, pairs, 1, 2)

        return pair_bf16
    pairs_of = PAIRS_OF[format]

    @device_function
    def decode(words, at, byte, pairs):
        w2, w3 = np.uint32(0), np.uint32(0)
        if width == 4:
            w2, w3 = words[at + 2], words[at + 3]
        pairs_of(words[at], words[at + 1], w2, w3, byte, pairs)

    return decode


@functools.cache
def make_prepare_tokens(format: str, has_slots: bool = True) -> Kernel:
    """The kernel of a format, for rows in slots or for all rows alike."""
    load, width = _LOADS[format]
    has_scales = format != "bf16"
    in_slots = _locate_tile if has_scales else _locate_block
    locate = in_slots if has_slots else _locate_in_all
    decode = _make_decode(format)
    # A scale tile is as wide as one warp's columns, or as two warps'.
    pair_log = np.uint32(TOKEN_FORMATS[format] == 32)
    num_words = width * PASSES
    stage_words = THREADS // 32 * PASSES * PASS_WORDS

    @kernel(
        "global u32* output, global u32* input, global u8* scales, global u32* row_offsets, "
        "global u32* scales_offsets, u32 num_active, u32 num_rows, u32 panel_rows, u32 k, "
        "u32 column_blocks, u32 split",
        threads=THREADS,
        min_blocks=MIN_BLOCKS,
        min_cc=PREPARED_CC,
        overlaps_previous=True,
        name=f"prepare_tokens_{format}{'' if has_slots else '_rows'}",
    )
    def prepare_tokens(
        output,
        input,
        scales,
        row_offsets,
        scales_offsets,
        num_active,
        num_rows,
        panel_rows,
        k,
        column_blocks,
        split,
    ):
        stage = cuda.shared.array(stage_words, np.uint32, alignment=16)
        thread = np.uint32(cuda.threadIdx.x)
        tile = np.uint32(np.uint32(cuda.blockIdx.x) // column_blocks)
        across = np.uint32(np.uint32(cuda.blockIdx.x) - np.uint32(tile * column_blocks))
        warp, lane = np.uint32(thread >> np.uint32(5)), np.uint32(thread & np.uint32(31))
        panel, _, first, end = place_of_warp(thread, across, split)
        row_in_pass, t = np.uint32(lane >> _TWO), np.uint32(lane & _THREE)
        wait_for_previous_grid()
        allow_next_grid()
        first_row, rows, base = locate(
            row_offsets, scales_offsets, num_active, num_rows, tile, lane
        )
        rows = min(rows, end)
        if np.uint32(panel << np.uint32(6)) < k and first < rows:
            last = np.uint32(rows - _ONE)
            column = np.uint32(np.uint32(panel << np.uint32(6)) + np.uint32(t << np.uint32(4)))
            is_column = column < k
            column_tiles = np.uint32(k + np.uint32(np.uint32(64 << pair_log) - _ONE))
            column_tiles = np.uint32(column_tiles >> np.uint32(np.uint32(6) + pair_log))
            at_scale = np.uint64(tile) * np.uint64(column_tiles)
            at_scale = (at_scale + np.uint64(panel >> pair_log)) * np.uint64(512)
            in_tile = np.uint32(np.uint32(panel & pair_log) << _ONE)
            at_scale = at_scale + np.uint64(np.uint32(in_tile + np.uint32(t >> pair_log)))
            panel_at = panel_word(panel, panel_rows, base)
            staged = np.uint32(warp * np.uint32(PASSES * PASS_WORDS))
            words = cuda.local.array(num_words, np.uint32)
            bytes = cuda.local.array(PASSES, np.uint32)
            pairs = cuda.local.array(8, np.uint32)
            while first < rows:
                for p in unroll(range(PASSES)):
                    for j in unroll(range(width)):
                        words[width * p + j] = np.uint32(0)
                    bytes[p] = np.uint32(0)
                    row = np.uint32(first + np.uint32(row_in_pass + np.uint32(8 * p)))
                    row = min(row, last)
                    if is_column:
                        load(input, np.uint32(first_row + row), k, column, words, width * p)
                        if has_scales:
                            low = np.uint32(np.uint32(row & np.uint32(31)) << np.uint32(4))
                            high = np.uint32(np.uint32(row >> np.uint32(5)) << _TWO)
                            bytes[p] = np.uint32(scales[at_scale + np.uint64(low + high)])
                for p in unroll(range(PASSES)):
                    if np.uint32(first + np.uint32(8 * p)) < rows:
                        decode(words, width * p, bytes[p], pairs)
                        at = np.uint32(staged + np.uint32(p * PASS_WORDS))
                        stage_pairs(stage, at, lane, pairs)
                sync_warp()
                for p in unroll(range(PASSES)):
                    row = np.uint32(first + np.uint32(8 * p))
                    if row < rows:
                        at = panel_at + np.uint64(np.uint32(row * np.uint32(ROW_WORDS)))
                        source = np.uint32(staged + np.uint32(p * PASS_WORDS))
                        store_pass(output, at, stage, source, lane, np.uint32(rows - row))
                sync_warp()
                first = np.uint32(first + np.uint32(8 * PASSES))

    return prepare_tokens


def launch_prepare_tokens(
    executor: Executor,
    output: Any,
    input: Any,
    scales: Any,
    row_offsets: Any,
    scales_offsets: Any,
    *,
    format: str,
    num_active: int,
    num_rows: int,
    num_tiles: int,
    k: int,
    stream: Any = None,
) -> None:
    """Launch on flat arrays.

    ``num_active`` is 0 for rows without slots; arrays of which the kernel then has no use are not
    read. ``num_tiles`` is the first dimension of ``scales``, of no use for bf16 and without slots.
    """
    tiles = num_tiles
    if num_active == 0:
        tiles = -(-num_rows // 128)
    elif format == "bf16":
        tiles = row_blocks(num_rows, num_active, 128)
    split = split_of(num_rows, max(num_active, 1), tiles, k, 2)
    column_blocks = column_blocks_of(k, split)
    make_prepare_tokens(format, num_active > 0).launch(
        executor,
        (tiles * column_blocks, 1, 1),
        output,
        input,
        scales,
        row_offsets,
        scales_offsets,
        num_active,
        num_rows,
        token_rows(num_rows, max(num_active, 1)),
        k,
        column_blocks,
        split,
        stream=stream,
    )
