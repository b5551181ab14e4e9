"""Each detector finds its fault, with the line, and is silent on the same kernel without it."""

import inspect

import numpy as np
import pytest
from numba import cuda, float32, int32, uint8, uint32, uint64

import emulate
from nbmoe_kernels.device.mbarrier import (
    mbarrier_arrive,
    mbarrier_init,
    mbarrier_invalidate,
    mbarrier_wait,
)
from nbmoe_kernels.device.memory import load_v4
from nbmoe_kernels.device.sync import named_barrier_sync
from nbmoe_kernels.device.warp import shuffle_xor
from nbmoe_kernels.device.wgmma import wgmma, wgmma_commit, wgmma_fence, wgmma_wait

SCHEDULES = ["fifo", "random:3"]


def line_of(make, marker="# BUG"):
    """The lines of a factory that hold a marker."""
    lines, first = inspect.getsourcelines(make)
    return {first + at for at, text in enumerate(lines) if marker in text}


def zeros(count, dtype=np.int32):
    return np.zeros(count, dtype)


def out_of_bounds_read(bug):
    def kernel(x, out):
        t = cuda.threadIdx.x
        out[t] = x[t + (1 if bug else 0)]  # BUG

    return kernel, 1, 32, (zeros(32), zeros(32)), {}


def out_of_bounds_write(bug):
    def kernel(x):
        i = cuda.grid(1)
        if bug or i < x.size:
            x[i] = 1  # BUG

    return kernel, 2, 32, (zeros(40),), {}


def negative_index(bug):
    def kernel(x, out):
        t = cuda.threadIdx.x
        out[t] = x[t - 1 if bug else max(t - 1, 0)]  # BUG

    return kernel, 1, 32, (zeros(32), zeros(32)), {}


def negative_local(bug):
    def kernel(out):
        values = cuda.local.array(4, int32)
        for i in range(4):
            values[i] = i
        out[0] = values[-1 if bug else 3]  # BUG

    return kernel, 1, 1, (zeros(1),), {}


def misaligned(bug):
    def kernel(x, out):
        a, _, _, _ = load_v4(x, uint32(1 if bug else 4))  # BUG
        out[0] = a

    return kernel, 1, 1, (zeros(8, np.uint32), zeros(1, np.uint32)), {}


def uninitialised_local(bug):
    def kernel(out):
        values = cuda.local.array((2, 2), float32)
        values[0, 0] = float32(1)
        if not bug:
            values[1, 0] = float32(2)
        out[0] = values[0, 0] + values[1, 0]  # BUG

    return kernel, 1, 1, (zeros(1, np.float32),), {}


def uninitialised_global(bug):
    def kernel(scratch, out):
        if not bug:
            scratch[0] = 1
        out[0] = scratch[0]  # BUG

    return kernel, 1, 1, (emulate.uninitialised(zeros(2)), zeros(1)), {}


def divergent_barrier(bug):
    def kernel(x):
        if cuda.threadIdx.x < 32 and bug:
            cuda.syncthreads()  # BUG
        else:
            cuda.syncthreads()  # BUG
        x[cuda.threadIdx.x] = 1

    return kernel, 1, 64, (zeros(64),), {}


def named_barrier_of_two_counts(bug):
    def kernel(x):
        if cuda.threadIdx.x < 32:
            named_barrier_sync(uint32(1), uint32(64))  # BUG
        else:
            named_barrier_sync(uint32(1), uint32(32 if bug else 64))  # BUG
        x[cuda.threadIdx.x] = 1

    return kernel, 1, 64, (zeros(64),), {}


def exited_before_barrier(bug):
    def kernel(x):
        if bug and cuda.threadIdx.x == 5:
            return
        cuda.syncthreads()  # BUG
        x[cuda.threadIdx.x] = 1

    return kernel, 1, 64, (zeros(64),), {}


def divergent_collective(bug):
    def kernel(x):
        t = cuda.threadIdx.x
        value = uint32(t)
        if t < 16 or not bug:
            value = shuffle_xor(value, uint32(1))  # BUG
        cuda.syncthreads()  # BUG
        x[t] = value

    return kernel, 1, 32, (zeros(32, np.uint32),), {}


def mbarrier_over_arrival(bug):
    def kernel(x):
        bar = cuda.shared.array(1, uint64)
        if cuda.threadIdx.x == 0:
            mbarrier_init(bar, 0, uint32(3))
        cuda.syncthreads()
        if cuda.threadIdx.x < 3:
            mbarrier_arrive(bar, 0)
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            mbarrier_arrive(bar, 0)
            mbarrier_arrive(bar, 0)
        cuda.syncthreads()
        if cuda.threadIdx.x == 1 and not bug:
            mbarrier_wait(bar, 0, uint32(0))
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            mbarrier_arrive(bar, 0)  # BUG
        x[cuda.threadIdx.x] = 1

    return kernel, 1, 32, (zeros(32),), {}


def mbarrier_initialised_again(bug):
    def kernel(x):
        bar = cuda.shared.array(1, uint64)
        mbarrier_init(bar, 0, uint32(1))  # BUG
        mbarrier_arrive(bar, 0)
        mbarrier_wait(bar, 0, uint32(0))
        if not bug:
            mbarrier_invalidate(bar, 0)
        mbarrier_init(bar, 0, uint32(2))  # BUG
        x[0] = 1

    return kernel, 1, 1, (zeros(1),), {}


def wrong_parity(bug):
    def kernel(x):
        bar = cuda.shared.array(1, uint64)
        if cuda.threadIdx.x == 0:
            mbarrier_init(bar, 0, uint32(32))
        cuda.syncthreads()
        for phase in range(3):
            mbarrier_arrive(bar, 0)
            mbarrier_wait(bar, 0, uint32((phase + 1 if bug else phase) % 2))  # BUG
        x[cuda.threadIdx.x] = 1

    return kernel, 1, 32, (zeros(32),), {}


