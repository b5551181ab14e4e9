"""Grouped matmul of prepared FP8 (e4m3) operands with e4m3 wgmma, for Hopper.

With b over the 128-blocks of K in ascending order and sums as `numerics="e4m3"` of
`nbmoe.reference.matmul_fp8` defines them:

    block128   acc = fma(sum over block b, a_scales[b, m] * b_scales[e, n / 128, b], acc)   from +0
               output[m, n] = acc (+ bias[e, n])
    rowwise    acc = acc + sum over block b                                                 from +0
               output[m, n] = acc * a_scales[m] * b_scales[e, n] (+ bias[e, n])

every operation rounded to f32 in this order, and the result once to bf16.

Shapes: output (M, N) bf16; tokens (K128, R, 128) and weights (E, N64, K128, 64, 128) e4m3 as
`nbmoe.prepared.fp8` draws them; expert_start (S + 1,) u32; expert_ids (S,) i32; bias (E, N) bf16.
a_scales f32: block128 (K128, R), beside the tokens; rowwise row r of the panels has a_scales[r *
A_STRIDE]. b_scales f32 or bf16: block128 (E, ceil(N/128), K128); rowwise row n of weight e has
b_scales[e * B_STRIDE_E + n * B_STRIDE_N]; a stride of 0 shares one scale. N is a multiple of 8.

Thread map: weight rows are wgmma's M, 64 a warpgroup; tokens are its N, of several widths in one
kernel. Consumers are the first warpgroups; the next warp has the producer, one thread
(`matmul_fp8_sm90_load`), and with block scales the one after that is the scaler
(`matmul_fp8_sm90_scaler`). Blocks are persistent: `matmul_sm90_schedule`. Shared memory:
`matmul_fp8_sm90_config`.

A slot with expert id -1 gets rows of 0, whatever scales and bias hold. Columns of a tile past its
rows multiply what an earlier tile left, at first zeros, and are not stored.

Synchronisation:
    cuda.syncthreads   once; barriers, zeroed tokens and the schedule's table are there
    the ring's mbarriers and the warpgroups' turns: `matmul_fp8_sm90_ring`
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.grid_dependency import wait_for_previous_grid
from nbmoe_kernels.device.mbarrier import fence_mbarrier_init, mbarrier_wait
from nbmoe_kernels.device.memory import load_shared_v4
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.sync import fence_proxy_async_shared, set_max_registers
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.matmul_fp8_sm90_config import NOTE_WORDS, SMS, UNIT_ROWS
from nbmoe_kernels.matmul_fp8_sm90_config import Fp8HopperConfig as Config
from nbmoe_kernels.matmul_fp8_sm90_finish import (
    make_finish_tile,
    make_load_rows,
    make_load_tokens,
    weight_row,
)
from nbmoe_kernels.matmul_fp8_sm90_load import make_load_tiles
from nbmoe_kernels.matmul_fp8_sm90_ring import (
    make_init_barriers,
    make_next_stage,
    make_release_stage,
    make_turns,
    make_wait_for_scaler,
    takes_turns,
)
from nbmoe_kernels.matmul_fp8_sm90_scale_types import SCALE_POINTERS
from nbmoe_kernels.matmul_fp8_sm90_scaler import make_multiply_scales
from nbmoe_kernels.matmul_fp8_sm90_tile import ZERO, make_multiply_tile
from nbmoe_kernels.matmul_fp8_sm90_tile_folded import make_multiply_folded
from nbmoe_kernels.matmul_sm90_schedule import make_build_table
from nbmoe_kernels.prepared_tokens import token_rows


def _make_run_tile(
    config: Config, widths: tuple[int, ...], has_block_scales: bool, scale_type: str
) -> Callable[..., Any]:
    """The function that multiplies and finishes a tile with the narrowest width that holds it."""
    width = widths[0]
    if config.b_format == "mxfp4":
        assert not has_block_scales, "folded weights have scales of rows"
        multiply = make_multiply_folded(config, width)
    else:
        multiply = make_multiply_tile(config, width, has_block_scales)
    load_rows = make_load_rows(has_block_scales, scale_type)
    load_tokens = make_load_tokens(width, has_block_scales)
    finish = make_finish_tile(width, has_block_scales)
    release_stage, next_stage = make_release_stage(config), make_next_stage(config)
    wait_for_scaler = make_wait_for_scaler(config)
    warpgroups, accumulators, held_count = config.warpgroups, width // 2, -(-width // 32)

    @device_function
    def run_this(smem, words, bars, stage, parity, note, k_blocks, n, arrays, strides, has_bias):
        rows, output_row, token_row, row_block, expert = note
        output, token_scales, b_scales, bias = arrays
        a_stride, stride_e, stride_n = strides
        group = np.uint32(np.uint32(cuda.threadIdx.x) >> np.uint32(7))
        unit = np.uint32(np.uint32(row_block * np.uint32(warpgroups)) + group)
        row = weight_row(unit)
        of_rows = load_rows(b_scales, bias, expert, row, n, (stride_e, stride_n), has_bias)
        held = cuda.local.array(held_count, np.float32)
        # Nobody has to have written those of a masked tile.
        scaled_rows = rows if expert >= np.int32(0) else np.uint32(0)
        load_tokens(held, token_scales, token_row, scaled_rows, a_stride)
        acc = cuda.local.array(accumulators, np.float32)
        for i in unroll(range(accumulators)):
            acc[i] = ZERO
        if expert < np.int32(0):
            if has_block_scales:
                wait_for_scaler(bars, stage, parity)
            release_stage(bars, stage)
            stage, parity = next_stage(stage, parity)
        else:
            stage, parity = multiply(acc, smem, words, bars, stage, parity, k_blocks)
        finish(acc, held, of_rows, output, expert, output_row, row, rows, n, has_bias)
        return stage, parity

    if len(widths) == 1:
        return run_this
    run_wider = _make_run_tile(config, widths[1:], has_block_scales, scale_type)

    @device_function
    def run_tile(smem, words, bars, stage, parity, note, k_blocks, n, arrays, strides, has_bias):
        if note[0] <= np.uint32(width):
            return run_this(
                smem, words, bars, stage, parity, note, k_blocks, n, arrays, strides, has_bias
            )
        return run_wider(
            smem, words, bars, stage, parity, note, k_blocks, n, arrays, strides, has_bias
        )

    return run_tile


def _make_clear_tokens(config: Config) -> Callable[..., Any]:
    """``clear_tokens(bars)``: consumers zero the ring's tokens and scales."""
    stages, step, first = config.stages, config.stage_bytes // 8, config.tokens_at // 8
    count = (config.stage_bytes - config.tokens_at) // 8
    first_scale, end_scale = config.scales_at // 8, config.notes_at // 8
    consumers = config.consumers

    @device_function
    def clear_tokens(bars):
        thread = np.uint32(cuda.threadIdx.x)
        for stage in range(stages):
            at = np.uint32(np.uint32(first + stage * step) + thread)
            end = np.uint32(first + stage * step + count)
            while at < end:
                bars[at] = np.uint64(0)
                at = np.uint32(at + np.uint32(consumers))
        at = np.uint32(np.uint32(first_scale) + thread)
        while at < np.uint32(end_scale):
            bars[at] = np.uint64(0)
            at = np.uint32(at + np.uint32(consumers))

    return clear_tokens


