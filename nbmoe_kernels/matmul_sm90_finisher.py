"""The finishers of the fused Hopper matmul: three warps beside the producer that take a tile's sums
from shared memory and finish them, while the consumers multiply the next tile.

Only where registers are handed over, and the producer's warpgroup has warps to spare.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.mbarrier import mbarrier_wait
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig
from nbmoe_kernels.matmul_sm90_tiles import make_next_tile
from nbmoe_kernels.warp_arrival import arrive_for_warp

MakeTake = Callable[[HopperMatmulConfig], tuple[Callable[..., Any], Callable[..., Any]]]
"""Of a config: ``prepare(expert, row, args)``, which asks for what a tile's end needs, and
``take(smem, group, finisher, prepared, row, rows, m_tile, n, args)``: the share of thread
``finisher`` of 96 in finishing what warpgroup ``group`` has left."""

FINISHERS = 96
"""Threads."""


def make_finish(config: HopperMatmulConfig, make_take: MakeTake) -> Callable[..., Any]:
    """``finish(words, smem, bars, n, args)``: all of a block's tiles."""
    next_tile = make_next_tile(config)
    prepare, take = make_take(config)
    first_kept, warpgroups = config.kept_at // 8, config.warpgroups
    first_finisher = config.consumers + 32

    @device_function
    def finish(words, smem, bars, n, args):
        finisher = np.uint32(np.uint32(cuda.threadIdx.x) - np.uint32(first_finisher))
        kept = np.uint32(0)
        place, told, expert, row, rows, m_tile = next_tile(words, bars, np.uint32(0), np.uint32(0))
        while rows > np.uint32(0):
            prepared = prepare(expert, row, args)
            group = np.uint32(0)
            while group < np.uint32(warpgroups):
                barrier = np.uint32(np.uint32(first_kept) + group)
                mbarrier_wait(bars, barrier, kept)
                take(smem, group, finisher, prepared, row, rows, m_tile, n, args)
                arrive_for_warp(bars, np.uint32(barrier + np.uint32(warpgroups)))
                group = np.uint32(group + np.uint32(1))
            kept = np.uint32(kept ^ np.uint32(1))
            place, told, expert, row, rows, m_tile = next_tile(words, bars, place, told)

    return finish
