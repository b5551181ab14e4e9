"""Data races between blocks: who may use a row of global memory, and from when on.

A barrier orders one block. Blocks are ordered by a release (an arrival at a counter) that an
acquire (waiting for the count) sees, with a scope that contains both.
"""

import numpy as np
from numba import cuda, int32

from nbmoe_kernels.device.atomics import reduction, store, wait_ge
from tests.emulator.planted.case import case, ramp, zeros

arrive = reduction("add", order="release")
arrive_relaxed = reduction("add", order="relaxed")
arrive_in_block = reduction("add", order="release", scope="cta")
wait_count = wait_ge()
wait_count_relaxed = wait_ge(order="relaxed")
set_flag = store(order="release")
set_flag_relaxed = store(order="relaxed")
ONE = np.uint32(1)


def counter():
    """A counter of arrivals at 0."""
    return zeros(1, dtype=np.uint32)


@case(
    "RACE_WAW",
    grid=2,
    block=32,
    args=lambda: (ramp(64), zeros(2, 32)),
    want=lambda x, out: {1: x.reshape(2, 32)},
)
def two_blocks_one_row(bug):
    """Both blocks store to row 0."""

    def kernel(x, out):
        t, b = cuda.threadIdx.x, cuda.blockIdx.x
        if bug:
            out[0, t] = x[32 * b + t]  # BUG-A
        else:
            out[b, t] = x[32 * b + t]

    return kernel


@case(
    "RACE_RAW",
    also=("RACE_WAR",),
    grid=2,
    block=32,
    args=lambda: (ramp(64), zeros(64)),
    want=lambda x, out: {1: x + x[[0, *range(63)]]},
)
def stencil_in_place(bug):
    """A block reads the last element of the block before it, which that block changes."""

    def kernel(x, out):
        i = cuda.grid(1)
        total = x[i] + x[max(i - 1, 0)]  # BUG-B
        if bug:
            x[i] = total  # BUG-A
        else:
            out[i] = total

    return kernel


def _total(x, partial, count, out):
    return {3: [x.sum()]}


def _last_block_args():
    return ramp(4, 32), zeros(4), counter(), zeros(1)


@case("RACE_RAW", grid=4, block=32, args=_last_block_args, want=_total)
def last_block_without_fence(bug):
    """The last block to arrive adds up the partial sums; stock atomics order nothing."""

    def kernel(x, partial, count, out):
        if cuda.threadIdx.x == 0:
            b = cuda.blockIdx.x
            total = int32(0)
            for i in range(32):
                total += x[b, i]
            partial[b] = total  # BUG-A
            if not bug:
                cuda.threadfence()
            if cuda.atomic.add(count, 0, ONE) == 3:
                if not bug:
                    cuda.threadfence()
                total = int32(0)
                for i in range(4):
                    total += partial[i]  # BUG-B
                out[0] = total

    return kernel


@case("SCOPE_TOO_NARROW", grid=4, block=32, args=_last_block_args, want=_total)
def last_block_fence_of_the_block(bug):
    """threadfence_block is for the threads of a block."""

    def kernel(x, partial, count, out):
        if cuda.threadIdx.x == 0:
            b = cuda.blockIdx.x
            total = int32(0)
            for i in range(32):
                total += x[b, i]
            partial[b] = total
            if bug:
                cuda.threadfence_block()  # BUG-A
            else:
                cuda.threadfence()
            if cuda.atomic.add(count, 0, ONE) == 3:
                cuda.threadfence()  # BUG-B
                total = int32(0)
                for i in range(4):
                    total += partial[i]
                out[0] = total

    return kernel


def _sum_args():
    return ramp(3, 32), zeros(3, 32), counter(), zeros(32)


def _column_sums(x, part, count, out):
    return {3: x.sum(axis=0)}


@case("RACE_RAW", grid=4, block=32, args=_sum_args, want=_column_sums)
def arrival_without_barrier(bug):
    """Thread 0 arrives for its block before the others have stored."""

    def kernel(x, part, count, out):
        t, b = cuda.threadIdx.x, cuda.blockIdx.x
        if b < 3:
            part[b, t] = x[b, t]  # BUG-A
            if not bug:
                cuda.syncthreads()
            if t == 0:
                arrive(count, 0, ONE)
        else:
            if t == 0:
                wait_count(count, 0, np.uint32(3))
            cuda.syncthreads()
            total = int32(0)
            for i in range(3):
                total += part[i, t]  # BUG-B
            out[t] = total

    return kernel


