"""Block quantize: bf16 rows to codes and tiles of block scales, or to prepared tokens.

For each block of 16 (NVFP4) or 32 (MX) columns of a row: the scale of its largest magnitude and the
code of every element; `block_quantizer` has the formats' arithmetic. Output row m reads input row
m, or indices[m] // indices_divisor. Three kernels of one body:

    grouped      rows in slots; NVFP4 under sf_tensor[expert_ids[slot]]
    row_scaled   rows in slots, each times 1 / row_scales[m] and rounded to bf16 before; with relu2
                 x is bf16(max(x, 0)^2) first; NVFP4 under 1
    rows         all rows are one group; NVFP4 under tensor_scale

Shapes: output (M, K/2) u8, for e4m3 codes (M, K), and scales (tiles, ceil(K/(4 block)), 32, 4, 4)
u8; or prepared tokens, (ceil(K/64), panel_rows, 128) u8 (`prepared_tokens`), and no scales. input
(R, K) bf16; row_offsets (S + 1,) u32; scales_offsets (S,) u32; expert_ids (S,) i32; sf_tensor (E,)
f32; indices (M,) u32; row_scales (M,) bf16. K is a multiple of the block. Arrays that a kernel has
no use for are not read, nor are expert_ids without has_ids.

Thread map: `quantize_tile`; block x handles scale tile x / column_blocks, and of its columns the
(x % column_blocks)-th 256, 128 or 64, as split is 0, 1 or 2. Scale bytes meet in shared memory and
leave as whole tiles.

Padding: rows past the slot's last and columns past K get scale 0 and no codes; prepared elements
past K are 0. Tiles and prepared rows that belong to no slot are not written. A slot with expert id
-1 gets zeros.

Synchronisation: blocks of 32 join two lanes' maxima by a butterfly shuffle of the whole warp. A
block barrier stands between the zeroing of the tiles and the filling of the NVFP4 table on one side
and the rows on the other, and one between the scale bytes' stores and the tiles'. Prepared rows: as
in `token_store`, the warp meets on both sides of its copies; that kernel may start while the
previous one ends, and waits for it before it reads memory.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.grid_dependency import allow_next_grid, wait_for_previous_grid
from nbmoe_kernels.device.math import div_rn
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.prepared_tokens import PREPARED_CC, token_base
from nbmoe_kernels.quantize_rows import (
    PASSES,
    STAGE_WORDS,
    clear_tiles,
    make_load_rows,
    make_quantize_rows,
    make_zero_rows,
    reciprocal_of,
    store_tiles,
)
from nbmoe_kernels.quantize_tile import (
    MIN_BLOCKS,
    THREADS,
    TILE_BYTES,
    TILE_ROWS,
    column_blocks_of,
    fill_table,
    is_usual,
    make_quantize_tile,
    place_of_warp,
    split_of,
)
from nbmoe_kernels.slot_search import locate_tile

_ZERO, _ONE = np.uint32(0), np.uint32(1)


@device_function
def _locate_in_all(row_offsets, scales_offsets, num_rows, tile, lane):
    """(0, first row, rows) of a tile of all rows."""
    first_row = np.uint32(tile * np.uint32(TILE_ROWS))
    return _ZERO, first_row, np.uint32(num_rows - first_row)


@functools.cache
def make_quantize(
    kind: str,
    format: str = "nvfp4",
    rule: str = "rceil",
    layout: str = "packed",
    passes: int = PASSES,
) -> Kernel:
    """The kernel of a kind: "grouped", "row_scaled" (NVFP4 only) or "rows".

    Args:
        kind: see above.
        format: "nvfp4", "mxfp4" or "mxfp8".
        rule: how MX formats choose a scale, "rceil", "even" or "floor".
        layout: of the output, "packed" or "prepared".
        passes: of eight rows whose loads are in flight together, 1, 2 or 4.
    """
    has_slots, rescales = kind != "rows", kind == "row_scaled"
    is_prepared = layout == "prepared"
    locate = locate_tile if has_slots else _locate_in_all
    is_nvfp4 = format == "nvfp4"
    has_factors = kind == "grouped" and is_nvfp4
    functions = make_quantize_tile(format, rule)
    load_rows, load_row = make_load_rows(passes), make_load_rows(1)
    num_words = 8 * passes
    quantize_rows = make_quantize_rows(functions, is_prepared, rescales, passes)
    exact = make_quantize_tile(format, rule, is_exact=True)
    quantize_exactly = make_quantize_rows(exact, is_prepared, rescales, 1)
    zero_rows = make_zero_rows(functions, is_prepared)
    tile_log = np.uint32(7 if functions.shares_block else 6)
    num_tiles = 2 if functions.shares_block else 4
    tile_bytes = 16 if is_prepared else 4 * TILE_BYTES
    stage_words = STAGE_WORDS if is_prepared else 4
    suffix = format if rule == "rceil" else f"{format}_{rule}"

    @kernel(
        "global u32* output, global u32* scales, global u32* input, global u32* row_offsets, "
        "global u32* scales_offsets, global i32* expert_ids, global f32* sf_tensor, "
        "global u32* indices, global u16* row_scales, u32 num_active, u32 num_rows, u32 num_cols, "
        "u32 panel_rows, u32 column_blocks, u32 split, u32 indices_divisor, "
        "u32 indices_reciprocal, u32 has_indices, u32 has_ids, u32 relu2, f32 tensor_scale",
        threads=THREADS,
        min_blocks=MIN_BLOCKS - is_prepared,
        min_cc=PREPARED_CC if is_prepared else (8, 0),
        overlaps_previous=is_prepared,
        name=f"quantize_{kind}_{suffix}{'_prepared' if is_prepared else ''}",
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
        panel_rows,
        column_blocks,
        split,
        indices_divisor,
        indices_reciprocal,
        has_indices,
        has_ids,
        relu2,
        tensor_scale,
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
        count = num_active if has_slots else num_rows
        slot, first_row, rows = locate(row_offsets, scales_offsets, count, tile, lane)
        if rows > _ZERO:
            rows = min(rows, end)
            has_part = np.uint32(panel << np.uint32(6)) < num_cols and first < rows
            words = cuda.local.array(num_words, np.uint32)
            if has_part:
                # Under way while the slot's expert and its factor are looked up.
                load_rows(
                    input,
                    indices,
                    words,
                    lane,
                    panel,
                    first_row,
                    rows,
                    first,
                    num_cols,
                    indices_divisor,
                    indices_reciprocal,
                    has_indices,
                )
            expert = np.int32(0)
            panel_row = first_row
            if has_slots:
                if has_ids != _ZERO:
                    expert = expert_ids[np.uint64(slot)]
                start = row_offsets[np.uint64(slot)]
                panel_row = np.uint32(token_base(start, slot) + np.uint32(first_row - start))
            if has_factors and expert >= np.int32(0):
                tensor_scale = sf_tensor[np.uint64(expert)]
            inverse = div_rn(np.float32(1.0), tensor_scale)
            if is_nvfp4:
                fill_table(table, thread, inverse)
            if not is_prepared:
                clear_tiles(tiles, thread)
            cuda.syncthreads()
            if has_part:
                if expert < np.int32(0):
                    zero_rows(
                        output, lane, panel, panel_rows, panel_row, first_row, first, rows, num_cols
                    )
                elif not is_nvfp4 or is_usual(tensor_scale):
                    quantize_rows(
                        output,
                        input,
                        indices,
                        row_scales,
                        tiles,
                        stage,
                        table,
                        words,
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
                        indices_divisor,
                        indices_reciprocal,
                        has_indices,
                        relu2,
                        tensor_scale,
                        inverse,
                    )
                elif is_nvfp4:
                    load_row(
                        input,
                        indices,
                        words,
                        lane,
                        panel,
                        first_row,
                        rows,
                        first,
                        num_cols,
                        indices_divisor,
                        indices_reciprocal,
                        has_indices,
                    )
                    quantize_exactly(
                        output,
                        input,
                        indices,
                        row_scales,
                        tiles,
                        stage,
                        table,
                        words,
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
                        indices_divisor,
                        indices_reciprocal,
                        has_indices,
                        relu2,
                        tensor_scale,
                        inverse,
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
    layout: str = "packed",
    num_rows: int = 0,
    panel_rows: int = 0,
    stream: Any = None,
) -> None:
    """Launch on flat arrays, in the kernel's parameter types.

    ``num_active`` is the number of slots, ``num_rows`` that of output rows, by which the launch is
    shaped; ``num_tiles`` is the first dimension of ``scales``, which the layout "prepared" neither
    reads nor writes. Without ``has_indices`` the array ``indices`` is not read, for MX formats nor
    is ``sf_tensor``. ``panel_rows``: rows of a prepared panel.
    """
    most = 2 if format == "nvfp4" or layout == "prepared" else 1
    split = split_of(num_rows, num_active, num_tiles, num_cols, most)
    column_blocks = column_blocks_of(num_cols, split)
    make_quantize("grouped", format, scale_rule, layout).launch(
        executor,
        (num_tiles * column_blocks, 1, 1),
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
        panel_rows,
        column_blocks,
        split,
        indices_divisor,
        reciprocal_of(indices_divisor),
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
    num_rows: int,
    num_cols: int,
    num_tiles: int,
    indices_divisor: int,
    has_indices: bool,
    has_ids: bool,
    relu2: bool,
    stream: Any = None,
) -> None:
    """Launch on flat arrays; ``row_scales`` is read, so `launch_row_scales` comes before."""
    split = split_of(num_rows, num_active, num_tiles, num_cols, 2)
    column_blocks = column_blocks_of(num_cols, split)
    make_quantize("row_scaled").launch(
        executor,
        (num_tiles * column_blocks, 1, 1),
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
        0,
        column_blocks,
        split,
        indices_divisor,
        reciprocal_of(indices_divisor),
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
    most = 2 if format == "nvfp4" else 1
    split = split_of(num_rows, 1, -(-num_rows // 128), num_cols, most)
    column_blocks = column_blocks_of(num_cols, split)
    make_quantize("rows", format, scale_rule).launch(
        executor,
        (-(-num_rows // 128) * column_blocks, 1, 1),
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
        0,
        column_blocks,
        split,
        1,
        reciprocal_of(1),
        False,
        False,
        False,
        tensor_scale,
        stream=stream,
    )
