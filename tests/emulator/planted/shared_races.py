"""Data races in shared memory: two threads use a word, one of them writes, and nothing orders them.

Threads of a warp are no exception: since Volta they do not run in lock step.
"""

import numpy as np
from numba import cuda, int32, uint8

from nbmoe_kernels.device.memory import load_shared_word
from nbmoe_kernels.device.warp import sync_warp
from tests.emulator.planted.case import case, ramp, zeros


@case(
    "RACE_RAW",
    also=("UNINIT_READ",),
    args=lambda: (ramp(64), zeros(64)),
    want=lambda x, out: {1: x[[0, *range(63)]]},
)
def read_before_barrier(bug):
    """A thread reads what its left neighbour writes."""

    def kernel(x, out):
        part = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        part[t] = x[t]  # BUG-A
        if not bug:
            cuda.syncthreads()
        out[t] = part[max(t - 1, 0)]  # BUG-B

    return kernel


@case(
    "RACE_WAR",
    args=lambda: (ramp(64), zeros(64)),
    want=lambda x, out: {1: x[[*range(1, 64), 63]]},
)
def shift_in_place(bug):
    """Everybody moves down by one: the element is overwritten while a neighbour reads it."""

    def kernel(x, out):
        part = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        part[t] = x[t]
        cuda.syncthreads()
        mine = part[min(t + 1, 63)]  # BUG-A
        if not bug:
            cuda.syncthreads()
        part[t] = mine  # BUG-B
        cuda.syncthreads()
        out[t] = part[t]

    return kernel


