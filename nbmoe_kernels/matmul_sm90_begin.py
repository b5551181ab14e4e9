"""How a block of a Hopper matmul begins: the schedule's table, the mbarriers, places of tokens.

Synchronisation: the first warp makes the table, a thread of the second one the mbarriers, the other
warps clear; one block barrier after that.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.grid_dependency import wait_for_previous_grid
from nbmoe_kernels.device.mbarrier import fence_mbarrier_init
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.matmul_sm90_clear import FIRST_THREAD, make_clear_tokens
from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig
from nbmoe_kernels.matmul_sm90_ring import make_init_barriers
from nbmoe_kernels.matmul_sm90_schedule import make_build_table
from nbmoe_kernels.matmul_sm90_tiles import make_init_tiles


def make_begin(config: HopperMatmulConfig) -> Callable[..., Any]:
    """``begin(words, bars, expert_start, expert_ids, num_slots, num_rows, routed_before)``.

    By all threads; ``words`` and ``bars`` are views of shared memory. Without ``routed_before``
    nothing is touched before the previous kernel has ended.
    """
    init_barriers, init_tiles = make_init_barriers(config), make_init_tiles(config)
    build_table = make_build_table(config.max_width, config.max_slots, config.table_at // 4)
    # Warps that multiply by themselves read only rows that were copied.
    clear_tokens, clears = make_clear_tokens(config), not config.warp_products

    @device_function
    def begin(words, bars, expert_start, expert_ids, num_slots, num_rows, routed_before):
        thread = np.uint32(cuda.threadIdx.x)
        if routed_before == np.uint32(0):
            wait_for_previous_grid()
        if thread < np.uint32(32):
            build_table(words, expert_start, expert_ids, num_slots, num_rows)
        elif thread == np.uint32(32):
            init_barriers(bars)
            init_tiles(bars)
            fence_mbarrier_init()
        elif clears and thread >= np.uint32(FIRST_THREAD):
            clear_tokens(bars)
        cuda.syncthreads()

    return begin
