"""cp.async.bulk and the async proxy.

A bulk load reports its bytes to an mbarrier, a bulk store is waited for as a group. Both run in
the async proxy: they see ordinary stores only past a proxy fence, of the thread that stored or of
one that knows of the stores and copies.
"""

import numpy as np
from numba import cuda, uint8, uint32, uint64

from nbmoe_kernels.device.atomics import reduction, wait_ge
from nbmoe_kernels.device.bulk import bulk_commit, bulk_load, bulk_store, bulk_wait
from nbmoe_kernels.device.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
)
from nbmoe_kernels.device.sync import fence_proxy_async_global, fence_proxy_async_shared
from tests.emulator.planted.case import case, ramp, zeros

wait_stored = bulk_wait(0)
count_one, wait_for_one = reduction("add", order="release"), wait_ge()
ONE = np.uint32(1)


def _load_args():
    return ramp(128, dtype=np.uint8), zeros(32, dtype=np.uint8)


def _first_row(x, out):
    return {1: x[:32]}


@case(
    "RACE_RAW", also=("UNINIT_READ", "ASYNC_UNWAITED"), block=32, args=_load_args, want=_first_row
)
def load_read_without_wait(bug):
    """The barrier of the copy is made and armed, and nobody waits for it."""

    def kernel(x, out):
        tile = cuda.shared.array(32, uint8, alignment=128)
        bar = cuda.shared.array(1, uint64)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(bar, 0, ONE)
            fence_mbarrier_init()
        cuda.syncthreads()
        if t == 0:
            mbarrier_arrive_expect(bar, 0, uint32(32))
            bulk_load(tile, 0, x, 0, uint32(32), bar, 0)  # BUG-A
        if not bug:
            mbarrier_wait(bar, 0, uint32(0))
        out[t] = tile[t]  # BUG-B

    return kernel


@case(
    "RACE_RAW",
    also=("RACE_RAW", "UNINIT_READ", "ASYNC_UNWAITED"),
    block=32,
    args=_load_args,
    want=_first_row,
)
def expects_half_of_the_bytes(bug):
    """Two copies of 16 bytes report to a barrier that waits for 16."""

    def kernel(x, out):
        tile = cuda.shared.array(32, uint8, alignment=128)
        bar = cuda.shared.array(1, uint64)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(bar, 0, ONE)
            fence_mbarrier_init()
        cuda.syncthreads()
        if t == 0:
            mbarrier_arrive_expect(bar, 0, uint32(16 if bug else 32))
            bulk_load(tile, 0, x, 0, uint32(16), bar, 0)
            bulk_load(tile, 16, x, 16, uint32(16), bar, 0)  # BUG-A
        mbarrier_wait(bar, 0, uint32(0))
        out[t] = tile[t]  # BUG-B

    return kernel


@case("DEADLOCK", block=32, args=_load_args, want=_first_row)
def expects_too_many_bytes(bug):
    """A partial box brings fewer bytes than the barrier was told."""

    def kernel(x, out):
        tile = cuda.shared.array(32, uint8, alignment=128)
        bar = cuda.shared.array(1, uint64)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(bar, 0, ONE)
            fence_mbarrier_init()
        cuda.syncthreads()
        if t == 0:
            mbarrier_arrive_expect(bar, 0, uint32(48 if bug else 32))
            bulk_load(tile, 0, x, 0, uint32(32), bar, 0)
        mbarrier_wait(bar, 0, uint32(0))  # BUG-A
        out[t] = tile[t]

    return kernel


@case("DEADLOCK", block=32, args=_load_args, want=_first_row)
def second_copy_on_the_wrong_barrier(bug):
    """Each of two copies has a barrier; both copies report to the first."""

    def kernel(x, out):
        tile = cuda.shared.array(32, uint8, alignment=128)
        bar = cuda.shared.array(2, uint64)
        t = cuda.threadIdx.x
        if t < 2:
            mbarrier_init(bar, t, ONE)
            fence_mbarrier_init()
        cuda.syncthreads()
        if t == 0:
            mbarrier_arrive_expect(bar, 0, uint32(16))
            mbarrier_arrive_expect(bar, 1, uint32(16))
            bulk_load(tile, 0, x, 0, uint32(16), bar, 0)
            bulk_load(tile, 16, x, 16, uint32(16), bar, 0 if bug else 1)
        mbarrier_wait(bar, 0, uint32(0))
        mbarrier_wait(bar, 1, uint32(0))  # BUG-A
        out[t] = tile[t]

    return kernel


