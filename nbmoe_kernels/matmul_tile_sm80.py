"""The mainloop of the portable matmuls: cp.async pipeline, mma.sync, decode in registers.

A block computes BLOCK_M rows of one expert slot times BLOCK_N weight rows. K is walked in stages of
one or two 64-blocks; a stage's codes and scale words are copied to shared memory as they are and
decoded in registers (`nbmoe_kernels.matmul_operands`), so shared memory holds few bits an element.

Warps: WARPS_M x WARPS_N, each with a (BLOCK_M / WARPS_M) x (BLOCK_N / WARPS_N) tile of m16n8
fragments; lane (g, t) = (lane / 4, lane % 4) holds rows g, g + 8 and columns 2t, 2t + 1 of each.

Synchronisation: STAGES stages. A thread commits one copy group a stage and waits until its own
copies of the next stage are complete; one block barrier a stage makes all threads' copies visible
and shows that everyone is done with the stage that is overwritten next.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.memory import cp_async_commit, cp_async_wait
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.matmul_config import BLOCK_N, MatmulConfig
from nbmoe_kernels.matmul_stage_sm80 import make_copy_operand, make_multiply_stage
from nbmoe_kernels.search import TILE_ROWS, first_tile, locate_row_block


def _make_add_stage(config: MatmulConfig) -> Callable[..., Any]:
    multiply_stage = make_multiply_stage(config)
    stage_blocks = config.stage_blocks

    @device_function
    def add_stage(
        acc,
        smem,
        stage_at,
        stage,
        a_scales,
        b_scales,
        scale_stride,
        tile,
        tile_row,
        rows,
        expert,
        first_column,
        n,
        k,
    ):
        """acc += the stage's products."""
        first_block = np.uint32(stage * np.uint32(stage_blocks))
        multiply_stage(acc, smem, stage_at, first_block, np.uint32(k >> np.uint32(4)))

    return add_stage


