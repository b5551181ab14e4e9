"""MegaFFN for Hopper: gate/up, activation, requantization and down of all experts in one launch.

For slot s with expert e, rows m of the slot and prepared operands:

    z[m, i]      = activation(gate, up)      gate, up: rows 2i and 2i + 1 of the gate/up matmul
    middle[m]    = z[m] in blocks of the tokens' format (NVFP4: under c_input_scales[s])
    output[m, j] = bf16(sum_i middle[m, i] * down[e, j, i] * down_scales[e])

each step as in `matmul_grouped_swiglu_sm90` and `matmul_grouped_sm90`, whose bytes it has: the
middle never leaves the L2 cache if that is large enough, and the down matmul's weights are on their
way while the gate/up matmul ends.

Shapes: tokens and middle prepared (`nbmoe_kernels.prepared_tokens`), (K64, R, 128) and (D64, R,
128) bytes; up_weights (E, 2D, K) and down_weights (E, N, D) prepared; output bf16 (M, N) as u32
words; counters u32, 0 before and after, as many as `most_counters` says; the rest as in
`matmul_grouped_swiglu_sm90`. Slots of expert -1 get rows of 0.

Thread map and roles are those of `matmul_sm90_body`; the order of tiles is that of
`mega_ffn_order`, and `mega_ffn_counters` orders the two matmuls.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.grid_dependency import allow_next_grid, wait_for_previous_grid
from nbmoe_kernels.device.sync import set_max_registers
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.matmul_sm90_begin import make_begin
from nbmoe_kernels.matmul_sm90_swiglu_config import FusedMatmulConfig
from nbmoe_kernels.matmul_sm90_swiglu_tile import Fusion, make_fused_parts
from nbmoe_kernels.mega_ffn_layout import NEXT_TILE
from nbmoe_kernels.mega_ffn_order import SEGMENT_BITS, TILE_BITS
from nbmoe_kernels.mega_ffn_sm90_consumer import make_consume_ffn, make_finish_ffn
from nbmoe_kernels.mega_ffn_sm90_producer import make_produce_ffn
from nbmoe_kernels.prepared_tokens import token_rows
from nbmoe_kernels.prepared_weights import k64_count, n64_count


def most_segments(config: FusedMatmulConfig, num_rows: int, num_slots: int) -> int:
    """How many segments so many rows in so many slots have at most."""
    return num_rows // config.max_width + max(1, min(num_slots, num_rows))


def most_counters(config: FusedMatmulConfig, num_rows: int, num_slots: int) -> int:
    """How many counters a launch has use for."""
    return NEXT_TILE + most_segments(config, num_rows, num_slots)


@functools.cache
def make_mega_ffn_sm90(
    config: FusedMatmulConfig, match_bf16: bool = True, activation: str = "silu"
) -> Kernel:
    """The kernel for a pair of operands, a tile shape and an activation."""
    make_epilogue, make_take = make_fused_parts(config, Fusion(match_bf16, activation, "prepared"))
    consumers, block_rows = config.consumers, config.block_rows
    begin = make_begin(config)
    produce, consume = make_produce_ffn(config), make_consume_ffn(config, make_epilogue)
    hands_over, has_finishers = config.registers is not None, make_take is not None
    finish = produce if make_take is None else make_finish_ffn(config, make_take)
    fewer, more = config.registers or (24, 24)
    fewer_registers = set_max_registers(fewer, increase=False)
    more_registers = set_max_registers(more, increase=True)

    @kernel(
        "global u32* output, global u32* middle, global u32* counters, global u8* middle_bytes, "
        "global u8* tokens, global u8* up_weights, global u8* down_weights, "
        "global u32* expert_start, global i32* expert_ids, global f32* up_scales, "
        "global f32* down_scales, global f32* c_input_scales, global u16* a_row_scales, "
        "global u16* up_bias, global u16* down_bias, u32 has_up_scales, u32 has_down_scales, "
        "u32 num_slots, u32 num_rows, u32 token_rows, u32 up_n, u32 up_k64, u32 up_n64, "
        "u32 down_n, u32 down_k64, u32 down_n64, u32 routed_before, u32 has_row_scales, "
        "u32 has_up_bias, u32 has_down_bias, f32 alpha, f32 limit",
        threads=config.threads,
        shared_bytes=config.shared_bytes,
        min_blocks=1 if config.registers else config.blocks_per_sm,
        name=f"mega_ffn_{config.name}_{'bf16' if match_bf16 else 'f32'}"
        f"{'' if activation == 'silu' else f'_{activation}'}",
        min_cc=(9, 0),
        overlaps_previous=True,
    )
    def mega_ffn_sm90(
        output,
        middle,
        counters,
        middle_bytes,
        tokens,
        up_weights,
        down_weights,
        expert_start,
        expert_ids,
        up_scales,
        down_scales,
        c_input_scales,
        a_row_scales,
        up_bias,
        down_bias,
        has_up_scales,
        has_down_scales,
        num_slots,
        num_rows,
        token_rows,
        up_n,
        up_k64,
        up_n64,
        down_n,
        down_k64,
        down_n64,
        routed_before,
        has_row_scales,
        has_up_bias,
        has_down_bias,
        alpha,
        limit,
    ):
        # Views of the same shared memory.
        smem = cuda.shared.array(0, np.uint8, alignment=1024)
        words = cuda.shared.array(0, np.uint32, alignment=1024)
        bars = cuda.shared.array(0, np.uint64, alignment=1024)
        thread = np.uint32(cuda.threadIdx.x)
        begin(words, bars, expert_start, expert_ids, num_slots, num_rows, routed_before)
        out = (
            middle, middle, token_rows, num_slots, expert_start, expert_start, c_input_scales,
            alpha, limit,
        )  # fmt: skip
        up_args = (out, a_row_scales, up_bias, has_row_scales, has_up_bias)
        down_args = (output, a_row_scales, down_bias, np.uint32(0), has_down_bias)
        if thread >= np.uint32(consumers):
            if hands_over:
                fewer_registers()
            if thread < np.uint32(consumers + 32):
                up_tiles = np.uint32(
                    np.uint32(up_n + np.uint32(block_rows - 1)) // np.uint32(block_rows)
                )
                down_tiles = np.uint32(
                    np.uint32(down_n + np.uint32(block_rows - 1)) // np.uint32(block_rows)
                )
                produce(
                    words, smem, bars, (tokens, up_weights, up_tiles, up_n64, up_k64),
                    (middle_bytes, down_weights, down_tiles, down_n64, down_k64), counters,
                    num_slots, token_rows,
                )  # fmt: skip
            elif has_finishers:
                wait_for_previous_grid()
                finish(words, smem, bars, up_n, up_args, counters)
        else:
            if hands_over:
                more_registers()
            wait_for_previous_grid()
            allow_next_grid()
            consume(
                words, smem, bars, (up_n, up_k64, up_scales, has_up_scales, up_args),
                (down_n, down_k64, down_scales, has_down_scales, down_args), counters,
            )  # fmt: skip

    return mega_ffn_sm90


def launch_mega_ffn_sm90(
    executor: Executor,
    output: Any,
    middle: Any,
    middle_bytes: Any,
    counters: Any,
    tokens: Any,
    up_weights: Any,
    down_weights: Any,
    expert_start: Any,
    expert_ids: Any,
    up_scales: Any,
    down_scales: Any,
    c_input_scales: Any,
    a_row_scales: Any,
    up_bias: Any,
    down_bias: Any,
    *,
    num_active: int,
    num_slots: int,
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
    config: FusedMatmulConfig,
    routed_before: bool = False,
    stream: Any = None,
) -> None:
    """Launch on flat arrays; ``moe_dim`` = D.

    Arrays whose ``has_`` flag is off are not read, nor is ``c_input_scales`` for MX formats.

    Args:
        num_active: slots that have a part, 1 up to ``config.max_slots``.
        num_slots: slots that tokens and middle are laid out for, at least as many.
        middle: scratch, as u32 words; ``middle_bytes`` is the same memory.
        counters: u32, 0; at least `most_counters` of them.
        routed_before: as for `nbmoe_kernels.matmul_grouped_sm90.launch_matmul_grouped_sm90`.
    """
    assert 1 <= num_active <= config.max_slots, "the table has no place for so many slots"
    segments = most_segments(config, num_rows, num_active)
    up_tiles, down_tiles = (-(-rows // config.block_rows) for rows in (2 * moe_dim, n))
    assert max(up_tiles, down_tiles) <= 1 << TILE_BITS, "a tile's number has too few bits"
    assert segments <= 1 << SEGMENT_BITS, "a segment's number has too few bits"
    # More blocks than are on the GPU together would find no tile left.
    blocks = min(
        segments * (up_tiles + down_tiles), config.blocks_per_sm * executor.multiprocessors
    )
    make_mega_ffn_sm90(config, match_bf16, activation).launch(
        executor,
        (blocks if num_rows else 0, 1, 1),
        output,
        middle,
        counters,
        middle_bytes,
        tokens,
        up_weights,
        down_weights,
        expert_start,
        expert_ids,
        up_scales,
        down_scales,
        c_input_scales,
        a_row_scales,
        up_bias,
        down_bias,
        has_up_scales,
        has_down_scales,
        num_active,
        num_rows,
        token_rows(num_rows, num_slots),
        2 * moe_dim,
        k64_count(k),
        n64_count(2 * moe_dim),
        n,
        k64_count(moe_dim),
        n64_count(n),
        routed_before,
        has_row_scales,
        has_up_bias,
        has_down_bias,
        alpha,
        limit,
        stream=stream,
    )
