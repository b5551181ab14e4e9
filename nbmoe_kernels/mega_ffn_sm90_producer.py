"""The producer of a Hopper MegaFFN: one warp that fills the ring of stages for both matmuls.

As `matmul_sm90_producer`. What comes late are tokens: those of the first tile, which the previous
kernel makes, and those of a down tile whose gate/up tiles are still at work. Then the weights of as
many stages as the ring has are asked for first.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.grid_dependency import wait_for_previous_grid
from nbmoe_kernels.device.mbarrier import mbarrier_wait
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig
from nbmoe_kernels.matmul_sm90_copies import make_copies
from nbmoe_kernels.matmul_sm90_ring import make_next_stage
from nbmoe_kernels.matmul_sm90_schedule import make_find_tile
from nbmoe_kernels.matmul_sm90_tiles import make_tell_tile
from nbmoe_kernels.mega_ffn_order import (
    chunk_segments,
    is_down_tile,
    make_find_item,
    segment_of,
    tile_of,
)
from nbmoe_kernels.mega_ffn_sm90_counters import is_complete, wait_and_leave

_ZERO, _ONE = np.uint32(0), np.uint32(1)


def make_produce_ffn(config: HopperMatmulConfig) -> Callable[..., Any]:
    """``produce(words, smem, bars, up, down, counters, num_slots, token_rows)``.

    ``up`` and ``down`` are (tokens, weights, tiles of a segment, 64-row units of an expert,
    64-blocks of K).
    """
    stages, stage_blocks = config.stages, config.stage_blocks
    first_empty = config.barriers_at // 8 + config.stages
    unit_bytes, warpgroups = config.b.unit_bytes, config.warpgroups
    group_bytes = stage_blocks * unit_bytes
    num_segments, find_tile = make_find_tile(config.max_slots, config.table_at // 4)
    find_item, next_stage, tell_tile = (
        make_find_item(),
        make_next_stage(stages),
        make_tell_tile(config),
    )
    load_weights, load_tokens = make_copies(config)

    @device_function
    def fill(
        smem, bars, tokens, weights, n64, k64, expert, m_tile, token_row, rows, stage, parity,
        token_rows, counters, segment, up_count, down_tiles, is_first, is_down,
    ):  # fmt: skip
        """The stages of a tile; returns the ring's next stage and parity."""
        group_pitch = np.uint64(k64) * np.uint64(unit_bytes)
        panel_pitch = np.uint64(token_rows) * np.uint64(128)
        first_unit = np.uint64(expert) * np.uint64(n64) + np.uint64(
            np.uint32(m_tile * np.uint32(warpgroups))
        )
        unit_at, token_at = first_unit * group_pitch, np.uint64(token_row) * np.uint64(128)
        # Stages whose weights are asked for before the tokens are there.
        ahead = _ZERO
        if is_first or (is_down and not is_complete(counters, segment, up_count)):
            left, early, early_parity = k64, stage, parity
            while ahead < np.uint32(stages) and left > _ZERO:
                blocks = min(left, np.uint32(stage_blocks))
                source = unit_at + np.uint64(np.uint32(ahead * np.uint32(group_bytes)))
                mbarrier_wait(bars, np.uint32(np.uint32(first_empty) + early), early_parity)
                load_weights(smem, bars, weights, early, blocks, rows, source, group_pitch)
                early, early_parity = next_stage(early, early_parity)
                ahead = np.uint32(ahead + _ONE)
                left = np.uint32(left - blocks)
        if is_first:
            wait_for_previous_grid()
        if is_down:
            wait_and_leave(counters, segment, up_count, down_tiles)
        left = k64
        while left > _ZERO:
            blocks = min(left, np.uint32(stage_blocks))
            if ahead > _ZERO:
                ahead = np.uint32(ahead - _ONE)
            else:
                mbarrier_wait(bars, np.uint32(np.uint32(first_empty) + stage), parity)
                load_weights(smem, bars, weights, stage, blocks, rows, unit_at, group_pitch)
            load_tokens(smem, bars, tokens, stage, blocks, rows, token_at, panel_pitch)
            unit_at = unit_at + np.uint64(group_bytes)
            token_at = token_at + np.uint64(stage_blocks) * panel_pitch
            stage, parity = next_stage(stage, parity)
            left = np.uint32(left - blocks)
        return stage, parity

    @device_function
    def produce(words, smem, bars, up, down, counters, num_slots, token_rows):
        up_tiles, down_tiles = up[2], down[2]
        segments = num_segments(words, num_slots)
        items = np.uint32(segments * np.uint32(up_tiles + down_tiles))
        grid = np.uint32(cuda.gridDim.x)
        chunk = chunk_segments(grid, up_tiles)
        up_count = np.uint32(up_tiles * np.uint32(warpgroups))
        stage, parity = _ZERO, _ONE
        place, read = _ZERO, _ONE
        is_first = True
        index = np.uint32(cuda.blockIdx.x)
        while index < items:
            word = find_item(index, segments, chunk, up_tiles, down_tiles)
            segment, is_down = segment_of(word), is_down_tile(word)
            expert, row, token_row, rows = find_tile(words, segment, num_slots)
            if is_down or expert >= np.int32(0):
                place, read = tell_tile(words, bars, place, read, expert, row, rows, word)
            if expert >= np.int32(0):
                tokens, weights, n64, k64 = up[0], up[1], up[3], up[4]
                if is_down:
                    tokens, weights, n64, k64 = down[0], down[1], down[3], down[4]
                stage, parity = fill(
                    smem, bars, tokens, weights, n64, k64, expert, tile_of(word), token_row, rows,
                    stage, parity, token_rows, counters, segment, up_count, down_tiles, is_first,
                    is_down,
                )  # fmt: skip
                is_first = False
            index = np.uint32(index + grid)
        tell_tile(words, bars, place, read, np.int32(0), _ZERO, _ZERO, _ZERO)

    return produce