@case("RACE_RAW", grid=4, block=32, args=_sum_args, want=_column_sums)
def arrival_relaxed(bug):
    """A relaxed arrival counts, but publishes nothing."""

    publish = arrive_relaxed if bug else arrive

    def kernel(x, part, count, out):
        t, b = cuda.threadIdx.x, cuda.blockIdx.x
        if b < 3:
            part[b, t] = x[b, t]  # BUG-A
            cuda.syncthreads()
            if t == 0:
                publish(count, 0, ONE)
        else:
            if t == 0:
                wait_count(count, 0, np.uint32(3))
            cuda.syncthreads()
            total = int32(0)
            for i in range(3):
                total += part[i, t]  # BUG-B
            out[t] = total

    return kernel


@case("SCOPE_TOO_NARROW", grid=4, block=32, args=_sum_args, want=_column_sums)
def arrival_scope_too_narrow(bug):
    """A release for the block's own threads, seen by another block."""

    publish = arrive_in_block if bug else arrive

    def kernel(x, part, count, out):
        t, b = cuda.threadIdx.x, cuda.blockIdx.x
        if b < 3:
            part[b, t] = x[b, t]
            cuda.syncthreads()
            if t == 0:
                publish(count, 0, ONE)  # BUG-A
        else:
            if t == 0:
                wait_count(count, 0, np.uint32(3))  # BUG-B
            cuda.syncthreads()
            total = int32(0)
            for i in range(3):
                total += part[i, t]
            out[t] = total

    return kernel


@case("RACE_RAW", grid=4, block=32, args=_sum_args, want=_column_sums)
def wait_relaxed(bug):
    """A relaxed wait sees the count and not what was published with it."""

    wait = wait_count_relaxed if bug else wait_count

    def kernel(x, part, count, out):
        t, b = cuda.threadIdx.x, cuda.blockIdx.x
        if b < 3:
            part[b, t] = x[b, t]  # BUG-A
            cuda.syncthreads()
            if t == 0:
                arrive(count, 0, ONE)
        else:
            if t == 0:
                wait(count, 0, np.uint32(3))
            cuda.syncthreads()
            total = int32(0)
            for i in range(3):
                total += part[i, t]  # BUG-B
            out[t] = total

    return kernel


@case("RACE_RAW", grid=4, block=32, args=_sum_args, want=_column_sums)
def wait_without_barrier(bug):
    """Thread 0 has waited; nobody tells the other threads."""

    def kernel(x, part, count, out):
        t, b = cuda.threadIdx.x, cuda.blockIdx.x
        if b < 3:
            part[b, t] = x[b, t]  # BUG-A
            cuda.syncthreads()
            if t == 0:
                arrive(count, 0, ONE)
        else:
            if t == 0:
                wait_count(count, 0, np.uint32(3))
            if not bug:
                cuda.syncthreads()
            total = int32(0)
            for i in range(3):
                total += part[i, t]  # BUG-B
            out[t] = total

    return kernel


@case("RACE_RAW", grid=4, block=32, args=_sum_args, want=_column_sums)
def one_arrival_less(bug):
    """The consumer waits for two of three producers."""

    arrivals = np.uint32(2 if bug else 3)

    def kernel(x, part, count, out):
        t, b = cuda.threadIdx.x, cuda.blockIdx.x
        if b < 3:
            part[b, t] = x[b, t]  # BUG-A
            cuda.syncthreads()
            if t == 0:
                arrive(count, 0, ONE)
        else:
            if t == 0:
                wait_count(count, 0, arrivals)
            cuda.syncthreads()
            total = int32(0)
            for i in range(3):
                total += part[i, t]  # BUG-B
            out[t] = total

    return kernel


@case("RACE_RAW", grid=4, block=32, args=_sum_args, want=_column_sums)
def store_after_arrival(bug):
    """The arrival comes first, then the row."""

    def kernel(x, part, count, out):
        t, b = cuda.threadIdx.x, cuda.blockIdx.x
        if b < 3:
            if bug and t == 0:
                arrive(count, 0, ONE)
            part[b, t] = x[b, t]  # BUG-A
            cuda.syncthreads()
            if t == 0 and not bug:
                arrive(count, 0, ONE)
        else:
            if t == 0:
                wait_count(count, 0, np.uint32(3))
            cuda.syncthreads()
            total = int32(0)
            for i in range(3):
                total += part[i, t]  # BUG-B
            out[t] = total

    return kernel