def spins_for_ever(bug):
    def kernel(x):
        while x[0] == 0 and bug:  # BUG
            pass
        x[0] = 1

    return kernel, 1, 1, (zeros(1),), {}


def static_shared_memory(bug):
    def kernel(x):
        part = cuda.shared.array(60_000 if bug else 40_000, uint8)  # BUG
        part[0] = 1
        x[0] = part[0]

    return kernel, 1, 1, (zeros(1),), {}


def float_sum(bug):
    def kernel(x):
        if bug or cuda.grid(1) == 0:
            cuda.atomic.add(x, 0, float32(1))  # BUG

    return kernel, 2, 32, (zeros(1, np.float32),), {}


def raises(bug):
    def kernel(x):
        if bug:
            raise ValueError("on purpose")  # BUG
        x[0] = 1

    return kernel, 1, 1, (zeros(1),), {}


PRODUCT, PRODUCTS_DONE = wgmma(8, "e4m3"), wgmma_wait(0)


def _product(fence, wait):
    def kernel(a, out):
        tiles = cuda.shared.array(0, uint8, alignment=1024)
        t = cuda.threadIdx.x
        tiles[t] = a[t]
        acc = cuda.local.array(4, float32)
        for i in range(4):
            acc[i] = float32(0)  # BUG
        cuda.syncthreads()
        if fence:
            wgmma_fence()
        PRODUCT(acc, tiles, uint32(0), tiles, uint32(8192), uint32(1))  # BUG
        wgmma_commit()
        if wait:
            PRODUCTS_DONE()
        out[t] = acc[0]  # USE

    return kernel, 1, 128, (zeros(128, np.uint8), zeros(128, np.float32)), {"shared_bytes": 16384}


def accumulators_without_fence(bug):
    return _product(not bug, True)


FAULTS = {
    "OOB_READ": [out_of_bounds_read],
    "OOB_WRITE": [out_of_bounds_write],
    "OOB_NEGATIVE": [negative_index, negative_local],
    "MISALIGNED": [misaligned],
    "UNINIT_READ": [uninitialised_local, uninitialised_global],
    "BARRIER_DIVERGENT": [divergent_barrier, named_barrier_of_two_counts],
    "BARRIER_EXITED": [exited_before_barrier],
    "COLLECTIVE_DIVERGENT": [divergent_collective],
    "MBAR_PHASE": [mbarrier_over_arrival],
    "MBAR_REINIT_LIVE": [mbarrier_initialised_again],
    "DEADLOCK": [wrong_parity],
    "LIVELOCK": [spins_for_ever],
    "SMEM_OVERFLOW": [static_shared_memory],
    "NONDETERMINISTIC_ATOMIC": [float_sum],
    "KERNEL_ERROR": [raises],
}
CASES = [(id, make) for id, makes in FAULTS.items() for make in makes]


@pytest.mark.parametrize(("id", "make"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_fault_and_twin(id, make):
    kernel, grid, block, args, options = make(False)
    report = emulate.check(kernel, grid, block, *args, schedules=SCHEDULES, **options)
    assert not report.findings, str(report.findings[0])
    kernel, grid, block, args, options = make(True)
    report = emulate.check(kernel, grid, block, *args, schedules=SCHEDULES, **options)
    found = [finding for finding in report.findings if finding.id == id]
    assert found, [str(finding) for finding in report.findings]
    lines = {site.line for finding in found for site in finding.sites}
    if id != "MBAR_PHASE":
        assert lines & line_of(make)
    else:
        assert max(lines) in line_of(make)


def test_accumulators_written_after_the_fence():
    report = emulate.check(*_args(_product(False, True)), schedules=SCHEDULES, **SHARED)
    assert "WGMMA_FENCE" in {finding.id for finding in report.findings}
    report = emulate.check(*_args(_product(True, True)), schedules=SCHEDULES, **SHARED)
    assert "WGMMA_FENCE" not in {finding.id for finding in report.findings}


def test_accumulators_used_before_the_wait():
    report = emulate.check(*_args(_product(True, False)), schedules=SCHEDULES, **SHARED)
    used = line_of(_product, "# USE")
    unwaited = [finding for finding in report.findings if finding.id == "ASYNC_UNWAITED"]
    assert any(used <= {site.line for site in finding.sites} for finding in unwaited)
    report = emulate.check(*_args(_product(True, True)), schedules=SCHEDULES, **SHARED)
    assert "ASYNC_UNWAITED" not in {finding.id for finding in report.findings}


SHARED = {"shared_bytes": 16384}


def _args(case):
    kernel, grid, block, args, _ = case
    return kernel, grid, block, *args


@pytest.mark.parametrize(
    ("id", "grid", "block", "options"),
    [
        ("BLOCK_TOO_LARGE", 1, 2048, {}),
        ("BLOCK_TOO_LARGE", 1, (1, 1, 65), {}),
        ("GRID_LIMIT", (1, 65536), 32, {}),
        ("SMEM_OVERFLOW", 1, 32, {"shared_bytes": 300 * 1024}),
        ("SMEM_OVERFLOW", 1, 32, {"shared_bytes": 120 * 1024, "cc": (8, 9)}),
    ],
)
def test_limits_of_a_launch(id, grid, block, options):
    report = emulate.check(lambda x: None, grid, block, zeros(1), **options)
    assert [finding.id for finding in report.findings] == [id]


def test_a_grid_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="grid"):
        emulate.check(lambda x: None, 0, 32, zeros(1))