@case(
    "RACE_WAR",
    also=("RACE_RAW", "RACE_WAW", "MBAR_PHASE", "DEADLOCK"),
    block=32,
    args=lambda: (ramp(128, dtype=np.uint8), zeros(32, dtype=np.uint32)),
    want=lambda x, out: {1: x.reshape(4, 32).sum(axis=0)},
)
def stage_loaded_while_it_is_read(bug):
    """One stage, refilled four times: the producer must hear that all lanes have read it."""

    def kernel(x, out):
        tile = cuda.shared.array(32, uint8, alignment=128)
        bar = cuda.shared.array(2, uint64)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(bar, 0, ONE)
            mbarrier_init(bar, 1, uint32(32))
            fence_mbarrier_init()
        cuda.syncthreads()
        total = uint32(0)
        for k in range(4):
            phase = uint32(k % 2)
            if t == 0:
                if not bug:
                    mbarrier_wait(bar, 1, uint32(1) - phase)
                mbarrier_arrive_expect(bar, 0, uint32(32))
                bulk_load(tile, 0, x, 32 * k, uint32(32), bar, 0)  # BUG-B
            mbarrier_wait(bar, 0, phase)
            total += uint32(tile[t])  # BUG-A
            mbarrier_arrive(bar, 1)
        out[t] = total

    return kernel


@case("MBAR_INIT_RACE", block=32, args=_load_args, want=_first_row)
def no_fence_after_init(bug):
    """The copy engine is in the async proxy: it sees the new barrier only past a fence."""

    def kernel(x, out):
        tile = cuda.shared.array(32, uint8, alignment=128)
        bar = cuda.shared.array(1, uint64)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(bar, 0, ONE)  # BUG-A
            if not bug:
                fence_mbarrier_init()
        cuda.syncthreads()
        if t == 0:
            mbarrier_arrive_expect(bar, 0, uint32(32))
            bulk_load(tile, 0, x, 0, uint32(32), bar, 0)  # BUG-B
        mbarrier_wait(bar, 0, uint32(0))
        out[t] = tile[t]

    return kernel


def _store_args():
    return ramp(32, dtype=np.uint8), zeros(32, dtype=np.uint8)


def _doubled(x, out):
    return {1: 2 * x}


@case("RACE_PROXY", block=32, args=_store_args, want=_doubled)
def store_without_proxy_fence(bug):
    """A barrier orders the threads, but not the stores of one proxy for the other."""

    def kernel(x, out):
        tile = cuda.shared.array(32, uint8, alignment=128)
        t = cuda.threadIdx.x
        tile[t] = uint8(2) * x[t]  # BUG-A
        if not bug:
            fence_proxy_async_shared()
        cuda.syncthreads()
        if t == 0:
            bulk_store(out, 0, tile, 0, uint32(32))  # BUG-B
            bulk_commit()
            wait_stored()

    return kernel


@case("RACE_PROXY", block=32, args=_store_args, want=_doubled)
def fence_by_the_wrong_thread(bug):
    """Thread 0 fences for all, before the barrier: the others' stores are not covered."""

    def kernel(x, out):
        tile = cuda.shared.array(32, uint8, alignment=128)
        t = cuda.threadIdx.x
        tile[t] = uint8(2) * x[t]  # BUG-A
        if not bug or t == 0:
            fence_proxy_async_shared()
        cuda.syncthreads()
        if t == 0:
            bulk_store(out, 0, tile, 0, uint32(32))  # BUG-B
            bulk_commit()
            wait_stored()

    return kernel


@case("RACE_RAW", also=("UNINIT_READ", "RACE_WAR"), block=32, args=_store_args, want=_doubled)
def store_without_barrier(bug):
    """Each thread fences its store, and thread 0 copies without waiting for the others."""

    def kernel(x, out):
        tile = cuda.shared.array(32, uint8, alignment=128)
        t = cuda.threadIdx.x
        tile[t] = uint8(2) * x[t]  # BUG-A
        fence_proxy_async_shared()
        if not bug:
            cuda.syncthreads()
        if t == 31:
            bulk_store(out, 0, tile, 0, uint32(32))  # BUG-B
            bulk_commit()
            wait_stored()

    return kernel


