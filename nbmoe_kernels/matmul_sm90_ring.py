"""The ring of stages between the producer and the consumers of a Hopper matmul.

Synchronisation (mbarriers of a stage)

    full    1 arrival, by the producer, which also announces the stage's bytes;
            consumers wait before they read the stage
    empty   4 arrivals a warpgroup, one a warp, once its products of the stage are complete, or all
            it needs of the stage is in registers;
            the producer waits before it copies into the stage again

and, where spare warps store results, of a consumers' warpgroup

    kept    4 arrivals, one a warp, once its results of a tile are in shared memory;
            the finishers wait before they read them
    taken   3 arrivals, one a finishers' warp, once it has read them;
            the warpgroup waits before it leaves the next tile's results there
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from nbmoe_kernels.device.mbarrier import mbarrier_init
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig
from nbmoe_kernels.warp_arrival import ARRIVALS

_WARPS = 4
"""Of a warpgroup."""


def make_init_barriers(config: HopperMatmulConfig) -> Callable[..., Any]:
    """``init_barriers(bars)``, by one thread."""
    first, stages = config.barriers_at // 8, config.stages
    warpgroups, stores_later = config.warpgroups, config.stores_later
    readers, first_kept = ARRIVALS * _WARPS * warpgroups, config.kept_at // 8

    @device_function
    def init_barriers(bars):
        for i in range(stages):
            mbarrier_init(bars, np.uint32(first + i), np.uint32(1))
            mbarrier_init(bars, np.uint32(first + stages + i), np.uint32(readers))
        if stores_later:
            for i in range(warpgroups):
                mbarrier_init(bars, np.uint32(first_kept + i), np.uint32(ARRIVALS * _WARPS))
                taken = np.uint32(first_kept + warpgroups + i)
                mbarrier_init(bars, taken, np.uint32(ARRIVALS * (_WARPS - 1)))

    return init_barriers


def make_next_stage(stages: int) -> Callable[..., Any]:
    """``next_stage(stage, parity)``, around the ring."""

    @device_function
    def next_stage(stage, parity):
        stage = np.uint32(stage + np.uint32(1))
        if stage == np.uint32(stages):
            return np.uint32(0), np.uint32(parity ^ np.uint32(1))
        return stage, parity

    return next_stage
