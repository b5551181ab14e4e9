"""The fast engine and its host: read-only arrays, Ctrl-C, garbage collection, other machines."""

import gc
import signal
import threading
import time

import numpy as np
import pytest
from numba import cuda, uint32

import emulate
from emulate.fast import switch
from emulate.fast.build import without_garbage_collection


def add(x, y):
    i = cuda.grid(1)
    y[i] += x[i]


def read_only(array):
    array.flags.writeable = False
    return array


def test_read_only_arrays_use_the_same_code():
    x = np.arange(64.0)
    first = np.zeros(64)
    emulate.launch(add, 2, 32, x, first)
    y = np.zeros(64)
    report = emulate.launch(add, 2, 32, read_only(x.copy()), y)
    assert report.cached and report.compile_seconds == 0
    np.testing.assert_array_equal(y, x)
    strided = np.broadcast_to(np.float64(2), (64,))
    emulate.launch(add, 2, 32, strided, y)
    np.testing.assert_array_equal(y, x + 2)


def test_a_write_to_a_read_only_array_is_found():
    y = read_only(np.zeros(64))
    with pytest.raises(emulate.KernelError, match="add wrote to argument 1, a read-only array"):
        emulate.launch(add, 2, 32, np.ones(64), y)
    assert (y == 0).all()


def test_a_read_only_view_of_a_writable_argument_sees_its_changes():
    y = np.ones(64)
    emulate.launch(add, 2, 32, read_only(y[:]), y)
    assert (y == 2).all()


def spin(x):
    while x[0] == uint32(0):
        cuda.syncthreads()


@pytest.fixture
def _hears_ctrl_c():
    """A process that a shell started in the background ignores SIGINT, and would spin for ever."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_hears_ctrl_c")
@pytest.mark.parametrize("block", [1, 256])
def test_ctrl_c_ends_a_launch_soon(block):
    x = np.zeros(1, np.uint32)
    emulate.launch(spin, 1, block, np.ones(1, np.uint32))  # compiled before the clock starts
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    start = time.perf_counter()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        emulate.launch(spin, 1, block, x)
    assert time.perf_counter() - start < 2
    emulate.launch(add, 2, 32, np.ones(64), np.zeros(64))  # nothing was left behind


def one_lane(lock, x):
    if cuda.threadIdx.x == 0:
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:  # and no nanosleep
            pass
        old = x[0]
        cuda.nanosleep(10)
        x[0] = old + 1
        cuda.atomic.exch(lock, 0, 0)


def test_a_spin_on_an_atomic_lets_others_run():
    x = np.zeros(1, np.int64)
    emulate.launch(one_lane, 20, 32, np.zeros(1, np.uint32), x)
    assert x[0] == 20


def test_no_garbage_collection_while_compiling():
    assert gc.isenabled()
    with without_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with without_garbage_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_another_machine_runs_interpreted_and_says_so(monkeypatch):
    monkeypatch.setattr(switch, "MACHINE", "riscv64")
    y = np.zeros(64)
    report = emulate.launch(add, 2, 32, np.ones(64), y)
    assert report.engine == "interpreted"
    assert "fast engine runs on" in report.note and "x86-64" in report.note
    assert (y == 1).all()
