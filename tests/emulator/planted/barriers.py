"""Barriers and collectives that not everybody reaches, or not everybody at the same place."""

import numpy as np
from numba import cuda, int32

from nbmoe_kernels.device.warp import shuffle_up, shuffle_xor, sync_warp
from tests.emulator.planted.case import case, ramp, zeros


@case("BARRIER_DIVERGENT", args=lambda: (ramp(64), zeros(64)), want=lambda x, out: {1: x + 1})
def barrier_in_branch(bug):
    """A barrier under `if`: half of the threads wait there for the others' next barrier."""

    def kernel(x, out):
        t = cuda.threadIdx.x
        if bug:
            if t < 32:
                cuda.syncthreads()  # BUG-A
        out[t] = x[t] + 1
        cuda.syncthreads()  # BUG-B

    return kernel


@case("BARRIER_DIVERGENT", args=lambda: (ramp(64), zeros(64)), want=lambda x, out: {1: x[::-1]})
def barrier_in_both_branches(bug):
    """Each branch has its barrier: as many, but not the same one."""

    def kernel(x, out):
        part = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        part[t] = x[t]
        if bug:
            if t % 2 == 0:
                cuda.syncthreads()  # BUG-A
            else:
                cuda.syncthreads()  # BUG-B
        else:
            cuda.syncthreads()
        out[t] = part[63 - t]

    return kernel


@case(
    "BARRIER_EXITED",
    also=("BARRIER_DIVERGENT",),
    args=lambda: (ramp(50), zeros(50)),
    want=lambda x, out: {1: [*x[1:], 0]},
)
def early_return(bug):
    """The usual guard for a partial block returns, and the barrier comes after it."""

    def kernel(x, out):
        part = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        if bug:
            if t >= x.size:
                return
            part[t] = x[t]
        else:
            part[t] = x[t] if t < x.size else 0
        cuda.syncthreads()  # BUG-A
        if t < x.size:
            out[t] = part[t + 1] if t + 1 < x.size else 0

    return kernel


@case(
    "BARRIER_DIVERGENT",
    args=lambda: (np.array([3, 2], np.int32), zeros(64)),
    want=lambda counts, out: {1: [3] * 32 + [2] * 32},
)
def trip_count_differs(bug):
    """A loop with a barrier in it, whose end depends on the warp."""

    def kernel(counts, out):
        t = cuda.threadIdx.x
        total = int32(0)
        for _ in range(counts[t // 32]):
            total += 1
            if bug:
                cuda.syncthreads()  # BUG-A
        cuda.syncthreads()  # BUG-B
        out[t] = total

    return kernel


@case(
    "COLLECTIVE_DIVERGENT",
    block=32,
    args=lambda: (ramp(32, dtype=np.uint32), zeros(32, dtype=np.uint32)),
    want=lambda x, out: {1: x[np.arange(32) ^ 1]},
)
def shuffle_in_branch(bug):
    """Half of a warp shuffles; the other half is already at the next collective."""

    def kernel(x, out):
        t = cuda.threadIdx.x
        value = x[t]
        if bug:
            if t < 16:
                value = shuffle_xor(value, np.uint32(1))  # BUG-A
        else:
            value = shuffle_xor(value, np.uint32(1))
        sync_warp()  # BUG-B
        out[t] = value

    return kernel


@case(
    "COLLECTIVE_DIVERGENT",
    block=32,
    args=lambda: (ramp(32, dtype=np.uint32), zeros(32, dtype=np.uint32)),
    want=lambda x, out: {1: x[np.arange(32) ^ 1]},
)
def two_shuffles_for_one(bug):
    """Both branches shuffle, so every lane does; but they are two instructions."""

    def kernel(x, out):
        t = cuda.threadIdx.x
        value = x[t]
        if bug:
            if t % 2 == 0:
                value = shuffle_xor(value, np.uint32(1))  # BUG-A
            else:
                value = shuffle_up(value, np.uint32(1))  # BUG-B
        else:
            value = shuffle_xor(value, np.uint32(1))
        out[t] = value

    return kernel


@case(
    "COLLECTIVE_DIVERGENT",
    also=("BARRIER_EXITED", "DEADLOCK"),
    block=32,
    args=lambda: (ramp(20, dtype=np.uint32), zeros(1, dtype=np.uint32)),
    want=lambda x, out: {1: [x.sum()]},
)
def lanes_left_the_warp(bug):
    """Lanes past the end return before a warp sum that counts on all 32."""

    def kernel(x, out):
        t = cuda.threadIdx.x
        if bug and t >= x.size:
            return
        value = x[t] if t < x.size else np.uint32(0)
        for step in range(5):
            value += shuffle_xor(value, np.uint32(1 << step))  # BUG-A
        if t == 0:
            out[0] = value

    return kernel


@case(
    "BARRIER_DIVERGENT",
    args=lambda: (ramp(64), zeros(64)),
    want=lambda x, out: {1: [32] * 64},
)
def vote_against_plain_barrier(bug):
    """One half counts votes at its barrier, the other half waits at a plain one."""

    def kernel(x, out):
        t = cuda.threadIdx.x
        votes = int32(32)
        if bug:
            if t < 32:
                votes = cuda.syncthreads_count(x[t] % 2 == 0)  # BUG-A
            else:
                cuda.syncthreads()  # BUG-B
        else:
            votes = cuda.syncthreads_count(x[t] % 2 == 0)
        out[t] = votes

    return kernel
