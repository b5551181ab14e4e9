"""Memory that is read before anybody wrote it, and padding that reaches a result."""

import numpy as np
from numba import cuda, float32, int32, uint32

import emulate
from nbmoe_kernels.device.memory import cp_async, cp_async_commit, cp_async_wait
from tests.emulator.planted.case import case, ramp, zeros

copy_4 = cp_async(4)
wait_all = cp_async_wait(0)


@case("UNINIT_READ", args=lambda: (ramp(50), zeros(1)), want=lambda x, out: {1: [x.sum()]})
def shared_tail_not_zeroed(bug):
    """The last tile has 50 elements; the sum is over 64."""

    def kernel(x, out):
        part = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        if t < x.size:
            part[t] = x[t]
        elif not bug:
            part[t] = 0
        cuda.syncthreads()
        if t == 0:
            total = int32(0)
            for i in range(64):
                total += part[i]  # BUG-A
            out[0] = total

    return kernel


@case("UNINIT_READ", args=lambda: (ramp(64), zeros(8)), want=lambda x, out: {1: [8] * 8})
def counters_not_cleared(bug):
    """Shared memory is not zero when a block starts."""

    def kernel(x, out):
        counts = cuda.shared.array(8, int32)
        t = cuda.threadIdx.x
        if not bug and t < 8:
            counts[t] = 0
        cuda.syncthreads()
        cuda.atomic.add(counts, x[t] % 8, 1)  # BUG-A
        cuda.syncthreads()
        if t < 8:
            out[t] = counts[t]

    return kernel


@case("UNINIT_READ", args=lambda: (ramp(64, 4), zeros(64)), want=lambda x, out: {1: x.sum(axis=1)})
def accumulators_not_cleared(bug):
    """A local array starts with what the registers held."""

    def kernel(x, out):
        acc = cuda.local.array(4, int32)
        t = cuda.threadIdx.x
        if not bug:
            for i in range(4):
                acc[i] = 0
        for i in range(4):
            acc[i] += x[t, i]  # BUG-A
        out[t] = acc[0] + acc[1] + acc[2] + acc[3]

    return kernel


@case(
    "UNINIT_READ",
    args=lambda: (ramp(64), np.array([0, 40, 40, 64], np.int32), zeros(3)),
    want=lambda x, starts, out: {2: [40, 0, 64]},
)
def empty_expert_leaves_its_maximum(bug):
    """Each expert's first row sets its maximum; an expert without rows has none."""

    def kernel(x, starts, out):
        largest = cuda.shared.array(3, int32)
        t = cuda.threadIdx.x
        if t < 3:
            if not bug:
                largest[t] = 0
            for row in range(starts[t], starts[t + 1]):
                if row == starts[t] or x[row] > largest[t]:
                    largest[t] = x[row]
        cuda.syncthreads()
        if t < 3:
            out[t] = largest[t]  # BUG-A

    return kernel


@case(
    "UNINIT_READ",
    args=lambda: (ramp(256, dtype=np.float32), zeros(1, dtype=np.float32)),
    want=lambda x, out: {1: [x[:128].sum()]},
)
def skipped_tile_is_summed(bug):
    """Tiles past K are not loaded, but the loop over tiles still adds them."""

    def kernel(x, out):
        tile = cuda.shared.array((4, 64), float32)
        t = cuda.threadIdx.x
        for k in range(2):
            tile[k, t] = x[64 * k + t]
        cuda.syncthreads()
        if t == 0:
            total = float32(0)
            for k in range(4 if bug else 2):
                for i in range(64):
                    total += tile[k, i]  # BUG-A
            out[0] = total

    return kernel


@case(
    "UNINIT_READ",
    block=32,
    args=lambda: (ramp(32), zeros(32)),
    want=lambda x, out: {1: np.where(x % 2 == 0, x, 0)},
)
def one_branch_sets_the_register(bug):
    """Only one side of an `if` fills the fragment that both sides use."""

    def kernel(x, out):
        fragment = cuda.local.array(2, int32)
        t = cuda.threadIdx.x
        if x[t] % 2 == 0:
            fragment[0] = x[t]
        elif not bug:
            fragment[0] = 0
        out[t] = fragment[0]  # BUG-A

    return kernel