def make_locate(config: MatmulConfig) -> Callable[..., Any]:
    """``locate(expert_start, a_scale_offsets, expert_ids, num_active, num_rows, row_block)``.

    Returns slot, expert (-1 if masked), scale tile and row in it (without scale tiles batch and row
    in it), first row of the block, rows from there to the slot's end (0: nothing is to be done).
    """
    block_m = config.block_m

    @device_function
    def locate_tile(expert_start, a_scale_offsets, expert_ids, num_active, num_rows, row_block):
        slot, row, rows = locate_row_block(expert_start, num_active, row_block, np.uint32(block_m))
        tile = np.uint32(
            first_tile(expert_start, a_scale_offsets, slot) + np.uint32(row // TILE_ROWS)
        )
        first_row = np.uint32(expert_start[np.uint64(slot)] + row)
        expert = expert_ids[np.uint64(slot)]
        return slot, expert, tile, np.uint32(row % TILE_ROWS), first_row, rows

    @device_function
    def locate_rows(expert_start, a_scale_offsets, expert_ids, num_active, num_rows, row_block):
        if num_active == np.uint32(0):
            # Dense: batch y is a group of its own.
            batch = np.uint32(cuda.blockIdx.y)
            row = np.uint32(row_block * np.uint32(block_m))
            rows = np.uint32(num_rows - row)
            first_row = np.uint32(np.uint32(batch * num_rows) + row)
            return batch, np.int32(batch), batch, row, first_row, rows
        slot, row, rows = locate_row_block(expert_start, num_active, row_block, np.uint32(block_m))
        first_row = np.uint32(expert_start[np.uint64(slot)] + row)
        return slot, expert_ids[np.uint64(slot)], np.uint32(0), first_row, first_row, rows

    return locate_tile if config.a.scale_block else locate_rows


def make_accumulate(
    config: MatmulConfig, add_stage: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """The device function that adds the product of a tile that has been found.

    Args:
        config: operands and tile shape.
        add_stage: adds a stage's products to ``acc``; the default as they are.
    """
    block_m, stages = config.block_m, config.stages
    stage_blocks, stage_words = config.stage_blocks, config.stage_words
    copy_a = make_copy_operand(config.a, block_m, 0, config.a_scales_at, config)
    copy_b = make_copy_operand(config.b, BLOCK_N, config.b_codes_at, config.b_scales_at, config)
    wait_for_stage = cp_async_wait(stages - 2)
    add_products = _make_add_stage(config) if add_stage is None else add_stage

    @device_function
    def accumulate(
        acc,
        smem,
        hidden,
        weight,
        a_scales,
        b_scales,
        scale_stride,
        tile,
        tile_row,
        first_row,
        rows,
        expert,
        first_column,
        n,
        k,
    ):
        """acc += the product of ``rows`` rows from ``first_row`` on, at ``tile_row`` of scale tile
        ``tile``, and the expert's weight rows from ``first_column`` on, over all of K."""
        k_blocks = np.uint32(np.uint32(k + np.uint32(63)) >> np.uint32(6))
        num_stages = np.uint32(
            np.uint32(k_blocks + np.uint32(stage_blocks - 1)) // np.uint32(stage_blocks)
        )
        columns = np.uint32(n - first_column)
        weight_row = np.uint64(expert) * np.uint64(n) + np.uint64(first_column)
        n_tiles = np.uint64(np.uint32(n + np.uint32(127)) >> np.uint32(7))
        weight_tile = np.uint64(expert) * n_tiles + np.uint64(first_column >> np.uint32(7))
        for loaded in range(np.uint32(num_stages + np.uint32(stages - 1))):
            stage = np.uint32(loaded)
            at = np.uint32(np.uint32(stage % np.uint32(stages)) * np.uint32(stage_words))
            done = np.uint32(stage - np.uint32(stages - 1))
            if stage >= np.uint32(stages - 1):
                wait_for_stage()
                cuda.syncthreads()
            if stage < num_stages:
                copy_a(smem, at, stage, k, rows, hidden, first_row, a_scales, tile, tile_row)
                copy_b(
                    smem,
                    at,
                    stage,
                    k,
                    columns,
                    weight,
                    weight_row,
                    b_scales,
                    weight_tile,
                    np.uint32(0),
                )
            # Past the last stage the group is empty, so the wait's count keeps its meaning.
            cp_async_commit()
            if stage >= np.uint32(stages - 1):
                add_products(
                    acc,
                    smem,
                    np.uint32(np.uint32(done % np.uint32(stages)) * np.uint32(stage_words)),
                    done,
                    a_scales,
                    b_scales,
                    scale_stride,
                    tile,
                    tile_row,
                    rows,
                    expert,
                    first_column,
                    n,
                    k,
                )

    return accumulate


def make_multiply_tile(
    config: MatmulConfig, add_stage: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """The device function that finds the block's tile and computes its product.

    It takes a warp's fragments ``acc``, (fragments, 4) f32, and the kernel's operands, and returns
    what an epilogue needs to store them; see its docstring.
    """
    fragments = config.fragments
    locate, accumulate = make_locate(config), make_accumulate(config, add_stage)

    @device_function
    def multiply_tile(
        acc,
        smem,
        hidden,
        weight,
        a_scales,
        b_scales,
        scale_stride,
        expert_start,
        a_scale_offsets,
        expert_ids,
        num_active,
        num_rows,
        n,
        k,
    ):
        """acc = the product of the block's tile.

        Blocks run over columns first: with X = ceil(n / 128), block b has columns 128 (b % X) and
        on, and the rows of row block b / X (`nbmoe_kernels.search.locate_row_block`). Without
        scale tiles and with ``num_active`` = 0 there are no slots: y is a batch of ``num_rows``
        rows, which are multiplied by weight y.

        Returns:
            What `make_locate` returns, and first_column.
        """
        block = np.uint32(cuda.blockIdx.x)
        n_blocks = np.uint32(np.uint32(n + np.uint32(BLOCK_N - 1)) // np.uint32(BLOCK_N))
        first_column = np.uint32(np.uint32(block % n_blocks) * np.uint32(BLOCK_N))
        slot, expert, tile, tile_row, first_row, rows = locate(
            expert_start,
            a_scale_offsets,
            expert_ids,
            num_active,
            num_rows,
            np.uint32(block // n_blocks),
        )
        for i in unroll(range(fragments)):
            for j in unroll(range(4)):
                acc[i, j] = np.float32(0.0)
        if rows > np.uint32(0) and expert >= np.int32(0):
            accumulate(
                acc,
                smem,
                hidden,
                weight,
                a_scales,
                b_scales,
                scale_stride,
                tile,
                tile_row,
                first_row,
                rows,
                expert,
                first_column,
                n,
                k,
            )
        return slot, expert, tile, tile_row, first_row, rows, first_column

    return multiply_tile