@case("RACE_WAR", block=32, args=_store_args, want=_doubled)
def source_reused_before_the_store_has_read(bug):
    """The tile is cleared while the bulk store still reads it."""

    def kernel(x, out):
        tile = cuda.shared.array(32, uint8, alignment=128)
        t = cuda.threadIdx.x
        tile[t] = uint8(2) * x[t]
        fence_proxy_async_shared()
        cuda.syncthreads()
        if t == 0:
            bulk_store(out, 0, tile, 0, uint32(32))  # BUG-A
            bulk_commit()
            if not bug:
                wait_stored()
        cuda.syncthreads()
        tile[t] = uint8(0)  # BUG-B
        if t == 0:
            wait_stored()

    return kernel


@case("ASYNC_UNWAITED", block=32, args=_store_args, want=_doubled)
def exits_before_the_store(bug):
    """The block ends, and its shared memory with it, while the store reads it."""

    def kernel(x, out):
        tile = cuda.shared.array(32, uint8, alignment=128)
        t = cuda.threadIdx.x
        tile[t] = uint8(2) * x[t]
        fence_proxy_async_shared()
        cuda.syncthreads()
        if t == 0:
            bulk_store(out, 0, tile, 0, uint32(32))  # BUG-A
            bulk_commit()
            if not bug:
                wait_stored()

    return kernel


@case("ASYNC_UNWAITED", block=32, args=_store_args, want=_doubled)
def store_without_commit(bug):
    """The wait covers committed groups only."""

    def kernel(x, out):
        tile = cuda.shared.array(32, uint8, alignment=128)
        t = cuda.threadIdx.x
        tile[t] = uint8(2) * x[t]
        fence_proxy_async_shared()
        cuda.syncthreads()
        if t == 0:
            bulk_store(out, 0, tile, 0, uint32(32))  # BUG-A
            if not bug:
                bulk_commit()
            wait_stored()

    return kernel


@case(
    "RACE_PROXY",
    block=32,
    args=lambda: (ramp(32, dtype=np.uint8), zeros(32, dtype=np.uint8), zeros(32, dtype=np.uint8)),
    want=lambda x, scratch, out: {2: 2 * x},
)
def global_memory_without_proxy_fence(bug):
    """The same for global memory: a row is stored by threads and fetched by a bulk load."""

    def kernel(x, scratch, out):
        tile = cuda.shared.array(32, uint8, alignment=128)
        bar = cuda.shared.array(1, uint64)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(bar, 0, ONE)
            fence_mbarrier_init()
        scratch[t] = uint8(2) * x[t]  # BUG-A
        if not bug:
            fence_proxy_async_global()
        cuda.syncthreads()
        if t == 0:
            mbarrier_arrive_expect(bar, 0, uint32(32))
            bulk_load(tile, 0, scratch, 0, uint32(32), bar, 0)  # BUG-B
        mbarrier_wait(bar, 0, uint32(0))
        out[t] = tile[t]

    return kernel


@case(
    "RACE_PROXY",
    grid=2,
    block=32,
    args=lambda: (
        ramp(32, dtype=np.uint8), zeros(32, dtype=np.uint8), zeros(1, dtype=np.uint32),
        zeros(32, dtype=np.uint8),
    ),
    want=lambda x, scratch, counter, out: {3: 2 * x},
)  # fmt: skip
def another_block_s_stores_without_proxy_fence(bug):
    """Acquiring them is for the thread: its bulk load needs a proxy fence after that."""

    def kernel(x, scratch, counter, out):
        tile = cuda.shared.array(32, uint8, alignment=128)
        bar = cuda.shared.array(1, uint64)
        t = cuda.threadIdx.x
        if cuda.blockIdx.x == 0:
            scratch[t] = uint8(2) * x[t]  # BUG-A
            cuda.syncthreads()
            if t == 0:
                count_one(counter, 0, ONE)
        else:
            if t == 0:
                mbarrier_init(bar, 0, ONE)
                fence_mbarrier_init()
            cuda.syncthreads()
            if t == 0:
                wait_for_one(counter, 0, ONE)
                if not bug:
                    fence_proxy_async_global()
                mbarrier_arrive_expect(bar, 0, uint32(32))
                bulk_load(tile, 0, scratch, 0, uint32(32), bar, 0)  # BUG-B
            mbarrier_wait(bar, 0, uint32(0))
            out[t] = tile[t]

    return kernel
