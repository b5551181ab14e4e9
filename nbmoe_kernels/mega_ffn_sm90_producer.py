"""The producer of a Hopper MegaFFN: one warp that fills the ring of stages for both matmuls.

As `matmul_sm90_producer`, with tiles that are drawn. What comes late are the tokens of a down tile
whose gate/up tiles are still at work: then the weights of as many stages as the ring has are asked
for first. Counters may be the previous kernel's, too, so nothing is drawn before it has ended;
until then each block asks for the first weights of a tile, another one each, to come to the L2
cache.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.bulk import bulk_prefetch
from nbmoe_kernels.device.grid_dependency import wait_for_previous_grid
from nbmoe_kernels.device.mbarrier import mbarrier_wait
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.device.sync import elect
from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig
from nbmoe_kernels.matmul_sm90_copies import make_copies
from nbmoe_kernels.matmul_sm90_ring import make_next_stage
from nbmoe_kernels.matmul_sm90_schedule import make_find_tile
from nbmoe_kernels.matmul_sm90_tiles import make_tell_tile
from nbmoe_kernels.mega_ffn_order import (
    are_plenty,
    chunk_segments,
    is_down_tile,
    make_find_item,
    segment_of,
    tile_of,
)
from nbmoe_kernels.mega_ffn_sm90_counters import (
    ask_for_tile,
    is_complete,
    take_tile,
    wait_and_leave,
)

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
        token_rows, counters, segment, up_count, down_tiles, is_down,
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
        if is_down and not is_complete(counters, segment, up_count):
            left, early, early_parity = k64, stage, parity
            while ahead < np.uint32(stages) and left > _ZERO:
                blocks = min(left, np.uint32(stage_blocks))
                source = unit_at + np.uint64(np.uint32(ahead * np.uint32(group_bytes)))
                mbarrier_wait(bars, np.uint32(np.uint32(first_empty) + early), early_parity)
                load_weights(smem, bars, weights, early, blocks, rows, source, group_pitch)
                early, early_parity = next_stage(early, early_parity)
                ahead = np.uint32(ahead + _ONE)
                left = np.uint32(left - blocks)
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
    def prefetch(words, weights, n64, k64, item, num_slots):
        """The first stages of a gate/up tile's weights."""
        expert, _, _, _ = find_tile(words, segment_of(item), num_slots)
        first_unit = np.uint32(tile_of(item) * np.uint32(warpgroups))
        units = min(np.uint32(warpgroups), np.uint32(n64 - first_unit))
        if expert >= np.int32(0) and elect() == _ONE:
            unit = np.uint64(expert) * np.uint64(n64) + np.uint64(first_unit)
            blocks = min(k64, np.uint32(stages * stage_blocks))
            pitch = np.uint64(k64) * np.uint64(unit_bytes)
            at, nbytes = unit * pitch, np.uint32(blocks * np.uint32(unit_bytes))
            while units > _ZERO:
                bulk_prefetch(weights, at, nbytes)
                at = at + pitch
                units = np.uint32(units - _ONE)

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
        index = np.uint32(cuda.blockIdx.x)
        if index < np.uint32(segments * up_tiles):
            item = find_item(index, segments, chunk, up_tiles, down_tiles)
            if not is_down_tile(item):
                prefetch(words, up[1], up[3], up[4], item, num_slots)
        wait_for_previous_grid()
        index = take_tile(counters, ask_for_tile(counters), items)
        while index < items:
            draws_ahead = are_plenty(index, items, grid)
            following = _ZERO
            if draws_ahead:
                following = ask_for_tile(counters)
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
                    stage, parity, token_rows, counters, segment, up_count, down_tiles, is_down,
                )  # fmt: skip
            if not draws_ahead:
                following = ask_for_tile(counters)
            index = take_tile(counters, following, items)
        tell_tile(words, bars, place, read, np.int32(0), _ZERO, _ZERO, _ZERO)

    return produce
