"""How a warp arrives at an mbarrier: all of its lanes have done what the arrival says.

One lane arrives for all, after they have met: an arrival orders the accesses of the lane that makes
it, and the meeting those of the others before it.
"""

import numpy as np
from numba import cuda

from nbmoe_kernels.device.mbarrier import mbarrier_arrive
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.device.warp import sync_warp

ARRIVALS = 1
"""Of a warp: what mbarriers count. `tests.sanitizers` sets 32, before any kernel is made, for a
tool that does not follow the meeting."""


@device_function
def arrives():
    """Whether the lane does, where the warp has just waited for wgmma together.

    Such a wait is also a meeting of the lanes; another one would make the assembler serialize
    wgmma's products.
    """
    lane = np.uint32(np.uint32(cuda.threadIdx.x) & np.uint32(31))
    return np.uint32(ARRIVALS) == np.uint32(32) or lane == np.uint32(0)


@device_function
def arrive_for_warp(bars, barrier):
    """`ARRIVALS` at ``bars[barrier]``, by all lanes of a warp together."""
    sync_warp()
    if arrives():
        mbarrier_arrive(bars, barrier)
