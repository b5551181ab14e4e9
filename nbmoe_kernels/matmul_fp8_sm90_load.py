"""The producer of Hopper's FP8 matmul: one thread that keeps the ring of stages full.

For each tile of its block the thread writes a note into the tile's first stage, so that consumers
need no schedule of their own, and for each 128-block of K starts the copies of a stage: a unit of
weights a warpgroup, the segment's tokens and, with scales a block, their scales. A masked tile has
one stage with a note alone. A note without rows ends the loop.

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
    def load_weights(smem, bars, weights, stage, source, units, unit_step):
        full = np.uint32(np.uint32(first_barrier) + stage)
        place = np.uint32(stage * np.uint32(stage_bytes))
        for i in unroll(range(warpgroups)):
            if np.uint32(i) < units:
                bulk_load(
                    smem,
                    np.uint32(place + np.uint32(unit_bytes * i)),
                    weights,
                    np.uint64(source + np.uint64(i) * unit_step),
                    np.uint32(unit_bytes),
                    bars,
                    full,
                )

    @device_function
    def load_tokens(smem, bars, tokens, token_scales, stage, row, tokens_bytes, scales_bytes):
        full = np.uint32(np.uint32(first_barrier) + stage)
        place = np.uint32(np.uint32(stage * np.uint32(stage_bytes)) + np.uint32(tokens_at))
        at = np.uint64(row * np.uint64(BLOCK_BYTES))
        bulk_load(smem, place, tokens, at, tokens_bytes, bars, full)
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
            nbytes = np.uint32(np.uint32(units * np.uint32(unit_bytes)) + tokens_bytes)
            if has_block_scales:
                nbytes = np.uint32(nbytes + scales_bytes)
            blocks = k_blocks
            if expert < np.int32(0):
                blocks = np.uint32(1)
            block = np.uint32(0)
            if is_first:
                is_first = False
                early = np.uint32(0)
                if expert >= np.int32(0):
                    early = min(blocks, np.uint32(stages))
                while block < early:
                    if block == np.uint32(0):
                        write_note(words, block, rows, output_row, token_row, row_block, expert)
                    full = np.uint32(np.uint32(first_barrier) + block)
                    mbarrier_arrive_expect(bars, full, nbytes)
                    load_weights(smem, bars, weights, block, source, units, unit_step)
                    source = np.uint64(source + np.uint64(unit_bytes))
                    block = np.uint32(block + np.uint32(1))
                wait_for_previous_grid()
                allow_next_grid()
                block = np.uint32(0)
                while block < early:
                    load_tokens(
                        smem, bars, tokens, token_scales, block, row, tokens_bytes, scales_bytes
                    )
                    row = np.uint64(row + panel)
                    block = np.uint32(block + np.uint32(1))
                stage = early
                if stage == np.uint32(stages):
                    stage = np.uint32(0)
                    parity = np.uint32(0)
            while block < blocks:
                full = np.uint32(np.uint32(first_barrier) + stage)
                mbarrier_wait(bars, np.uint32(full + np.uint32(stages)), parity)
                if block == np.uint32(0):
                    write_note(words, stage, rows, output_row, token_row, row_block, expert)
                if expert < np.int32(0):
                    mbarrier_arrive(bars, full)
                else:
                    mbarrier_arrive_expect(bars, full, nbytes)
                    load_weights(smem, bars, weights, stage, source, units, unit_step)
                    load_tokens(
                        smem, bars, tokens, token_scales, stage, row, tokens_bytes, scales_bytes
                    )
                    source = np.uint64(source + np.uint64(unit_bytes))
                    row = np.uint64(row + panel)
                stage = np.uint32(stage + np.uint32(1))
                if stage == np.uint32(stages):
                    stage = np.uint32(0)
                    parity = np.uint32(parity ^ np.uint32(1))
                block = np.uint32(block + np.uint32(1))
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
