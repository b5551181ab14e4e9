"""A kernel that starts early must not touch what the previous one uses before it waits."""

import numpy as np
import pytest
from numba import cuda

import emulate
from nbmoe_kernels.device import bulk, mbarrier
from nbmoe_kernels.device.grid_dependency import allow_next_grid, wait_for_previous_grid
from tests.kernels.grid_chain import THREADS, adds_one, copies_twice

SIZE = 2 * THREADS


def writes_early(data, out):
    i = cuda.grid(1)
    data[i] = np.uint32(1)
    wait_for_previous_grid()
    out[i] = data[i]


def first_thread_waits(data, out):
    if cuda.threadIdx.x == 0:
        wait_for_previous_grid()
    cuda.syncthreads()
    i = cuda.grid(1)
    out[i] = data[i]


def first_block_waits(data, out):
    i = cuda.grid(1)
    if cuda.blockIdx.x == 0:
        wait_for_previous_grid()
        out[i] = data[i]
    else:
        allow_next_grid()
        out[i] = data[i]


def copies_bulk(data, out, waits):
    words = cuda.shared.array(64, np.uint8, alignment=128)
    bar = cuda.shared.array(1, np.uint64)
    i = cuda.threadIdx.x
    if i == 0:
        mbarrier.mbarrier_init(bar, 0, 1)
        mbarrier.fence_mbarrier_init()
        if waits:
            wait_for_previous_grid()
        mbarrier.mbarrier_arrive_expect(bar, 0, 64)
        bulk.bulk_load(words, 0, data, 0, 64, bar, 0)
    cuda.syncthreads()
    mbarrier.mbarrier_wait(bar, 0, 0)
    wait_for_previous_grid()
    out[i] = words[i]


def check(kernel, *args, blocks=2, threads=THREADS):
    return emulate.check(kernel, blocks, threads, *args, schedules=["fifo", "random:1"])


def words():
    return np.zeros(SIZE, np.uint32)


@pytest.mark.parametrize("kernel", [adds_one, first_thread_waits])
def test_who_waits_may_read_and_write(kernel):
    """A barrier passes the knowledge on."""
    source, target = (emulate.unfinished(words()) for _ in range(2))
    assert check(kernel, source, target).findings == ()


@pytest.mark.parametrize(
    ("kernel", "id", "action"),
    [
        (copies_twice, "RACE_RAW", "writes"),
        (writes_early, "RACE_WAW", "writes"),
        (writes_early, "RACE_WAR", "reads"),
        (first_block_waits, "RACE_RAW", "writes"),
    ],
)
def test_touching_before_the_wait_is_a_finding(kernel, id, action):
    arrays = [words() for _ in range(3 if kernel is copies_twice else 2)]
    assert check(kernel, *arrays).findings == ()
    arrays[0] = emulate.unfinished(arrays[0])
    findings = {finding.id: finding for finding in check(kernel, *arrays).findings}
    found = findings[id]
    assert found.variable == "data"
    assert found.actors[0] == "the previous kernel" and found.actions[0] == action
    assert found.threads[0] == (-1, -1)
    text = str(found)
    assert "the previous kernel" in text and "data[i]" in text


@pytest.mark.parametrize(("waits", "ids"), [(1, set()), (0, {"RACE_RAW"})])
def test_asynchronous_copies_need_the_wait_of_who_starts_them(waits, ids):
    data = emulate.unfinished(np.arange(64, dtype=np.uint8))
    report = check(
        copies_bulk, data, np.zeros(64, np.uint8), np.uint32(waits), blocks=1, threads=64
    )
    assert {finding.id for finding in report.findings} == ids


@pytest.mark.parametrize("engine", ["fast", "interpreted"])
def test_other_engines_ignore_the_mark(engine):
    data, early, late = words() + np.uint32(3), words(), words()
    emulate.launch(copies_twice, 2, THREADS, emulate.unfinished(data), early, late, engine=engine)
    assert (early == 3).all() and (late == 3).all()
