"""The whole FFN in one launch for sm_80 and up: gate/up, activation, requantization and down.

    z[m, i]      = activation(gate, up)      gate, up: rows 2i and 2i + 1 of the gate/up matmul
    c_packed[m]  = z[m] in blocks of the rows' format, with their scales in c_swiglu_scales
    output[m, j] = bf16(sum_i c[m, i] * down_weight[e, j, i] * down_scales[e] + down_bias[e, j])

each step as in `matmul_grouped_swiglu_sm80` and `matmul_grouped_sm80`, whose bytes it has.

Shapes: as theirs; up_weight (E, 2D, K), down_weight (E, N, D); output (M, N) bf16 as u32 words;
c_packed and c_swiglu_scales are scratch, given twice, as they are written and as they are read;
counters u32, 0 before and after, as many as `most_counters` says.

Thread map: blocks are persistent and take tiles of both matmuls, BLOCK_M rows of a slot times 128
weight rows, in the order of `mega_ffn_order`, whose segments are the row blocks of
`nbmoe_kernels.search.locate_row_block`: some have no rows. A tile's threads are those of
`matmul_tile_sm80`. A slot with expert id -1 has no gate/up tiles, and down tiles of 0.

Synchronisation, beside the mainloop's:
    block barrier   before each tile: its number is there, and nobody reads the last one's shared
                    memory any more. Numbers take turns in two words: the next one is written before
                    the next barrier, which nobody reaches who has not read this one
    counters        one draws a tile's number, while many are left a tile ahead;
                    gate/up: all threads have stored, block barrier, one adds 1 (release, GPU);
                    down: one waits until all tiles of the row block have (acquire, GPU), block
                    barrier. Loads and cp.async are of the generic proxy: nothing else orders them.
                    Then it adds 1 itself; the last down tile puts 0 back, behind all waits
    scale tiles     are shared by the row blocks of a slot, but a scale word is one row's, and the
                    rows that the slot's last row block clears are read by no down tile
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.op import unroll
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.matmul_config import BLOCK_N, MatmulConfig
from nbmoe_kernels.matmul_grouped_sm80 import make_store_tile
from nbmoe_kernels.matmul_grouped_swiglu_sm80 import (
    fused_shared_bytes,
    make_fuse_tile,
    scale_type_of,
)
from nbmoe_kernels.matmul_tile_sm80 import make_accumulate, make_locate
from nbmoe_kernels.mega_ffn_counters import (
    count_tile,
    draw_tile,
    end_draws,
    leave_counter,
    wait_for_tiles,
)
from nbmoe_kernels.mega_ffn_order import (
    SEGMENT_BITS,
    TILE_BITS,
    are_plenty,
    chunk_segments,
    is_down_tile,
    make_find_item,
    segment_of,
    tile_of,
)
from nbmoe_kernels.mega_ffn_sm80_config import (
    blocks_per_sm,
    mega_ffn_shared_bytes,
    most_segments,
)

_ZERO, _ONE = np.uint32(0), np.uint32(1)


@functools.cache
def make_mega_ffn_sm80(
    config: MatmulConfig, match_bf16: bool = True, activation: str = "silu"
) -> Kernel:
    """The kernel for a pair of operands, a tile shape and an activation."""
    fragments, scale_type = config.fragments, scale_type_of(config)
    locate, accumulate = make_locate(config), make_accumulate(config)
    fuse_tile, store_tile = make_fuse_tile(config, match_bf16, activation), make_store_tile(config)
    find_item, numbers_at = make_find_item(), fused_shared_bytes(config) // 4
    assert numbers_at % 2 == 0, "the two words differ in one bit"

    @kernel(
        f"global u32* output, global u32* c_packed, global {scale_type}* c_swiglu_scales, "
        "global u32* counters, global u8* c_bytes, global u8* c_scale_bytes, global u8* hidden, "
        "global u8* up_weight, global u8* down_weight, global u8* a_scales, "
        "global u8* up_b_scales, global u8* down_b_scales, global u32* expert_start, "
        "global u32* a_scale_offsets, global i32* expert_ids, global f32* up_scales, "
        "global f32* down_scales, global f32* c_input_scales, global u16* a_row_scales, "
        "global u16* up_bias, global u16* down_bias, u32 segments, u32 num_active, u32 num_rows, "
        "u32 up_n, u32 up_k, u32 down_n, u32 down_k, u32 has_up_scales, u32 has_down_scales, "
        "u32 has_row_scales, u32 has_up_bias, u32 has_down_bias, f32 alpha, f32 limit",
        threads=config.threads,
        shared_bytes=mega_ffn_shared_bytes(config),
        min_blocks=blocks_per_sm(config),
        name=f"mega_ffn_{config.name}_{'bf16' if match_bf16 else 'f32'}"
        + ("" if activation == "silu" else f"_{activation}"),
    )
    def mega_ffn_sm80(
        output,
        c_packed,
        c_swiglu_scales,
        counters,
        c_bytes,
        c_scale_bytes,
        hidden,
        up_weight,
        down_weight,
        a_scales,
        up_b_scales,
        down_b_scales,
        expert_start,
        a_scale_offsets,
        expert_ids,
        up_scales,
        down_scales,
        c_input_scales,
        a_row_scales,
        up_bias,
        down_bias,
        segments,
        num_active,
        num_rows,
        up_n,
        up_k,
        down_n,
        down_k,
        has_up_scales,
        has_down_scales,
        has_row_scales,
        has_up_bias,
        has_down_bias,
        alpha,
        limit,
    ):
        smem = cuda.shared.array(0, np.uint32, alignment=16)
        thread = np.uint32(cuda.threadIdx.x)
        up_tiles = np.uint32(np.uint32(up_n + np.uint32(BLOCK_N - 1)) // np.uint32(BLOCK_N))
        down_tiles = np.uint32(np.uint32(down_n + np.uint32(BLOCK_N - 1)) // np.uint32(BLOCK_N))
        up_factors = (up_scales, a_row_scales, up_bias, has_up_scales, has_row_scales, has_up_bias)
        down_factors = (down_scales, a_row_scales, down_bias, has_down_scales, _ZERO, has_down_bias)
        grid = np.uint32(cuda.gridDim.x)
        chunk = chunk_segments(grid, up_tiles)
        items = np.uint32(segments * np.uint32(up_tiles + down_tiles))
        acc = cuda.local.array((fragments, 4), np.float32)
        number, place, index = _ZERO, np.uint32(numbers_at), _ZERO
        draws_ahead = False
        while index < items:
            if thread == _ZERO:
                if not draws_ahead:
                    number = draw_tile(counters)
                smem[place] = number
            cuda.syncthreads()
            index = smem[place]
            place = np.uint32(place ^ _ONE)
            if index < items:
                draws_ahead = are_plenty(index, items, grid)
                if draws_ahead and thread == _ZERO:
                    number = draw_tile(counters)
                word = find_item(index, segments, chunk, up_tiles, down_tiles)
                segment, is_down = segment_of(word), is_down_tile(word)
                first_column = np.uint32(tile_of(word) * np.uint32(BLOCK_N))
                located = locate(
                    expert_start, a_scale_offsets, expert_ids, num_active, num_rows, segment
                )
                _, expert, tile, tile_row, first_row, rows = located
                for i in unroll(range(fragments)):
                    for j in unroll(range(4)):
                        acc[i, j] = np.float32(0.0)
                if rows > _ZERO and is_down:
                    if expert >= np.int32(0):
                        if thread == _ZERO:
                            wait_for_tiles(counters, segment, up_tiles)
                            leave_counter(counters, segment, up_tiles, down_tiles)
                        cuda.syncthreads()
                        accumulate(
                            acc, smem, c_bytes, down_weight, c_scale_bytes, down_b_scales, _ZERO,
                            tile, tile_row, first_row, rows, expert, first_column, down_n, down_k,
                        )  # fmt: skip
                    store_tile(
                        acc, output, expert, first_row, rows, first_column, down_n, down_factors
                    )
                elif rows > _ZERO and expert >= np.int32(0):
                    accumulate(
                        acc, smem, hidden, up_weight, a_scales, up_b_scales, _ZERO, tile, tile_row,
                        first_row, rows, expert, first_column, up_n, up_k,
                    )  # fmt: skip
                    fuse_tile(
                        acc, smem, c_packed, c_swiglu_scales, located, first_column, up_n,
                        c_input_scales, up_factors, alpha, limit,
                    )  # fmt: skip
                    cuda.syncthreads()
                    if thread == _ZERO:
                        count_tile(counters, segment)
            elif thread == _ZERO:
                end_draws(counters, index, items)

    return mega_ffn_sm80


def launch_mega_ffn_sm80(
    executor: Executor,
    output: Any,
    c_packed: Any,
    c_swiglu_scales: Any,
    counters: Any,
    hidden: Any,
    up_weight: Any,
    down_weight: Any,
    a_scales: Any,
    up_b_scales: Any,
    down_b_scales: Any,
    expert_start: Any,
    a_scale_offsets: Any,
    expert_ids: Any,
    up_scales: Any,
    down_scales: Any,
    c_input_scales: Any,
    a_row_scales: Any,
    up_bias: Any,
    down_bias: Any,
    *,
    num_active: int,
    num_rows: int,
    k: int,
    moe_dim: int,
    n: int,
    has_up_scales: bool,
    has_down_scales: bool,
    has_row_scales: bool,
    has_up_bias: bool,
    has_down_bias: bool,
    match_bf16: bool,
    activation: str,
    alpha: float,
    limit: float,
    config: MatmulConfig,
    stream: Any = None,
) -> None:
    """Launch on flat arrays; ``moe_dim`` = D, ``num_rows`` = M.

    Arrays whose ``has_`` flag is off are not read, nor is ``c_input_scales`` for MX formats.

    Args:
        c_packed: scratch, (M, bytes of D codes).
        c_swiglu_scales: scratch, with the tiles of ``a_scales``.
        counters: u32, 0; at least `most_counters` of them.
        config: see `nbmoe_kernels.mega_ffn_sm80_config.mega_ffn_sm80_config`.
    """
    segments = most_segments(config, num_rows, num_active)
    up_tiles, down_tiles = (-(-rows // BLOCK_N) for rows in (2 * moe_dim, n))
    assert max(up_tiles, down_tiles) <= 1 << TILE_BITS, "a tile's number has too few bits"
    assert segments <= 1 << SEGMENT_BITS, "a segment's number has too few bits"
    # More blocks than are on the GPU together would find no tile left.
    blocks = min(
        segments * (up_tiles + down_tiles), blocks_per_sm(config) * executor.multiprocessors
    )
    make_mega_ffn_sm80(config, match_bf16, activation).launch(
        executor,
        (blocks if num_rows else 0, 1, 1),
        output,
        c_packed,
        c_swiglu_scales,
        counters,
        c_packed,
        c_swiglu_scales,
        hidden,
        up_weight,
        down_weight,
        a_scales,
        up_b_scales,
        down_b_scales,
        expert_start,
        a_scale_offsets,
        expert_ids,
        up_scales,
        down_scales,
        c_input_scales,
        a_row_scales,
        up_bias,
        down_bias,
        segments,
        num_active,
        num_rows,
        2 * moe_dim,
        k,
        n,
        moe_dim,
        has_up_scales,
        has_down_scales,
        has_row_scales,
        has_up_bias,
        has_down_bias,
        alpha,
        limit,
        stream=stream,
    )
