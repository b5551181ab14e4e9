"""Zeros where a Hopper matmul's tokens go, before the first copies.

A tile is as wide as a compiled width, and a copy brings a segment's rows only: the tensor core also
reads the places behind them, whose products nobody stores. Later those hold what an earlier tile
left, at first these zeros.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.device.sync import fence_proxy_async_shared
from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig

FIRST_THREAD = 64
"""The warps before make the schedule's table and the barriers meanwhile."""


def make_clear_tokens(config: HopperMatmulConfig) -> Callable[..., Any]:
    """``clear_tokens(bars)``, by the block's threads from `FIRST_THREAD` on."""
    stages, step = config.stages, config.stage_bytes // 8
    count, threads = config.weights_at // 8, config.threads - FIRST_THREAD

    @device_function
    def clear_tokens(bars):
        thread = np.uint32(np.uint32(cuda.threadIdx.x) - np.uint32(FIRST_THREAD))
        for stage in range(stages):
            at = np.uint32(np.uint32(stage * step) + thread)
            end = np.uint32(stage * step + count)
            while at < end:
                bars[at] = np.uint64(0)
                at = np.uint32(at + np.uint32(threads))
        # The tensor core and the copies reach shared memory another way than threads.
        fence_proxy_async_shared()

    return clear_tokens