@case(
    "UNINIT_READ",
    args=lambda: (ramp(64), zeros(64)),
    want=lambda x, out: {1: x[np.arange(64) ^ 8]},
)
def stride_with_a_gap(bug):
    """Rows are padded against bank conflicts; the reader forgets the padding."""

    def kernel(x, out):
        tile = cuda.shared.array(8 * 9, int32)
        t = cuda.threadIdx.x
        row, column = t // 8, t % 8
        tile[9 * row + column] = x[t]
        cuda.syncthreads()
        other = row ^ 1
        out[t] = tile[(8 if bug else 9) * other + column]  # BUG-A

    return kernel


@case(
    "UNINIT_READ",
    grid=2,
    block=32,
    args=lambda: (ramp(32), zeros(64)),
    want=lambda x, out: {1: [*x, *x]},
)
def shared_memory_of_another_block(bug):
    """Block 0 fills a table in shared memory and block 1 believes that it is there too."""

    def kernel(x, out):
        table = cuda.shared.array(32, int32)
        t = cuda.threadIdx.x
        if not bug or cuda.blockIdx.x == 0:
            table[t] = x[t]
        cuda.syncthreads()
        out[cuda.grid(1)] = table[t]  # BUG-A

    return kernel


@case(
    "UNINIT_READ",
    block=16,
    args=lambda: (ramp(60, dtype=np.uint8), zeros(16, dtype=np.uint32)),
    want=lambda x, out: {1: np.append(x, np.zeros(4, np.uint8)).view(np.uint32)},
)
def copy_guard_without_zero_fill(bug):
    """A copy past the end is skipped, instead of issued with 0 source bytes, which fills with 0."""

    def kernel(x, out):
        tile = cuda.shared.array(16, uint32, alignment=16)
        t = cuda.threadIdx.x
        if bug:
            if 4 * t < x.size:
                copy_4(tile, uint32(t), x, np.uint64(4 * t), uint32(4))
        else:
            inside = 4 * t < x.size
            source = np.uint64(4 * t if inside else 0)
            copy_4(tile, uint32(t), x, source, uint32(4 if inside else 0))
        cp_async_commit()
        wait_all()
        out[t] = tile[t]  # BUG-A

    return kernel


@case(
    "UNINIT_READ",
    block=32,
    args=lambda: (ramp(32), zeros(32)),
    want=lambda x, out: {1: x[::-1]},
)
def table_filled_by_half_a_warp(bug):
    """The loop that fills a table steps by the block's size, but starts past its middle."""

    def kernel(x, out):
        table = cuda.shared.array(32, int32)
        t = cuda.threadIdx.x
        i = t + 16 if bug else t
        while i < 32:
            table[i] = x[i]
            i += cuda.blockDim.x
        cuda.syncthreads()
        out[t] = table[31 - t]  # BUG-A

    return kernel


@case(
    "UNINIT_READ",
    args=lambda: (
        np.array([3, 0, 2, 5], np.int32),
        emulate.uninitialised(zeros(4)),
        zeros(1),
    ),
    want=lambda rows, scratch, out: {2: [rows.sum()]},
)
def scratch_of_an_earlier_launch(bug):
    """Scratch memory is allocated once and never cleared; an empty expert leaves its old value."""

    def kernel(rows, scratch, out):
        t = cuda.threadIdx.x
        if t < 4 and (rows[t] > 0 or not bug):
            scratch[t] = rows[t]
        cuda.syncthreads()
        if t == 0:
            total = int32(0)
            for e in range(4):
                total += scratch[e]  # BUG-A
            out[0] = total

    return kernel


@case(
    "UNINIT_READ",
    block=32,
    args=lambda: (ramp(24), emulate.uninitialised(zeros(32)), zeros(32)),
    want=lambda x, tile, out: {2: [*x, *[0] * 8]},
)
def rows_past_m_are_read(bug):
    """A stage fills M rows of a padded buffer, and the next one reads whole tiles of it."""

    def kernel(x, tile, out):
        t = cuda.threadIdx.x
        if t < x.size:
            tile[t] = x[t]
        elif not bug:
            tile[t] = 0
        cuda.syncthreads()
        out[t] = tile[t]  # BUG-A

    return kernel
