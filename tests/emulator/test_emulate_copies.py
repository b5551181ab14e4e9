"""Async copies land at the call or at the wait, and a missing wait shows when they land late."""

import numpy as np
import pytest
from numba import cuda, uint32

import emulate
from tests.emulator import small_ops as ops

COPIES = ["eager", "lazy"]


def make_stages(wait_late: bool, commit: bool):
    """A double-buffered sum over stages of one word a thread."""
    wait = ops.copy_wait_but_one
    last_wait = ops.copy_wait_but_one if wait_late else ops.copy_wait_all

    def stages(x, out):
        buffer = cuda.shared.array(64, uint32)
        t = uint32(cuda.threadIdx.x)
        n = uint32(x.size // 32)
        total = uint32(0)
        ops.copy_word(buffer, t, x, t)
        ops.copy_commit()
        for stage in range(n):
            following = uint32(stage + 1)
            if following < n:
                at = uint32(uint32(32) * (following % uint32(2)) + t)
                ops.copy_word(buffer, at, x, uint32(uint32(32) * following + t))
                if commit:
                    ops.copy_commit()
                wait()
            else:
                last_wait()
            cuda.syncthreads()
            neighbour = uint32((t + uint32(1)) % uint32(32))
            total = uint32(total + buffer[uint32(32) * uint32(stage % 2) + neighbour])
            cuda.syncthreads()
        out[t] = total

    return stages


def run_stages(engine, copies, *, wait_late=False, commit=True):
    x = np.arange(1, 129, dtype=np.uint32)
    out = np.zeros(32, np.uint32)
    kernel = make_stages(wait_late, commit)
    emulate.launch(kernel, 1, 32, x, out, engine=engine, copies=copies)
    expected = np.roll(x.reshape(4, 32).sum(axis=0), -1)
    return bool((out == expected).all())


@pytest.mark.parametrize("copies", COPIES)
def test_pipeline_is_right_whenever_copies_land(engine, copies):
    assert run_stages(engine, copies)


def test_wait_for_one_group_too_few_shows_when_copies_are_lazy(engine):
    assert run_stages(engine, "eager", wait_late=True)
    assert not run_stages(engine, "lazy", wait_late=True)


def test_missing_commit_shows_when_copies_are_lazy(engine):
    assert run_stages(engine, "eager", commit=False)
    assert not run_stages(engine, "lazy", commit=False)


def source_changes(x, out):
    buffer = cuda.shared.array(1, uint32)
    ops.copy_word(buffer, uint32(0), x, uint32(0))
    ops.copy_commit()
    x[0] = uint32(99)
    ops.copy_wait_all()
    out[0] = buffer[0]


def test_source_is_read_when_the_copy_lands(engine):
    for copies, expected in (("eager", 7), ("lazy", 99)):
        x, out = np.array([7], np.uint32), np.zeros(1, np.uint32)
        emulate.launch(source_changes, 1, 1, x, out, engine=engine, copies=copies)
        assert out[0] == expected


def many(x, out):
    buffer = cuda.shared.array(256, uint32)
    for i in range(256):
        ops.copy_word(buffer, uint32(i), x, uint32(i))
    ops.copy_commit()
    ops.copy_wait_all()
    for i in range(256):
        out[i] = buffer[i]


@pytest.mark.parametrize("copies", COPIES)
def test_more_copies_than_a_thread_remembers(engine, copies):
    x, out = np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)
    emulate.launch(many, 1, 1, x, out, engine=engine, copies=copies)
    np.testing.assert_array_equal(out, x)


def never_waits(x):
    buffer = cuda.shared.array(1, uint32)
    ops.copy_word(buffer, uint32(0), x, uint32(0))


@pytest.mark.parametrize("copies", COPIES)
def test_copy_that_nobody_waits_for_ends_with_its_thread(engine, copies):
    emulate.launch(never_waits, 1, 32, np.zeros(1, np.uint32), engine=engine, copies=copies)


def reads_past_the_end(x):
    buffer = cuda.shared.array(1, uint32)
    ops.copy_word(buffer, uint32(0), x, uint32(cuda.threadIdx.x))
    ops.copy_commit()
    ops.copy_wait_all()


@pytest.mark.parametrize("copies", COPIES)
def test_copy_out_of_bounds_is_found(engine, copies):
    with pytest.raises(emulate.KernelError, match=r"IndexError.*thread \(2, 0, 0\)"):
        emulate.launch(
            reads_past_the_end, 1, 4, np.zeros(2, np.uint32), engine=engine, copies=copies
        )
