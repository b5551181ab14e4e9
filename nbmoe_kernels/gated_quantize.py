"""Gated activation and block quantize: bf16 gate and up to codes and scales, or prepared tokens.

For row m and column i:

    z = activation(gate, up)                                       f32, `activation` has the formula
    output, scales = blocks of 16 (NVFP4) or 32 (MX) z             NVFP4 under input_scales[slot]

z is not rounded before it is quantized. gate and up are the halves of a row, or its even and odd
columns with is_interleaved.

Shapes: output (M, D/2) u8, for e4m3 codes (M, D), and scales (tiles, ceil(D/(4 block)), 32, 4, 4)
u8; or prepared tokens, (ceil(D/64), panel_rows, 128) u8 (`prepared_tokens`), and no scales. input
(M, 2D) bf16; row_offsets (S + 1,) u32; scales_offsets (S,) u32; expert_ids (S,) i32; input_scales
(S,) f32, not read for MX. D is a multiple of the block.

Thread map: as in `quantize_grouped`, with 16 gates and 16 up values a thread and row; one pass is
in flight while the one before is quantized, since an activation is long code.

Padding: as in `quantize_grouped`.

Synchronisation: as in `quantize_grouped`.
"""

import functools
import hashlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.activation import make_gated_activation
from nbmoe_kernels.block_quantizer import DeviceFunction
from nbmoe_kernels.device.convert import f32_of_low_bf16, permute_bytes
from nbmoe_kernels.device.grid_dependency import allow_next_grid, wait_for_previous_grid
from nbmoe_kernels.device.math import bits_f32, div_rn
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.warp import sync_warp
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.matmul_sm90_swiglu_activation import make_activate
from nbmoe_kernels.prepared_tokens import PREPARED_CC, token_base
from nbmoe_kernels.quantize_rows import clear_tiles, make_zero_rows, store_tiles
from nbmoe_kernels.quantize_tile import (
    MIN_BLOCKS,
    PASS_ROWS,
    THREADS,
    TILE_BYTES,
    amax_of_values,
    column_blocks_of,
    fill_table,
    is_usual,
    load_16,
    make_quantize_tile,
    pair_max,
    place_of_scale,
    place_of_warp,
    split_of,
)
from nbmoe_kernels.slot_search import locate_tile
from nbmoe_kernels.token_store import (
    PAIRS_OF,
    PASS_WORDS,
    ROW_WORDS,
    panel_word,
    stage_pairs,
    store_pass,
)

Activation = str | Callable[[Any, Any], Any]
_ZERO, _ONE, _TWO, _THREE = (np.uint32(n) for n in range(4))


@device_function
def load_halves(input, row, num_cols, column, is_interleaved, words, first):
    """16 gates and 16 up values from ``column`` on to words[first : first + 16], as they lie.

    ``num_cols`` is D; the row has 2 D columns. `pair_halves_up` pairs them.
    """
    start = np.uint64(row) * np.uint64(num_cols)
    at = start + np.uint64(column >> np.uint32(1))
    rest = at + np.uint64(num_cols >> np.uint32(1))
    if is_interleaved != np.uint32(0):
        at = start + np.uint64(column)
        rest = at + np.uint64(8)
    load_16(input, at, words, first)
    load_16(input, rest, words, first + 8)


@device_function
def pair_halves_up(is_interleaved, words, first):
    """words[first + i] gets gate i (low half) and up value i, of what `load_halves` loaded."""
    if is_interleaved == np.uint32(0):
        halves = cuda.local.array(16, np.uint32)
        for i in unroll(range(16)):
            halves[i] = words[first + i]
        for i in unroll(range(8)):
            words[first + 2 * i] = permute_bytes(halves[i], halves[i + 8], np.uint32(0x5410))
            words[first + 2 * i + 1] = permute_bytes(halves[i], halves[i + 8], np.uint32(0x7632))