@functools.cache
def make_matmul_grouped_fp8_sm90(config: Config, scaling: str, scale_type: str) -> Kernel:
    """The kernel for a tile shape, "block128" or "rowwise", and "f32" or "bf16" b_scales."""
    has_block_scales = {"block128": True, "rowwise": False}[scaling]
    pointer = SCALE_POINTERS[scale_type][0]
    a_pointer = "u8" if has_block_scales else "f32"
    first_full, first_note = config.barriers_at // 8, config.notes_at // 4
    consumers, scaler_warp = config.consumers, config.consumers // 32 + 1
    reallocates = config.registers is not None
    producer_registers, consumer_registers = config.registers or (40, 232)
    fewer_registers = set_max_registers(producer_registers, increase=False)
    more_registers = set_max_registers(consumer_registers, increase=True)
    build_table = make_build_table(config.max_width, config.max_slots, config.table_at // 4)
    load_tiles = make_load_tiles(config, has_block_scales)
    multiply_scales = make_multiply_scales(config, scale_type)
    run_tile = _make_run_tile(config, config.widths, has_block_scales, scale_type)
    init_barriers = make_init_barriers(config, has_block_scales)
    has_turns, (first_turn, _, _) = takes_turns(config, has_block_scales), make_turns()
    clear_tokens = _make_clear_tokens(config)

    @kernel(
        f"global u32* output, global u8* tokens, global u8* weights, global {a_pointer}* a_scales, "
        f"global {pointer}* b_scales, global u32* expert_start, global i32* expert_ids, "
        "global u16* bias, u32 num_active, u32 num_rows, u32 panel_rows, u32 n, u32 k, "
        "u32 a_stride, u32 b_stride_e, u32 b_stride_n, u32 has_bias, u32 routed_before",
        threads=config.threads_with_scaler if has_block_scales else config.threads,
        shared_bytes=config.shared_bytes,
        name=f"matmul_grouped_fp8_{config.name}_{scaling}_{scale_type}",
        # A block that started later would do its tiles when the others have done theirs.
        min_blocks=config.blocks_per_sm,
        min_cc=(9, 0),
        overlaps_previous=True,
    )
    def matmul_grouped_fp8_sm90(
        output,
        tokens,
        weights,
        a_scales,
        b_scales,
        expert_start,
        expert_ids,
        bias,
        num_active,
        num_rows,
        panel_rows,
        n,
        k,
        a_stride,
        b_stride_e,
        b_stride_n,
        has_bias,
        routed_before,
    ):
        smem = cuda.shared.array(0, np.uint8, alignment=1024)
        # The same memory.
        words = cuda.shared.array(0, np.uint32, alignment=1024)
        bars = cuda.shared.array(0, np.uint64, alignment=1024)
        thread = np.uint32(cuda.threadIdx.x)
        if routed_before == np.uint32(0):
            wait_for_previous_grid()
        if thread == np.uint32(0):
            init_barriers(bars)
            fence_mbarrier_init()
        if thread < np.uint32(consumers):
            clear_tokens(bars)
            fence_proxy_async_shared()
        elif thread < np.uint32(consumers + 32):
            build_table(words, expert_start, expert_ids, num_active, num_rows)
        cuda.syncthreads()
        # A multiple of two: N is padded to 128-blocks.
        n_units = np.uint32(
            np.uint32(np.uint32(n + np.uint32(127)) >> np.uint32(7)) << np.uint32(1)
        )
        k_blocks = np.uint32(np.uint32(k + np.uint32(127)) >> np.uint32(7))
        if thread >= np.uint32(consumers):
            if reallocates:
                fewer_registers()
            if thread == np.uint32(consumers):
                load_tiles(
                    smem,
                    words,
                    bars,
                    tokens,
                    a_scales,
                    weights,
                    num_active,
                    panel_rows,
                    n_units,
                    k_blocks,
                )
            if has_block_scales and np.uint32(thread >> np.uint32(5)) == np.uint32(scaler_warp):
                multiply_scales(words, bars, b_scales, num_active, n_units, k_blocks)
        else:
            if reallocates:
                more_registers()
            if has_turns:
                first_turn()
            stage = np.uint32(0)
            parity = np.uint32(0)
            goes_on = True
            while goes_on:
                mbarrier_wait(bars, np.uint32(np.uint32(first_full) + stage), parity)
                at = np.uint32(np.uint32(first_note) + np.uint32(stage * np.uint32(NOTE_WORDS)))
                rows, output_row, token_row, row_block = load_shared_v4(words, at)
                expert = np.int32(words[np.uint32(at + np.uint32(4))])
                goes_on = rows != np.uint32(0)
                if goes_on:
                    stage, parity = run_tile(
                        smem,
                        words,
                        bars,
                        stage,
                        parity,
                        (rows, output_row, token_row, row_block, expert),
                        k_blocks,
                        n,
                        (output, a_scales, b_scales, bias),
                        (a_stride, b_stride_e, b_stride_n),
                        has_bias,
                    )

    return matmul_grouped_fp8_sm90


def launch_matmul_grouped_fp8_sm90(
    executor: Executor,
    output: Any,
    tokens: Any,
    weights: Any,
    a_scales: Any,
    b_scales: Any,
    expert_start: Any,
    expert_ids: Any,
    bias: Any,
    *,
    scaling: str,
    scale_type: str,
    num_active: int,
    num_rows: int,
    n: int,
    k: int,
    a_scale_stride: int = 0,
    b_scale_strides: tuple[int, int] = (0, 0),
    has_bias: bool,
    config: Config,
    num_sms: int = SMS,
    routed_before: bool = False,
    stream: Any = None,
) -> None:
    """Launch on flat arrays.

    Args:
        scaling: "block128" or "rowwise".
        scale_type: "f32" or "bf16", of ``b_scales``. ``a_scales`` are f32, with block128 as bytes.
        num_active: expert slots, at most ``config.max_slots``; 0: all rows belong to expert 0.
        num_rows: M.
        a_scale_stride: rowwise only: from a row's scale to the next row's [elements].
        b_scale_strides: rowwise only: from a weight's scales to the next weight's, and from a
            weight row's to the next one's [elements].
        config: see `nbmoe_kernels.heuristics_fp8_sm90.fp8_hopper_config`.
        num_sms: how many SMs to fill.
        routed_before: as for `nbmoe_kernels.matmul_grouped_sm90.launch_matmul_grouped_sm90`.
    """
    row_blocks = -(-(2 * -(-n // (2 * UNIT_ROWS))) // config.warpgroups)
    segments = -(-num_rows // config.max_width) + min(max(num_active, 1), num_rows)
    blocks = min(num_sms * config.blocks_per_sm, row_blocks * segments)
    make_matmul_grouped_fp8_sm90(config, scaling, scale_type).launch(
        executor,
        (blocks, 1, 1),
        output,
        tokens,
        weights,
        a_scales,
        b_scales,
        expert_start,
        expert_ids,
        bias,
        num_active,
        num_rows,
        token_rows(num_rows, max(num_active, 1)),
        n,
        k,
        a_scale_stride,
        *b_scale_strides,
        has_bias,
        routed_before,
        stream=stream,
    )
