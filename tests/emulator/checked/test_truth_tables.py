"""Kernels with a switch for each thing that orders; a finding comes if and only if one is missing.

Every combination is run, so that false alarms and missed faults are tested together.
"""

import itertools

import numpy as np
import pytest
from numba import cuda, float32, uint8, uint32, uint64

import emulate
from nbmoe_kernels.device.atomics import atomic, store, wait_ge
from nbmoe_kernels.device.bulk import bulk_commit, bulk_load, bulk_store, bulk_wait
from nbmoe_kernels.device.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
)
from nbmoe_kernels.device.memory import cp_async, cp_async_commit, cp_async_wait
from nbmoe_kernels.device.sync import fence, fence_proxy_async_shared
from nbmoe_kernels.device.warp import sync_warp

SCHEDULES = ["fifo", "random:1", "pct:2:1"]


def ids(kernel, grid, block, *args, **options):
    report = emulate.check(kernel, grid, block, *args, schedules=SCHEDULES, **options)
    return {finding.id for finding in report.findings}


def switches(count):
    return pytest.mark.parametrize("on", list(itertools.product([False, True], repeat=count)))


@switches(2)
def test_two_barriers_in_a_loop(on):
    before, after = on

    def kernel(x, out):
        part = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        total = float32(0)
        for k in range(3):
            part[t] = x[64 * k + t]
            if before:
                cuda.syncthreads()
            total += part[63 - t]
            if after:
                cuda.syncthreads()
        out[t] = total

    x = np.arange(192, dtype=np.float32)
    found = ids(kernel, 1, 64, x, np.zeros(64, np.float32))
    assert (not found) == (before and after), found
    assert found <= {"RACE_RAW", "RACE_WAR", "UNINIT_READ"}


@switches(2)
def test_a_warp_is_ordered_by_either_barrier(on):
    warp, block = on

    def kernel(out):
        part = cuda.shared.array(32, uint32)
        t = cuda.threadIdx.x
        part[t] = uint32(t)
        if warp:
            sync_warp()
        if block:
            cuda.syncthreads()
        out[t] = part[t ^ 1]

    found = ids(kernel, 1, 32, np.zeros(32, np.uint32))
    assert (not found) == (warp or block), found


ADD_RELEASE, ADD_RELAXED = atomic("add", order="release"), atomic("add")
WAIT_ACQUIRE, WAIT_RELAXED = wait_ge(), wait_ge(order="relaxed")
FENCE = fence()


@switches(4)
def test_release_and_acquire_between_blocks(on):
    releases, acquires, fence_before, fence_after = on

    def kernel(data, count, out):
        if cuda.blockIdx.x == 0:
            data[0] = uint32(7)
            if fence_before:
                FENCE()
            if releases:
                ADD_RELEASE(count, 0, uint32(1))
            else:
                ADD_RELAXED(count, 0, uint32(1))
        else:
            if acquires:
                WAIT_ACQUIRE(count, 0, uint32(1))
            else:
                WAIT_RELAXED(count, 0, uint32(1))
            if fence_after:
                FENCE()
            out[0] = data[0]

    arrays = [np.zeros(1, np.uint32) for _ in range(3)]
    found = ids(kernel, 2, 1, *arrays)
    assert (not found) == ((releases or fence_before) and (acquires or fence_after)), found
    assert found <= {"RACE_RAW"} and arrays[2][0] == 7


@switches(2)
def test_scopes_between_blocks(on):
    wide_release, wide_acquire = on
    give = store(scope="gpu" if wide_release else "cta")
    take = wait_ge(scope="gpu" if wide_acquire else "cta")

    def kernel(data, flag, out):
        if cuda.blockIdx.x == 0:
            data[0] = uint32(7)
            give(flag, 0, uint32(1))
        else:
            take(flag, 0, uint32(1))
            out[0] = data[0]

    found = ids(kernel, 2, 1, *(np.zeros(1, np.uint32) for _ in range(3)))
    assert found == (set() if wide_release and wide_acquire else {"SCOPE_TOO_NARROW"})


COPY, WAIT_ALL = cp_async(4), cp_async_wait(0)


@switches(3)
def test_copies_of_groups(on):
    commits, waits, barrier = on

    def kernel(x, out):
        tile = cuda.shared.array(32, uint32)
        t = cuda.threadIdx.x
        COPY(tile, uint32(t), x, uint64(4 * t), uint32(4))
        if commits:
            cp_async_commit()
        if waits:
            WAIT_ALL()
        if barrier:
            cuda.syncthreads()
        out[t] = tile[31 - t]

    x = np.arange(128, dtype=np.uint8)
    found = ids(kernel, 1, 32, x, np.zeros(32, np.uint32))
    assert (not found) == (commits and waits and barrier), found
    assert ("ASYNC_UNWAITED" in found) == (not (commits and waits))


STORED = bulk_wait(0)


@switches(4)
def test_bulk_store(on):
    proxy_fence, barrier, commits, waits = on

    def kernel(x, out):
        tile = cuda.shared.array(32, uint8, alignment=128)
        t = cuda.threadIdx.x
        tile[t] = x[t]
        if proxy_fence:
            fence_proxy_async_shared()
        if barrier:
            cuda.syncthreads()
        if t == 0:
            bulk_store(out, 0, tile, 0, uint32(32))
            if commits:
                bulk_commit()
            if waits:
                STORED()

    x = np.arange(32, dtype=np.uint8)
    found = ids(kernel, 1, 32, x, np.zeros(32, np.uint8))
    assert (not found) == all(on), found
    assert ("ASYNC_UNWAITED" in found) == (not (commits and waits))
    if barrier:
        assert ("RACE_PROXY" in found) == (not proxy_fence)


@switches(3)
def test_bulk_load(on):
    init_fence, barrier, waits = on

    def kernel(x, out):
        tile = cuda.shared.array(32, uint8, alignment=128)
        bar = cuda.shared.array(1, uint64)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(bar, 0, uint32(1))
            if init_fence:
                fence_mbarrier_init()
        if barrier:
            cuda.syncthreads()
        if t == 0:
            mbarrier_arrive_expect(bar, 0, uint32(32))
            bulk_load(tile, 0, x, 0, uint32(32), bar, 0)
        if waits:
            mbarrier_wait(bar, 0, uint32(0))
        out[t] = tile[t]

    x = np.arange(32, dtype=np.uint8)
    found = ids(kernel, 1, 32, x, np.zeros(32, np.uint8))
    assert (not found) == all(on), found
    if waits:
        assert ("MBAR_INIT_RACE" in found) == (not (init_fence and barrier))
