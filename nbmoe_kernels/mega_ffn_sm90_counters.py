"""The counters of `mega_ffn_counters` by warps of a Hopper MegaFFN.

draw        a lane of the producer, while many tiles are left a tile ahead: the answer is not
            waited for before the copies of the tile in hand.
arrive      a warpgroup's share of a gate/up tile, or what finishes it, counts once its threads
            have met: U * warpgroups in all.
wait        every lane of a down tile's producer, which then fences: bulk copies read what
            ordinary stores wrote. One lane leaves.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.device.sync import elect, fence_proxy_async_global, named_barrier_sync
from nbmoe_kernels.device.warp import shuffle_from, sync_warp
from nbmoe_kernels.mega_ffn_counters import (
    count_tile,
    counted,
    draw_tile,
    end_draws,
    leave_counter,
    wait_for_tiles,
)

_FIRST = np.uint32(0)


def make_arrive(first_barrier: int, threads: int) -> Callable[..., Any]:
    """``arrive(counters, segment, group)``: ``threads`` threads have stored their results.

    They meet at named barrier ``first_barrier`` + group.
    """

    @device_function
    def arrive(counters, segment, group):
        named_barrier_sync(np.uint32(np.uint32(first_barrier) + group), np.uint32(threads))
        if np.uint32(np.uint32(cuda.threadIdx.x) % np.uint32(threads)) == np.uint32(0):
            count_tile(counters, segment)

    return arrive


@device_function
def ask_for_tile(counters):
    """By all lanes of the producer: draws a number, which one of them gets."""
    number = np.uint32(0)
    if np.uint32(np.uint32(cuda.threadIdx.x) & np.uint32(31)) == _FIRST:
        number = draw_tile(counters)
    return number


@device_function
def take_tile(counters, number, tiles):
    """By all lanes: the number that ``ask_for_tile`` has drawn, for all of them."""
    if number >= tiles:
        end_draws(counters, number, tiles)
    return shuffle_from(number, _FIRST)


@device_function
def is_complete(counters, segment, count):
    """By all lanes: whether all of a segment's gate/up tiles have arrived; orders nothing."""
    # Each lane may see another value, and all must go the same way: the first one's counts.
    return shuffle_from(counted(counters, segment), _FIRST) >= count


@device_function
def wait_and_leave(counters, segment, up_count, down_count):
    """By all lanes of the producer: the segment's tokens may be copied after this."""
    wait_for_tiles(counters, segment, up_count)
    fence_proxy_async_global()
    sync_warp()
    if elect() == np.uint32(1):
        leave_counter(counters, segment, up_count, down_count)
