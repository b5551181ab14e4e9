"""The producer of Hopper's FP8 matmul: one thread that keeps the ring of stages full.

For each tile of its block the thread writes a note into the tile's first stage, so that consumers
need no schedule of their own, and starts the copies of its stages, one or two 128-blocks of K each:
the warpgroups' units of weights, the segment's tokens and, with scales a block, their scales. A
masked tile has one stage with a note alone. A note without rows ends the loop.

    note word   0 rows   1 first row of the output   2 row of the prepared tokens
                3 tile's index along N   4 expert, negative: masked

The weights of the first stages are on their way before the thread waits for the previous kernel of
the stream; where that may make the schedule, the block has waited for it already. Everything that a
block reads of tokens, or writes, comes after that.

Synchronisation: waits for `empty` of a stage, then arrives once at `full`, with the bytes to come;
the arrival also releases the note.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.bulk import bulk_load
from nbmoe_kernels.device.grid_dependency import allow_next_grid, wait_for_previous_grid
from nbmoe_kernels.device.mbarrier import mbarrier_arrive, mbarrier_arrive_expect, mbarrier_wait
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.matmul_fp8_sm90_config import BLOCK_BYTES, NOTE_WORDS
from nbmoe_kernels.matmul_fp8_sm90_config import Fp8HopperConfig as Config
from nbmoe_kernels.matmul_sm90_schedule import make_find_tile


def make_load_tiles(config: Config, has_block_scales: bool) -> Callable[..., Any]:
    """``load_tiles(smem, words, bars, tokens, token_scales, weights, num_active, ...)``."""
    stages, warpgroups, unit_bytes = config.stages, config.warpgroups, config.unit_bytes
    stage_bytes, tokens_at = config.stage_bytes, config.tokens_at
    stage_blocks, panel_bytes = config.stage_blocks, config.panel_bytes
    assert stage_blocks == 1 or not has_block_scales, "a stage has the scales of one block"
    scales_at, scales_step = config.scales_at, 4 * config.max_width
    first_note, first_barrier = config.notes_at // 4, config.barriers_at // 8
    num_segments, find_tile = make_find_tile(config.max_slots, config.table_at // 4)

    @device_function
    def write_note(words, stage, rows, output_row, token_row, row_block, expert):
        at = np.uint32(np.uint32(first_note) + np.uint32(stage * np.uint32(NOTE_WORDS)))
        words[at] = rows
        words[np.uint32(at + np.uint32(1))] = output_row
        words[np.uint32(at + np.uint32(2))] = token_row
        words[np.uint32(at + np.uint32(3))] = row_block
        words[np.uint32(at + np.uint32(4))] = np.uint32(expert)

    @device_function
    def blocks_in_stage(left):
        """Of the tile's ``left`` 128-blocks."""
        return min(left, np.uint32(stage_blocks)) if stage_blocks > 1 else np.uint32(1)

    @device_function
    def load_weights(smem, bars, weights, stage, source, units, unit_step, blocks):
        full = np.uint32(np.uint32(first_barrier) + stage)
        place = np.uint32(stage * np.uint32(stage_bytes))
        for i in unroll(range(warpgroups)):
            if np.uint32(i) < units:
                bulk_load(
                    smem,
                    np.uint32(place + np.uint32(stage_blocks * unit_bytes * i)),
                    weights,
                    np.uint64(source + np.uint64(i) * unit_step),
                    np.uint32(blocks * np.uint32(unit_bytes)),
                    bars,
                    full,
                )

    @device_function
    def load_tokens(smem, bars, tokens, token_scales, stage, row, panel, blocks, sizes):
        tokens_bytes, scales_bytes = sizes
        full = np.uint32(np.uint32(first_barrier) + stage)
        place = np.uint32(np.uint32(stage * np.uint32(stage_bytes)) + np.uint32(tokens_at))
        for q in unroll(range(stage_blocks)):
            if q == 0 or np.uint32(q) < blocks:
                at = np.uint64(np.uint64(row + np.uint64(q) * panel) * np.uint64(BLOCK_BYTES))
                panel_place = np.uint32(place + np.uint32(panel_bytes * q))
                bulk_load(smem, panel_place, tokens, at, tokens_bytes, bars, full)
        if has_block_scales:
            place = np.uint32(np.uint32(scales_at) + np.uint32(stage * np.uint32(scales_step)))
            at = np.uint64(row * np.uint64(4))
            bulk_load(smem, place, token_scales, at, scales_bytes, bars, full)

    @device_function
    def load_tiles(
        smem, words, bars, tokens, token_scales, weights, num_active, panel_rows, n_units, k_blocks
    ):
        row_blocks = np.uint32(
            np.uint32(n_units + np.uint32(warpgroups - 1)) // np.uint32(warpgroups)
        )
        num_tiles = np.uint32(num_segments(words, num_active) * row_blocks)
        panel = np.uint64(panel_rows)
        unit_step = np.uint64(k_blocks) * np.uint64(unit_bytes)
        stage = np.uint32(0)
        # New barriers run phase 0; the wait for the phase before it passes at once.
        parity = np.uint32(1)
        tile = np.uint32(cuda.blockIdx.x)
        is_first = True
        while tile < num_tiles:
            segment = np.uint32(tile // row_blocks)
            row_block = np.uint32(tile - np.uint32(segment * row_blocks))
            expert, output_row, token_row, rows = find_tile(words, segment, num_active)
            first_unit = np.uint32(row_block * np.uint32(warpgroups))
            units = min(np.uint32(warpgroups), np.uint32(n_units - first_unit))
            unit = np.uint64(max(expert, np.int32(0))) * np.uint64(n_units) + np.uint64(first_unit)
            source = np.uint64(unit * unit_step)
            row = np.uint64(token_row)
            tokens_bytes = np.uint32(rows * np.uint32(BLOCK_BYTES))
            scales_bytes = np.uint32(
                np.uint32(np.uint32(rows + np.uint32(3)) >> np.uint32(2)) << np.uint32(4)
            )
            block_bytes = np.uint32(np.uint32(units * np.uint32(unit_bytes)) + tokens_bytes)
            if has_block_scales:
                block_bytes = np.uint32(block_bytes + scales_bytes)
            sizes = tokens_bytes, scales_bytes
            left = k_blocks
            if expert < np.int32(0):
                left = np.uint32(1)
            if is_first:
                is_first = False
                early, ahead = np.uint32(0), left
                while expert >= np.int32(0) and early < np.uint32(stages) and ahead > np.uint32(0):
                    if early == np.uint32(0):
                        write_note(words, early, rows, output_row, token_row, row_block, expert)
                    full = np.uint32(np.uint32(first_barrier) + early)
                    here = blocks_in_stage(ahead)
                    mbarrier_arrive_expect(bars, full, np.uint32(here * block_bytes))
                    load_weights(smem, bars, weights, early, source, units, unit_step, here)
                    source = np.uint64(source + np.uint64(stage_blocks * unit_bytes))
                    ahead = np.uint32(ahead - here)
                    early = np.uint32(early + np.uint32(1))
                wait_for_previous_grid()
                allow_next_grid()
                while stage < early:
                    here = blocks_in_stage(left)
                    load_tokens(smem, bars, tokens, token_scales, stage, row, panel, here, sizes)
                    row = np.uint64(row + np.uint64(stage_blocks) * panel)
                    left = np.uint32(left - here)
                    stage = np.uint32(stage + np.uint32(1))
                if stage == np.uint32(stages):
                    stage = np.uint32(0)
                    parity = np.uint32(0)
            is_noted = left < k_blocks and expert >= np.int32(0)
            while left > np.uint32(0):
                full = np.uint32(np.uint32(first_barrier) + stage)
                mbarrier_wait(bars, np.uint32(full + np.uint32(stages)), parity)
                if not is_noted:
                    is_noted = True
                    write_note(words, stage, rows, output_row, token_row, row_block, expert)
                here = blocks_in_stage(left)
                if expert < np.int32(0):
                    mbarrier_arrive(bars, full)
                else:
                    mbarrier_arrive_expect(bars, full, np.uint32(here * block_bytes))
                    load_weights(smem, bars, weights, stage, source, units, unit_step, here)
                    load_tokens(smem, bars, tokens, token_scales, stage, row, panel, here, sizes)
                    source = np.uint64(source + np.uint64(stage_blocks * unit_bytes))
                    row = np.uint64(row + np.uint64(stage_blocks) * panel)
                stage = np.uint32(stage + np.uint32(1))
                if stage == np.uint32(stages):
                    stage = np.uint32(0)
                    parity = np.uint32(parity ^ np.uint32(1))
                left = np.uint32(left - here)
            tile = np.uint32(tile + np.uint32(cuda.gridDim.x))
        if is_first:
            wait_for_previous_grid()
            allow_next_grid()
        full = np.uint32(np.uint32(first_barrier) + stage)
        mbarrier_wait(bars, np.uint32(full + np.uint32(stages)), parity)
        zero = np.uint32(0)
        write_note(words, stage, zero, zero, zero, zero, np.int32(0))
        mbarrier_arrive(bars, full)

    return load_tiles
