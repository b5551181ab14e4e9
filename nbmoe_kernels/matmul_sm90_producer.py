"""The producer of the Hopper matmuls: one warp that fills the ring of stages.

Weights and the schedule do not depend on the kernel before, if that is one of the layer's: then the
first stages' weights are asked for before the wait for it, and tokens after.
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


def make_produce(config: HopperMatmulConfig) -> Callable[..., Any]:
    """``produce(words, smem, bars, tokens, weights, num_slots, m_tiles, n64, k64, token_rows)``.

    One warp copies the stages of all of the block's tiles; ``smem``, ``words`` and ``bars`` are
    views of shared memory. All its lanes walk the loops, so that addresses are the warp's, and one
    of them issues. Masked segments have no stages.
    """
    stages, stage_blocks = config.stages, config.stage_blocks
    first_empty = config.barriers_at // 8 + config.stages
    unit_bytes, warpgroups = config.b.unit_bytes, config.warpgroups
    group_bytes = stage_blocks * unit_bytes
    num_segments, find_tile = make_find_tile(config.max_slots, config.table_at // 4)
    next_stage, tell_tile = make_next_stage(stages), make_tell_tile(config)
    load_weights, load_tokens = make_copies(config)

    @device_function
    def produce(words, smem, bars, tokens, weights, num_slots, m_tiles, n64, k64, token_rows):
        num_tiles = np.uint32(num_segments(words, num_slots) * m_tiles)
        group_pitch = np.uint64(k64) * np.uint64(unit_bytes)
        panel_pitch = np.uint64(token_rows) * np.uint64(128)
        stage, parity = np.uint32(0), np.uint32(1)
        place, read = np.uint32(0), np.uint32(1)
        # Stages of the first tile whose weights are asked for before the previous kernel ends.
        ahead = np.uint32(0)
        is_first = True
        tile = np.uint32(cuda.blockIdx.x)
        while tile < num_tiles:
            segment = np.uint32(tile // m_tiles)
            m_tile = np.uint32(tile - np.uint32(segment * m_tiles))
            expert, row, token_row, rows = find_tile(words, segment, num_slots)
            place, read = tell_tile(words, bars, place, read, expert, row, rows, m_tile)
            if expert >= np.int32(0):
                first_unit = np.uint64(expert) * np.uint64(n64) + np.uint64(
                    np.uint32(m_tile * np.uint32(warpgroups))
                )
                unit_at = first_unit * group_pitch
                token_at = np.uint64(token_row) * np.uint64(128)
                if is_first:
                    left = k64
                    while ahead < np.uint32(stages) and left > np.uint32(0):
                        blocks = min(left, np.uint32(stage_blocks))
                        source = unit_at + np.uint64(np.uint32(ahead * np.uint32(group_bytes)))
                        load_weights(smem, bars, weights, ahead, blocks, rows, source, group_pitch)
                        ahead = np.uint32(ahead + np.uint32(1))
                        left = np.uint32(left - blocks)
                    wait_for_previous_grid()
                    is_first = False
                left = k64
                while left > np.uint32(0):
                    blocks = min(left, np.uint32(stage_blocks))
                    if ahead > np.uint32(0):
                        ahead = np.uint32(ahead - np.uint32(1))
                    else:
                        mbarrier_wait(bars, np.uint32(np.uint32(first_empty) + stage), parity)
                        load_weights(smem, bars, weights, stage, blocks, rows, unit_at, group_pitch)
                    load_tokens(smem, bars, tokens, stage, blocks, rows, token_at, panel_pitch)
                    unit_at = unit_at + np.uint64(group_bytes)
                    token_at = token_at + np.uint64(stage_blocks) * panel_pitch
                    stage, parity = next_stage(stage, parity)
                    left = np.uint32(left - blocks)
            tile = np.uint32(tile + np.uint32(cuda.gridDim.x))
        nothing = np.uint32(0)
        tell_tile(words, bars, place, read, np.int32(0), nothing, nothing, nothing)

    return produce