@device_function
def load_gated(input, row, num_cols, column, is_interleaved, words, first):
    """`load_halves`, paired: words[first + i] gets gate i (low half) and up value i."""
    load_halves(input, row, num_cols, column, is_interleaved, words, first)
    pair_halves_up(is_interleaved, words, first)


def activation_name(activation: Activation) -> str:
    """A name for kernels' names: the activation's, or a function's with a hash of its content."""
    if isinstance(activation, str):
        return activation
    code = activation.__code__
    cells = (cell.cell_contents for cell in activation.__closure__ or ())
    named = [(n, activation.__globals__[n]) for n in code.co_names if n in activation.__globals__]
    named += zip(code.co_freevars, cells, strict=True)
    numbers = [(n, repr(v)) for n, v in named if isinstance(v, int | float | np.generic)]
    content = repr((code.co_code, code.co_consts, code.co_names, activation.__defaults__, numbers))
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    return f"{re.sub('[^A-Za-z0-9_]', '', activation.__name__)}_{digest}"


def _make_activate(activation: Activation) -> DeviceFunction:
    """``(words, z, alpha, limit)``: z[0..15] of the pairs in words[0..15], which are lost."""
    if isinstance(activation, str):
        return make_activate(activation, 16)
    activate_one = make_gated_activation(activation)

    @device_function
    def activate_each(words, z, alpha, limit):
        for i in unroll(range(16)):
            gate = f32_of_low_bf16(words[i])
            up = bits_f32(np.uint32(words[i] & np.uint32(0xFFFF0000)))
            z[i] = activate_one(gate, up, alpha, limit)

    return activate_each


@functools.cache
def _make_rows(format: str, rule: str, activation: Activation, is_prepared: bool) -> DeviceFunction:
    """A warp's 128 rows by 64 columns of z."""
    functions = make_quantize_tile(format, rule)
    exact = make_quantize_tile(format, rule, is_exact=True)
    scale_of, encode_values = functions.scale_of, functions.encode_values
    exact_scale_of, encode_exactly = exact.scale_of, exact.encode_values
    is_nvfp4 = format == "nvfp4"
    store_codes, word_shift = functions.store_codes, np.uint32(functions.word_shift)
    shares_block = functions.shares_block
    pair_log = np.uint32(shares_block)
    pairs_of = PAIRS_OF[format]
    activate = _make_activate(activation)

    @device_function
    def gated_rows(
        output,
        input,
        tiles,
        stage,
        table,
        lane,
        warp,
        in_block,
        panel,
        panel_rows,
        panel_row,
        first_row,
        first,
        rows,
        num_cols,
        is_interleaved,
        alpha,
        limit,
        tensor_scale,
        inverse,
    ):
        row_in_pass, t = np.uint32(lane >> _TWO), np.uint32(lane & _THREE)
        column = np.uint32(np.uint32(panel << np.uint32(6)) + np.uint32(t << np.uint32(4)))
        is_column = column < num_cols
        # Lanes past D work on what lies at column 0, for nobody.
        source_column = column if is_column else _ZERO
        tile_at = np.uint32(np.uint32(in_block >> pair_log) * np.uint32(TILE_BYTES))
        tile_at = np.uint32(tile_at + np.uint32(np.uint32(in_block & pair_log) << _ONE))
        tile_at = np.uint32(tile_at + np.uint32(t >> pair_log))
        panel_at = panel_word(panel, panel_rows, panel_row)
        staged = np.uint32(warp * np.uint32(PASS_WORDS))
        has_scale = is_column and (not shares_block or t & _ONE == _ZERO)
        words = cuda.local.array(16, np.uint32)
        z = cuda.local.array(16, np.float32)
        pairs = cuda.local.array(8, np.uint32)
        last = np.uint32(rows - _ONE)
        row = np.uint32(first + row_in_pass)
        source = np.uint32(first_row + min(row, last))
        load_halves(input, source, num_cols, source_column, is_interleaved, words, 0)
        while first < rows:
            pair_halves_up(is_interleaved, words, 0)
            activate(words, z, alpha, limit)
            row = np.uint32(first + row_in_pass)
            if np.uint32(first + np.uint32(PASS_ROWS)) < rows:
                # The next pass is on its way while this one is quantized.
                source = np.uint32(first_row + min(np.uint32(row + np.uint32(PASS_ROWS)), last))
                load_halves(input, source, num_cols, source_column, is_interleaved, words, 0)
            amax = amax_of_values(z)
            if shares_block:
                amax = pair_max(amax)
            if not is_nvfp4 or is_usual(tensor_scale):
                byte, factor = scale_of(amax, tensor_scale, inverse, table)
                w0, w1, w2, w3 = encode_values(z, byte, factor)
            elif is_nvfp4:
                byte, factor = exact_scale_of(amax, tensor_scale, inverse, table)
                w0, w1, w2, w3 = encode_exactly(z, byte, factor)
            if is_prepared:
                if not is_column:
                    byte, w0, w1, w2, w3 = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
                pairs_of(w0, w1, w2, w3, byte, pairs)
                stage_pairs(stage, staged, lane, pairs)
                sync_warp()
                at = panel_at + np.uint64(np.uint32(first * np.uint32(ROW_WORDS)))
                store_pass(output, at, stage, staged, lane, np.uint32(rows - first))
                sync_warp()
            elif is_column and row < rows:
                at = np.uint64(np.uint32(first_row + row)) * np.uint64(num_cols >> word_shift)
                store_codes(output, at + np.uint64(column >> word_shift), w0, w1, w2, w3)
                if has_scale:
                    place = np.uint32(tile_at + place_of_scale(first, row_in_pass))
                    tiles[place] = np.uint8(byte)
            first = np.uint32(first + np.uint32(PASS_ROWS))

    return gated_rows