@case("RACE_WAW", args=lambda: (ramp(64), zeros(32)), want=lambda x, out: {1: x[::2]})
def two_threads_one_word(bug):
    """Index t // 2 makes pairs of threads write one word; only the even one may."""

    def kernel(x, out):
        part = cuda.shared.array(32, int32)
        t = cuda.threadIdx.x
        if bug or t % 2 == 0:
            part[t // 2] = x[t]  # BUG-A
        cuda.syncthreads()
        if t < 32:
            out[t] = part[t]

    return kernel


@case("RACE_WAW", args=lambda: (ramp(64), zeros(1)), want=lambda x, out: {1: [1]})
def flag_cleared_late(bug):
    """Thread 0 clears a flag that others set: without a barrier the clearing may come last."""

    def kernel(x, out):
        flag = cuda.shared.array(1, int32)
        t = cuda.threadIdx.x
        if t == 0:
            flag[0] = 0  # BUG-A
        if not bug:
            cuda.syncthreads()
        if x[t] == 64:
            flag[0] = 1  # BUG-B
        cuda.syncthreads()
        if t == 0:
            out[0] = flag[0]

    return kernel


def _tile_sums(x, out):
    return {1: x.reshape(4, 64)[:, ::-1].sum(axis=0)}


@case("RACE_WAR", args=lambda: (ramp(256), zeros(64)), want=_tile_sums)
def tile_loop_second_barrier(bug):
    """The barrier at the loop's end keeps the next tile from overwriting this one."""

    def kernel(x, out):
        tile = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        total = int32(0)
        for k in range(4):
            tile[t] = x[64 * k + t]  # BUG-B
            cuda.syncthreads()
            total += tile[63 - t]  # BUG-A
            if not bug:
                cuda.syncthreads()
        out[t] = total

    return kernel


@case("RACE_RAW", also=("UNINIT_READ",), args=lambda: (ramp(256), zeros(64)), want=_tile_sums)
def tile_loop_first_barrier(bug):
    """The barrier after the store makes the tile complete before it is read."""

    def kernel(x, out):
        tile = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        total = int32(0)
        for k in range(4):
            tile[t] = x[64 * k + t]  # BUG-A
            if not bug:
                cuda.syncthreads()
            total += tile[63 - t]  # BUG-B
            cuda.syncthreads()
        out[t] = total

    return kernel


@case("RACE_WAR", args=lambda: (ramp(256), zeros(64)), want=_tile_sums)
def double_buffer_same_half(bug):
    """Two halves in turn need one barrier a step; the same half twice needs two."""

    def kernel(x, out):
        tile = cuda.shared.array((2, 64), int32)
        t = cuda.threadIdx.x
        total = int32(0)
        for k in range(4):
            half = k // 2 if bug else k % 2
            tile[half, t] = x[64 * k + t]  # BUG-B
            cuda.syncthreads()
            total += tile[half, 63 - t]  # BUG-A
        out[t] = total

    return kernel


@case(
    "RACE_RAW",
    also=("UNINIT_READ",),
    block=32,
    args=lambda: (ramp(32), zeros(32)),
    want=lambda x, out: {1: x.reshape(16, 2)[:, ::-1].ravel()},
)
def warp_in_lock_step(bug):
    """Lanes of one warp exchange values through shared memory and trust lock step."""

    def kernel(x, out):
        part = cuda.shared.array(32, int32)
        t = cuda.threadIdx.x
        part[t] = x[t]  # BUG-A
        if not bug:
            sync_warp()
        out[t] = part[t ^ 1]  # BUG-B

    return kernel


@case(
    "RACE_RAW",
    args=lambda: (ramp(64), zeros(1)),
    want=lambda x, out: {1: [x.sum()]},
)
def reduction_tree_last_steps(bug):
    """The old trick to drop the barriers once a single warp is left."""

    def kernel(x, out):
        part = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        part[t] = x[t]
        cuda.syncthreads()
        step = 32
        while step > 0:
            if t < step:
                part[t] += part[t + step]  # BUG-A
            if not bug or step > 16:
                cuda.syncthreads()
            step //= 2
        if t == 0:
            out[0] = part[0]

    return kernel


@case(
    "RACE_RAW",
    also=("UNINIT_READ", "RACE_WAW"),
    args=lambda: (ramp(64), zeros(1)),
    want=lambda x, out: {1: [x.sum()]},
)
def reduction_tree_first_step(bug):
    """The tree starts before the leaves are there."""

    def kernel(x, out):
        part = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        part[63 - t] = x[t]  # BUG-A
        if not bug:
            cuda.syncthreads()
        step = 32
        while step > 0:
            if t < step:
                part[t] += part[t + step]  # BUG-B
            cuda.syncthreads()
            step //= 2
        if t == 0:
            out[0] = part[0]

    return kernel


@case(
    "RACE_RAW",
    also=("UNINIT_READ",),
    args=lambda: (ramp(64), zeros(64)),
    want=lambda x, out: {1: x * x[0]},
)
def broadcast(bug):
    """One thread looks something up for everybody."""

    def kernel(x, out):
        factor = cuda.shared.array(1, int32)
        t = cuda.threadIdx.x
        if t == 0:
            factor[0] = x[0]  # BUG-A
        if not bug:
            cuda.syncthreads()
        out[t] = x[t] * factor[0]  # BUG-B

    return kernel


@case(
    "RACE_WAR",
    args=lambda: (ramp(4), zeros(64)),
    want=lambda x, out: {1: [x.sum()] * 64},
)
def broadcast_again(bug):
    """The second value comes while somebody still reads the first."""

    def kernel(x, out):
        factor = cuda.shared.array(1, int32)
        t = cuda.threadIdx.x
        total = int32(0)
        for k in range(4):
            if t == 0:
                factor[0] = x[k]  # BUG-B
            cuda.syncthreads()
            total += factor[0]  # BUG-A
            if not bug:
                cuda.syncthreads()
        out[t] = total

    return kernel


@case(
    "RACE_WAR",
    args=lambda: (ramp(64), zeros(64), zeros(2)),
    want=lambda x, out, sums: {1: x[::-1], 2: [x[:32].sum(), x[32:].sum()]},
)
def memory_used_again(bug):
    """The epilogue puts partial sums where the mainloop's tile was."""

    def kernel(x, out, sums):
        memory = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        memory[t] = x[t]
        cuda.syncthreads()
        out[t] = memory[63 - t]  # BUG-A
        if not bug:
            cuda.syncthreads()
        if t % 32 == 0:
            total = int32(0)
            for i in range(32):
                total += x[t + i]
            memory[t // 32] = total  # BUG-B
        cuda.syncthreads()
        if t < 2:
            sums[t] = memory[t]

    return kernel


@case(
    "RACE_RAW",
    also=("RACE_WAW",),
    args=lambda: (ramp(64), zeros(8)),
    want=lambda x, out: {1: np.bincount(x % 8, minlength=8)},
)
def histogram_without_atomics(bug):
    """count[i] += 1 is a read and a write; another thread comes between."""

    def kernel(x, out):
        counts = cuda.shared.array(8, int32)
        t = cuda.threadIdx.x
        if t < 8:
            counts[t] = 0
        cuda.syncthreads()
        if bug:
            counts[x[t] % 8] += 1  # BUG-A
        else:
            cuda.atomic.add(counts, x[t] % 8, 1)
        cuda.syncthreads()
        if t < 8:
            out[t] = counts[t]

    return kernel


@case("RACE_WAR", args=lambda: (ramp(64), zeros(64)), want=lambda x, out: {1: x.cumsum()})
def prefix_sum_in_place(bug):
    """Hillis-Steele needs two barriers a step: after the reads and after the writes."""

    def kernel(x, out):
        part = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        part[t] = x[t]
        cuda.syncthreads()
        step = 1
        while step < 64:
            left = int32(0)
            if t >= step:
                left = part[t - step]  # BUG-A
            if not bug:
                cuda.syncthreads()
            part[t] += left  # BUG-B
            cuda.syncthreads()
            step *= 2
        out[t] = part[t]

    return kernel


@case(
    "RACE_RAW",
    also=("UNINIT_READ",),
    block=(8, 8),
    args=lambda: (ramp(8, 8), zeros(8, 8)),
    want=lambda x, out: {1: x.T},
)
def transpose(bug):
    """A tile is written by rows and read by columns."""

    def kernel(x, out):
        tile = cuda.shared.array((8, 8), int32)
        column, row = cuda.threadIdx.x, cuda.threadIdx.y
        tile[row, column] = x[row, column]  # BUG-A
        if not bug:
            cuda.syncthreads()
        out[row, column] = tile[column, row]  # BUG-B

    return kernel


@case(
    "RACE_RAW",
    args=lambda: (ramp(64), zeros(1)),
    want=lambda x, out: {1: [32]},
)
def atomic_and_plain_read(bug):
    """Atomics order themselves, not the plain read of the result."""

    def kernel(x, out):
        count = cuda.shared.array(1, int32)
        t = cuda.threadIdx.x
        if t == 0:
            count[0] = 0
        cuda.syncthreads()
        if x[t] % 2 == 1:
            cuda.atomic.add(count, 0, 1)  # BUG-A
        if not bug:
            cuda.syncthreads()
        if t == 63:
            out[0] = count[0]  # BUG-B

    return kernel


@case(
    "RACE_RAW",
    also=("UNINIT_READ",),
    args=lambda: (ramp(64, dtype=np.uint8), zeros(16, dtype=np.uint32)),
    want=lambda x, out: {1: x.view(np.uint32)},
)
def bytes_gathered_to_words(bug):
    """Four threads write a byte each of a word that one thread loads whole."""

    def kernel(x, out):
        staging = cuda.shared.array(64, uint8, alignment=4)
        t = cuda.threadIdx.x
        staging[t] = x[t]  # BUG-A
        if not bug:
            cuda.syncthreads()
        if t >= 48:
            word = t - 48
            out[word] = load_shared_word(staging, np.uint32(4 * word))  # BUG-B

    return kernel