@case(
    "RACE_RAW",
    grid=2,
    block=1,
    args=lambda: (ramp(1), zeros(1), counter(), zeros(1)),
    want=lambda x, data, flag, out: {3: x},
)
def flag_stored_relaxed(bug):
    """Message passing with a flag: the store of the flag has to be a release."""

    publish = set_flag_relaxed if bug else set_flag

    def kernel(x, data, flag, out):
        if cuda.blockIdx.x == 0:
            data[0] = x[0]  # BUG-A
            publish(flag, 0, ONE)
        else:
            wait_count(flag, 0, ONE)
            out[0] = data[0]  # BUG-B

    return kernel


@case(
    "RACE_RAW",
    also=("RACE_WAR",),
    grid=2,
    block=1,
    args=lambda: (ramp(1), zeros(1), counter(), zeros(1)),
    want=lambda x, data, flag, out: {3: x},
)
def flag_polled_plainly(bug):
    """A loop of ordinary loads: a race on the flag itself."""

    def kernel(x, data, flag, out):
        if cuda.blockIdx.x == 0:
            data[0] = x[0]
            set_flag(flag, 0, ONE)  # BUG-A
        else:
            if bug:
                while flag[0] == 0:  # BUG-B
                    cuda.nanosleep(64)
            wait_count(flag, 0, ONE)
            out[0] = data[0]

    return kernel


@case(
    "RACE_WAR",
    also=("RACE_RAW", "RACE_WAW"),
    grid=3,
    block=1,
    args=lambda: (ramp(1), zeros(1), zeros(2, dtype=np.uint32), zeros(2)),
    want=lambda x, data, counts, out: {3: [1, 1]},
)
def buffer_refilled_before_the_last_reader(bug):
    """Two consumers read a buffer, the producer clears it after hearing from one of them."""

    readers = np.uint32(1 if bug else 2)

    def kernel(x, data, counts, out):
        b = cuda.blockIdx.x
        if b == 0:
            data[0] = x[0]
            arrive(counts, 0, ONE)
            wait_count(counts, 1, readers)
            data[0] = 0  # BUG-B
        else:
            wait_count(counts, 0, ONE)
            out[b - 1] = data[0]  # BUG-A
            arrive(counts, 1, ONE)

    return kernel


@case(
    "RACE_RAW",
    also=("RACE_WAR", "RACE_WAW"),
    grid=2,
    block=32,
    args=lambda: (ramp(64), zeros(32)),
    want=lambda x, out: {1: x[:32] + x[32:]},
)
def combine_without_ownership(bug):
    """Two experts' blocks add into one token's row with ordinary loads and stores."""

    def kernel(x, out):
        t, b = cuda.threadIdx.x, cuda.blockIdx.x
        if bug:
            out[t] += x[32 * b + t]  # BUG-A
        elif b == 0:
            out[t] = x[t] + x[32 + t]

    return kernel


@case(
    "RACE_WAW",
    grid=2,
    block=32,
    args=lambda: (ramp(40), np.array([0, 20, 40], np.int32), zeros(40)),
    want=lambda x, starts, out: {2: 2 * x},
)
def tile_crosses_the_next_expert(bug):
    """The last tile of an expert is stored whole: its end is the next expert's first rows."""

    def kernel(x, starts, out):
        e = cuda.blockIdx.x
        row = starts[e] + cuda.threadIdx.x
        last = starts[2] if bug else starts[e + 1]
        if row < last:
            out[row] = 2 * x[row]  # BUG-A

    return kernel


@case(
    "NONDETERMINISTIC_ATOMIC",
    grid=2,
    block=32,
    args=lambda: (ramp(64, dtype=np.float32), zeros(2, dtype=np.float32)),
    want=lambda x, out: {1: [x[:32].sum(), x[32:].sum()]},
)
def float_atomics(bug):
    """The sum's rounding depends on who comes first."""

    def kernel(x, out):
        t, b = cuda.threadIdx.x, cuda.blockIdx.x
        if bug:
            cuda.atomic.add(out, b, x[32 * b + t])  # BUG-A
        elif t == 0:
            total = np.float32(0)
            for i in range(32):
                total += x[32 * b + i]
            out[b] = total

    return kernel
