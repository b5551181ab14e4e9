"""The ring of stages of Hopper's FP8 matmul, and whose turn it is to multiply.

Synchronisation (mbarriers of a stage)

    full    1 arrival, by the producer, which also announces the stage's bytes;
            consumers and the scaler wait before they read the stage
    scaled  1 arrival, by the scaler; consumers wait for it, also of a masked tile's stage, before
            they read the scales' products; block scales only
    empty   4 arrivals a warpgroup, one a warp, once its products of the stage are complete and its
            scales are in registers, and with block scales one of the scaler;
            the producer waits before it fills the stage again

and the named barriers 1 and 2 of `make_turns`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.mbarrier import mbarrier_init, mbarrier_wait
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.device.sync import named_barrier_arrive, named_barrier_sync
from nbmoe_kernels.matmul_fp8_sm90_config import Fp8HopperConfig as Config
from nbmoe_kernels.warp_arrival import ARRIVALS, arrive_for_warp


def make_init_barriers(config: Config, has_block_scales: bool) -> Callable[..., Any]:
    """``init_barriers(bars)``, by one thread."""
    first, stages = config.barriers_at // 8, config.stages
    readers = ARRIVALS * (4 * config.warpgroups + int(has_block_scales))

    @device_function
    def init_barriers(bars):
        for i in range(stages):
            mbarrier_init(bars, np.uint32(first + i), np.uint32(1))
            mbarrier_init(bars, np.uint32(first + stages + i), np.uint32(readers))
            if has_block_scales:
                mbarrier_init(bars, np.uint32(first + 2 * stages + i), np.uint32(ARRIVALS))

    return init_barriers


def make_release_stage(config: Config) -> Callable[..., Any]:
    """``release_stage(bars, stage)``: the warp needs nothing of the stage any more."""
    first_empty = config.barriers_at // 8 + config.stages

    @device_function
    def release_stage(bars, stage):
        arrive_for_warp(bars, np.uint32(np.uint32(first_empty) + stage))

    return release_stage


def make_wait_for_scaler(config: Config) -> Callable[..., Any]:
    """``wait_for_scaler(bars, stage, parity)``: the scaler has dealt with the stage."""
    first_scaled = config.barriers_at // 8 + 2 * config.stages

    @device_function
    def wait_for_scaler(bars, stage, parity):
        mbarrier_wait(bars, np.uint32(np.uint32(first_scaled) + stage), parity)

    return wait_for_scaler


def make_next_stage(config: Config) -> Callable[..., Any]:
    """``next_stage(stage, parity)``: both of the stage after this one."""
    stages = config.stages

    @device_function
    def next_stage(stage, parity):
        stage = np.uint32(stage + np.uint32(1))
        if stage == np.uint32(stages):
            stage = np.uint32(0)
            parity = np.uint32(parity ^ np.uint32(1))
        return stage, parity

    return next_stage


def takes_turns(config: Config, has_block_scales: bool) -> bool:
    """Whether two warpgroups multiply in turns.

    Left to themselves they multiply together, and then both scale their sums while the tensor core
    has nothing to do. Sums without scales are added so fast that turns cost more than they give.
    """
    return has_block_scales and config.warpgroups == 2


def make_turns() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """``first_turn()``, ``take_turn()`` and ``pass_turn()`` of two warpgroups.

    Each has a named barrier, at which its 128 threads wait and the other's arrive.
    """
    both = np.uint32(256)

    @device_function
    def group():
        return np.uint32(np.uint32(cuda.threadIdx.x) >> np.uint32(7))

    @device_function
    def pass_turn():
        named_barrier_arrive(np.uint32(np.uint32(2) - group()), both)

    @device_function
    def take_turn():
        named_barrier_sync(np.uint32(np.uint32(1) + group()), both)

    @device_function
    def first_turn():
        """The second warpgroup begins as if it had just multiplied."""
        if group() == np.uint32(1):
            pass_turn()

    return first_turn, take_turn, pass_turn
