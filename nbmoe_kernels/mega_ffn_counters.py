"""Which tile a block of a MegaFFN does next, and how down tiles know that their rows are there.

Counters are u32 in global memory, 0 between launches: the next tile's number, then one a segment.

    draw        a block takes the next number of the order of tiles. Each draws until it gets a
                number that no tile has, so the last of them all gets ``tiles + blocks - 1``: it
                puts the counter back to 0.
    count       a gate/up tile, or a part of it that is stored by itself, adds 1 once all its
                threads have stored: ``up_count`` in all. The addition releases, at the GPU's scope,
                the stores of the threads that have met before it.
    wait        a down tile waits until all of them have been added, and acquires them.
    leave       then it adds 1 itself. Whose addition is the last of the down tiles has nobody
                behind it that waits, and puts the counter back to 0.

Masked segments have no gate/up tiles and no use of a counter.

A tile that is waited for has a lower number, so a block that runs has taken it, whatever blocks are
on the GPU: the first tile that is not done is never one that waits.
"""

import numpy as np
from numba import cuda

from nbmoe_kernels.device.atomics import atomic, load, reduction, store, wait_ge
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.mega_ffn_layout import NEXT_TILE

_count = reduction("add", order="release")
_take = atomic("add")
_draw = atomic("add")
_read = load("u32", order="relaxed")
_wait = wait_ge("u32")
_put = store("u32", order="relaxed")
_ZERO, _ONE = np.uint32(0), np.uint32(1)


@device_function
def draw_tile(counters):
    """By one thread: the number of the block's next tile."""
    return _draw(counters, np.uint64(0), _ONE)


@device_function
def end_draws(counters, number, tiles):
    """By the thread that has drawn ``number``, which no tile has."""
    if number == np.uint32(tiles + np.uint32(np.uint32(cuda.gridDim.x) - _ONE)):
        _put(counters, np.uint64(0), _ZERO)


@device_function
def _of(segment):
    return np.uint64(np.uint32(segment + np.uint32(NEXT_TILE)))


@device_function
def count_tile(counters, segment):
    """By one thread, behind a barrier of all that have stored."""
    _count(counters, _of(segment), _ONE)


@device_function
def wait_for_tiles(counters, segment, up_count):
    """By all that read, or by one before a barrier of them."""
    _wait(counters, _of(segment), up_count)


@device_function
def leave_counter(counters, segment, up_count, down_count):
    """By one thread of a down tile, behind its wait."""
    before = _take(counters, _of(segment), _ONE)
    if np.uint32(before + _ONE) == np.uint32(up_count + down_count):
        _put(counters, _of(segment), _ZERO)


@device_function
def counted(counters, segment):
    """How many have been counted; orders nothing."""
    return _read(counters, _of(segment))
