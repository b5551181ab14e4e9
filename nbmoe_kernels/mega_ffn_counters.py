"""How the down tiles of a MegaFFN know that what they multiply is there.

A segment has a counter in global memory, u32, 0 between launches.

    count       a gate/up tile, or a part of it that is stored by itself, adds 1 once all its
                threads have stored: ``up_count`` in all. The addition releases, at the GPU's scope,
                the stores of the threads that have met before it.
    wait        a down tile waits until all of them have been added, and acquires them.
    leave       then it adds 1 itself. Whose addition is the last of the down tiles has nobody
                behind it that waits, and puts the counter back to 0.

Masked segments have no gate/up tiles and no use of a counter.
"""

import numpy as np

from nbmoe_kernels.device.atomics import atomic, reduction, store, wait_ge
from nbmoe_kernels.device.op import device_function

_count = reduction("add", order="release")
_take = atomic("add")
_wait = wait_ge("u32")
_put = store("u32", order="relaxed")
_ZERO, _ONE = np.uint32(0), np.uint32(1)


@device_function
def count_tile(counters, segment):
    """By one thread, behind a barrier of all that have stored."""
    _count(counters, np.uint64(segment), _ONE)


@device_function
def wait_for_tiles(counters, segment, up_count):
    """By all that read, or by one before a barrier of them."""
    _wait(counters, np.uint64(segment), up_count)


@device_function
def leave_counter(counters, segment, up_count, down_count):
    """By one thread of a down tile, behind its wait."""
    before = _take(counters, np.uint64(segment), _ONE)
    if np.uint32(before + _ONE) == np.uint32(up_count + down_count):
        _put(counters, np.uint64(segment), _ZERO)
