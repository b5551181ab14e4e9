"""What the launch provides: workspace, limits, alignment, counters that are zero."""

import numpy as np
from numba import cuda, float32, int32, uint8

from nbmoe_kernels.device.atomics import reduction, store, wait_ge
from nbmoe_kernels.device.memory import load_shared_word
from tests.emulator.planted.case import BYTES, case, ramp, zeros

arrive = reduction("add", order="release")
wait_count = wait_ge()
put = store(order="relaxed")
ZERO, ONE = np.uint32(0), np.uint32(1)


@case(
    "RACE_RAW",
    also=("RACE_WAR", "UNINIT_READ"),
    grid=2,
    block=1,
    args=lambda: (ramp(1), zeros(1), np.array([0, 1], np.uint32), zeros(1)),
    want=lambda x, data, counts, out: {3: x},
)
def counter_is_not_zero(bug):
    """Counter 1 still holds the arrival of an earlier launch, so the wait passes at once."""

    def kernel(x, data, counts, out):
        which = 1 if bug else 0
        if cuda.blockIdx.x == 0:
            data[0] = x[0]  # BUG-A
            arrive(counts, which, ONE)
        else:
            wait_count(counts, which, ONE)
            out[0] = data[0]  # BUG-B

    return kernel


@case(
    BYTES,
    grid=2,
    block=1,
    args=lambda: (ramp(1), zeros(1), zeros(1, dtype=np.uint32), zeros(1)),
    want=lambda x, data, count, out: {2: [0], 3: x},
)
def counter_left_behind(bug):
    """The last reader puts the counter back to 0 for the next launch."""

    def kernel(x, data, count, out):
        if cuda.blockIdx.x == 0:
            data[0] = x[0]
            arrive(count, 0, ONE)
        else:
            wait_count(count, 0, ONE)
            out[0] = data[0]
            if not bug:
                put(count, 0, ZERO)

    return kernel


@case(
    "OOB_WRITE",
    also=("OOB_READ",),
    grid=4,
    block=32,
    args=lambda: (ramp(4, 32), zeros(3), zeros(4)),
    want=lambda x, workspace, out: {2: x.sum(axis=1)},
)
def workspace_too_small(bug):
    """One slot a block is written; the launcher has counted the experts."""

    def kernel(x, workspace, out):
        b = cuda.blockIdx.x
        if cuda.threadIdx.x == 0:
            total = int32(0)
            for i in range(32):
                total += x[b, i]
            if bug:
                workspace[b] = total  # BUG-A
            out[b] = total

    return kernel


@case("SMEM_OVERFLOW", args=lambda: (ramp(64), zeros(64)), want=lambda x, out: {1: x[::-1]})
def static_shared_memory_over_48_kib(bug):
    """Arrays of static size share 48 KiB on every GPU; more has to be dynamic."""

    size = 16000 if bug else 64

    def kernel(x, out):
        part = cuda.shared.array(size, float32)  # BUG-A
        t = cuda.threadIdx.x
        part[t] = x[t]
        cuda.syncthreads()
        out[t] = int32(part[63 - t])

    return kernel


@case(
    "MISALIGNED",
    block=16,
    args=lambda: (ramp(68, dtype=np.uint8), zeros(16, dtype=np.uint32)),
    want=lambda x, out: {1: x[:64].view(np.uint32)},
)
def view_at_an_odd_offset(bug):
    """A tile begins one byte into its array; words are then loaded across."""

    def kernel(x, out):
        tile = cuda.shared.array(68, uint8, alignment=16)
        t = cuda.threadIdx.x
        for i in range(4):
            tile[4 * t + i + (1 if bug else 0)] = x[4 * t + i]
        cuda.syncthreads()
        out[t] = load_shared_word(tile, np.uint32(4 * t + (1 if bug else 0)))  # BUG-A

    return kernel


@case(
    BYTES,
    block=32,
    args=lambda: (ramp(32), np.full(40, 9, np.int32)),
    want=lambda x, out: {1: [*(2 * x), *[9] * 8]},
)
def rows_past_the_last_are_written(bug):
    """Rows from M on belong to the caller: the kernel leaves them alone."""

    def kernel(x, out):
        t = cuda.threadIdx.x
        out[t] = 2 * x[t]
        if bug and t < 8:
            out[32 + t] = 0

    return kernel
