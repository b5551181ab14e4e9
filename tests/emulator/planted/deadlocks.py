"""Threads that wait for what never comes, and loops that never end."""

import numpy as np
from numba import cuda, int32

from nbmoe_kernels.device.atomics import compare_and_swap, reduction, store, wait_ge
from nbmoe_kernels.device.sync import named_barrier_arrive, named_barrier_sync
from tests.emulator.planted.case import case, ramp, zeros

arrive = reduction("add", order="release")
wait_count = wait_ge()
try_lock = compare_and_swap(order="acquire")
unlock = store(order="release")
ZERO, ONE = np.uint32(0), np.uint32(1)


def counters(count):
    """Counters of arrivals at 0."""
    return zeros(count, dtype=np.uint32)


@case(
    "DEADLOCK",
    grid=2,
    block=1,
    args=lambda: (counters(2), zeros(2)),
    want=lambda counts, out: {1: [1, 1]},
)
def two_blocks_wait_for_each_other(bug):
    """Each block waits for the other before it arrives."""

    def kernel(counts, out):
        b = cuda.blockIdx.x
        if not bug:
            arrive(counts, b, ONE)
        wait_count(counts, 1 - b, ONE)  # BUG-A
        if bug:
            arrive(counts, b, ONE)
        out[b] = 1

    return kernel


@case(
    "DEADLOCK",
    grid=4,
    block=1,
    args=lambda: (counters(1), zeros(1)),
    want=lambda counts, out: {1: [1]},
)
def more_arrivals_than_producers(bug):
    """The consumer counts itself as a producer."""

    def kernel(counts, out):
        if cuda.blockIdx.x < 3:
            arrive(counts, 0, ONE)
        else:
            wait_count(counts, 0, np.uint32(4 if bug else 3))  # BUG-A
            out[0] = 1

    return kernel


@case(
    "DEADLOCK",
    grid=4,
    block=1,
    args=lambda: (np.array([5, 0, 2], np.int32), counters(1), zeros(1)),
    want=lambda rows, counts, out: {2: [7]},
)
def empty_expert_never_arrives(bug):
    """An expert without rows has nothing to do, and so it does not report that it is done."""

    def kernel(rows, counts, out):
        e = cuda.blockIdx.x
        if e < 3:
            if not bug or rows[e] > 0:
                arrive(counts, 0, ONE)
        else:
            wait_count(counts, 0, np.uint32(3))  # BUG-A
            out[0] = rows[0] + rows[1] + rows[2]

    return kernel


@case(
    "LIVELOCK",
    block=1,
    args=lambda: (np.array([3, 5, 0, 2], np.int32), zeros(4)),
    want=lambda rows, out: {1: 2 * rows},
    max_steps=2000,
)
def persistent_loop_never_advances(bug):
    """`tile += gridDim` is under the `if` that skips empty tiles."""

    def kernel(rows, out):
        tile = cuda.blockIdx.x
        while tile < 4:
            if rows[tile] > 0:  # BUG-A
                out[tile] = 2 * rows[tile]
                tile += cuda.gridDim.x
            elif not bug:
                tile += cuda.gridDim.x

    return kernel


@case(
    "DEADLOCK",
    also=("LIVELOCK",),
    grid=2,
    block=1,
    args=lambda: (counters(1), zeros(1)),
    want=lambda lock, count: {1: [2]},
    max_steps=20000,
)
def lock_never_released(bug):
    """The second block tries for ever to take a lock that the first one keeps."""

    def kernel(lock, count):
        while try_lock(lock, 0, ZERO, ONE) != ZERO:
            cuda.nanosleep(64)  # BUG-A
        count[0] += 1
        if not bug:
            unlock(lock, 0, ZERO)

    return kernel


@case(
    "LIVELOCK",
    also=("LIVELOCK",),
    args=lambda: (counters(1), zeros(1)),
    want=lambda lock, count: {1: [64]},
    max_steps=20000,
)
def lock_held_across_barrier(bug):
    """The owner of the lock waits in a barrier for those who wait for the lock."""

    def kernel(lock, count):
        while try_lock(lock, 0, ZERO, ONE) != ZERO:
            cuda.nanosleep(64)  # BUG-A
        count[0] += 1
        if bug:
            cuda.syncthreads()
        unlock(lock, 0, ZERO)

    return kernel


@case(
    "DEADLOCK",
    grid=3,
    block=1,
    args=lambda: (counters(3), zeros(3)),
    want=lambda counts, out: {1: [0, 1, 2]},
    resident=2,
)
def waits_for_a_block_without_room(bug):
    """Two blocks have room at a time; the first waits for the last, which has none."""

    def kernel(counts, out):
        b = cuda.blockIdx.x
        if bug:
            if b < 2:
                wait_count(counts, 2, ONE)  # BUG-A
        elif b > 0:
            wait_count(counts, b - 1, ONE)
        out[b] = b
        arrive(counts, b, ONE)

    return kernel


@case(
    "BARRIER_DIVERGENT",
    block=96,
    args=lambda: (ramp(32), zeros(32)),
    want=lambda x, out: {1: 2 * x},
)
def named_barrier_counts_too_many(bug):
    """Barrier 1 is for a producer and a consumer warp; the third warp of the count never comes."""

    def kernel(x, out):
        part = cuda.shared.array(32, int32)
        t = cuda.threadIdx.x
        count = np.uint32(96 if bug else 64)
        if t < 32:
            part[t] = 2 * x[t]
            named_barrier_arrive(ONE, count)
        elif t < 64:
            named_barrier_sync(ONE, count)  # BUG-A
            out[t - 32] = part[t - 32]

    return kernel


@case(
    "BARRIER_DIVERGENT",
    args=lambda: (ramp(64), zeros(64)),
    want=lambda x, out: {1: x[::-1]},
)
def two_named_barriers(bug):
    """Two warps meet, each at a barrier of its own."""

    def kernel(x, out):
        part = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        part[t] = x[t]
        barrier = np.uint32(1 + t // 32 if bug else 1)
        named_barrier_sync(barrier, np.uint32(64))  # BUG-A
        out[t] = part[63 - t]

    return kernel


@case(
    "LIVELOCK",
    block=1,
    args=lambda: (ramp(1), zeros(1)),
    want=lambda x, out: {1: [7]},
    max_steps=2000,
)
def search_steps_over_the_end(bug):
    """Halving an interval with both ends included: one element is left, and left, and left."""

    def kernel(x, out):
        low, high = 0, 7
        while low < high:
            middle = (low + high) // 2
            if x[0] > 0:  # BUG-A
                low = middle if bug else middle + 1
            else:
                high = middle
        out[0] = low

    return kernel