@functools.cache
def make_gated_quantize(
    format: str, rule: str, activation: Activation, layout: str = "packed"
) -> Kernel:
    """The kernel of a format, a scale rule and an activation.

    Args:
        format: "nvfp4", "mxfp4" or "mxfp8".
        rule: how MX formats choose a scale, "rceil", "even" or "floor".
        activation: as for `nbmoe_kernels.activation.make_gated_activation`.
        layout: of the output, "packed" or "prepared".
    """
    is_prepared = layout == "prepared"
    functions = make_quantize_tile(format, rule)
    gated_rows = _make_rows(format, rule, activation, is_prepared)
    zero_rows = make_zero_rows(functions, is_prepared)
    is_nvfp4 = format == "nvfp4"
    tile_log = np.uint32(7 if functions.shares_block else 6)
    num_tiles = 2 if functions.shares_block else 4
    tile_bytes = 16 if is_prepared else 4 * TILE_BYTES
    stage_words = 4 * PASS_WORDS if is_prepared else 4
    suffix = format if rule == "rceil" else f"{format}_{rule}"
    name = f"gated_quantize_{suffix}_{activation_name(activation)}"

    @kernel(
        "global u32* output, global u32* scales, global u32* input, global u32* row_offsets, "
        "global u32* scales_offsets, global i32* expert_ids, global f32* input_scales, "
        "u32 num_active, u32 num_cols, u32 panel_rows, u32 column_blocks, u32 split, "
        "u32 is_interleaved, f32 alpha, f32 limit",
        threads=THREADS,
        min_blocks=MIN_BLOCKS,
        min_cc=PREPARED_CC if is_prepared else (8, 0),
        overlaps_previous=is_prepared,
        name=f"{name}{'_prepared' if is_prepared else ''}",
    )
    def gated_quantize(
        output,
        scales,
        input,
        row_offsets,
        scales_offsets,
        expert_ids,
        input_scales,
        num_active,
        num_cols,
        panel_rows,
        column_blocks,
        split,
        is_interleaved,
        alpha,
        limit,
    ):
        tiles = cuda.shared.array(tile_bytes, np.uint8, alignment=16)
        stage = cuda.shared.array(stage_words, np.uint32, alignment=16)
        table = cuda.shared.array(THREADS, np.float32, alignment=16)
        thread = np.uint32(cuda.threadIdx.x)
        tile = np.uint32(np.uint32(cuda.blockIdx.x) // column_blocks)
        across = np.uint32(np.uint32(cuda.blockIdx.x) - np.uint32(tile * column_blocks))
        warp = np.uint32(thread >> np.uint32(5))
        panel, in_block, first, end = place_of_warp(thread, across, split)
        lane = np.uint32(thread & np.uint32(31))
        if is_prepared:
            wait_for_previous_grid()
            allow_next_grid()
        slot, first_row, rows = locate_tile(row_offsets, scales_offsets, num_active, tile, lane)
        if rows > _ZERO:
            rows = min(rows, end)
            start = row_offsets[np.uint64(slot)]
            panel_row = np.uint32(token_base(start, slot) + np.uint32(first_row - start))
            is_active = expert_ids[np.uint64(slot)] >= np.int32(0)
            tensor_scale = np.float32(1.0)
            if is_nvfp4 and is_active:
                tensor_scale = input_scales[np.uint64(slot)]
            inverse = div_rn(np.float32(1.0), tensor_scale)
            if is_nvfp4:
                fill_table(table, thread, inverse)
            if not is_prepared:
                clear_tiles(tiles, thread)
            cuda.syncthreads()
            if np.uint32(panel << np.uint32(6)) < num_cols and first < rows:
                if is_active:
                    gated_rows(
                        output,
                        input,
                        tiles,
                        stage,
                        table,
                        lane,
                        warp,
                        in_block,
                        panel,
                        panel_rows,
                        panel_row,
                        first_row,
                        first,
                        rows,
                        num_cols,
                        is_interleaved,
                        alpha,
                        limit,
                        tensor_scale,
                        inverse,
                    )
                else:
                    zero_rows(
                        output, lane, panel, panel_rows, panel_row, first_row, first, rows, num_cols
                    )
            if not is_prepared:
                cuda.syncthreads()
                column_tiles = np.uint32(num_cols + np.uint32(np.uint32(_ONE << tile_log) - _ONE))
                column_tiles = np.uint32(column_tiles >> tile_log)
                count = np.uint32(np.uint32(num_tiles) >> split)
                first_column_tile = np.uint32(across * count)
                store_tiles(
                    scales,
                    tiles,
                    thread,
                    tile,
                    column_tiles,
                    first_column_tile,
                    count,
                )

    return gated_quantize


def launch_gated_quantize(
    executor: Executor,
    output: Any,
    scales: Any,
    input: Any,
    row_offsets: Any,
    scales_offsets: Any,
    expert_ids: Any,
    input_scales: Any,
    *,
    format: str,
    scale_rule: str,
    activation: Activation,
    alpha: float,
    limit: float,
    num_active: int,
    num_rows: int,
    num_cols: int,
    num_tiles: int,
    is_interleaved: bool,
    layout: str = "packed",
    panel_rows: int = 0,
    stream: Any = None,
) -> None:
    """Launch on flat arrays; ``num_cols`` is D, ``num_tiles`` the first dimension of ``scales``.

    The layout "prepared" neither reads nor writes ``scales``; its panels have ``panel_rows`` rows.
    """
    most = 2 if format == "nvfp4" or layout == "prepared" else 1
    split = split_of(num_rows, num_active, num_tiles, num_cols, most)
    column_blocks = column_blocks_of(num_cols, split)
    make_gated_quantize(format, scale_rule, activation, layout).launch(
        executor,
        (num_tiles * column_blocks, 1, 1),
        output,
        scales,
        input,
        row_offsets,
        scales_offsets,
        expert_ids,
        input_scales,
        num_active,
        num_cols,
        panel_rows,
        column_blocks,
        split,
        is_interleaved,
        alpha,
        limit,
        stream=stream,
    )
