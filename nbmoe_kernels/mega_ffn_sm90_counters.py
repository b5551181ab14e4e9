"""How the down tiles of a Hopper MegaFFN know that their tokens are there.

A segment has a counter in global memory, u32, 0 between launches.

    arrive      a warpgroup's share of a gate/up tile, or what finishes it, adds 1 once all its
                threads have stored: U * warpgroups in all. The addition releases, at the GPU's
                scope, the stores of the threads that have met before it.
    wait        the producer of a down tile waits until they are there, acquires them, and fences:
                bulk copies read what ordinary stores wrote.
    clear       then it adds 1 itself. Whose addition is the last of the D down tiles has nobody
                behind it that waits, and puts the counter back to 0.

Masked segments have no gate/up tiles and no use of a counter.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.atomics import atomic, load, reduction, store, wait_ge
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.device.sync import elect, fence_proxy_async_global, named_barrier_sync
from nbmoe_kernels.device.warp import shuffle_from, sync_warp

_count = reduction("add", order="release")
_take = atomic("add")
_read = load("u32", order="relaxed")
_wait = wait_ge("u32")
_put = store("u32", order="relaxed")
_FIRST = np.uint32(0)


def make_arrive(first_barrier: int, threads: int) -> Callable[..., Any]:
    """``arrive(counters, segment, group)``: ``threads`` threads have stored their results.

    They meet at named barrier ``first_barrier`` + group.
    """

    @device_function
    def arrive(counters, segment, group):
        named_barrier_sync(np.uint32(np.uint32(first_barrier) + group), np.uint32(threads))
        if np.uint32(np.uint32(cuda.threadIdx.x) % np.uint32(threads)) == np.uint32(0):
            _count(counters, np.uint64(segment), np.uint32(1))

    return arrive


@device_function
def is_complete(counters, segment, count):
    """By all lanes: whether all of a segment's gate/up tiles have arrived; orders nothing."""
    # Each lane may see another value, and all must go the same way: the first one's counts.
    return shuffle_from(_read(counters, np.uint64(segment)), _FIRST) >= count


@device_function
def wait_and_clear(counters, segment, up_count, down_count):
    """By all lanes of the producer: the segment's tokens may be copied after this."""
    _wait(counters, np.uint64(segment), up_count)
    fence_proxy_async_global()
    sync_warp()
    if elect() == np.uint32(1):
        before = _take(counters, np.uint64(segment), np.uint32(1))
        if np.uint32(before + np.uint32(1)) == np.uint32(up_count + down_count):
            _put(counters, np.uint64(segment), np.uint32(0))
