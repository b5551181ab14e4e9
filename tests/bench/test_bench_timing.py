"""The timer and the memory, with stand-ins for the driver: what a GPU is asked to do."""

from __future__ import annotations

import ctypes
import gc
import sys
from types import SimpleNamespace

import numba.cuda  # noqa: F401 - before its bindings are replaced
import numpy as np
import pytest

from nbmoe.backend import simulator_enabled
from nbmoe.bench import memory, timing
from nbmoe.graphs import Graph

bindings = pytest.importorskip("cuda.bindings")


class FakeGpu:
    """Writes down what it is asked to do. An event takes 10 us, the first ones 1 ms."""

    multiprocessors, cc = 132, (9, 0)
    name = "Fake GPU"

    def __init__(self):
        self.log, self.destroyed = [], 0
        self.events, self.now = 0, 0.0
        self.handle = 0x1000
        self.fails = False

    # A device and its stream.
    def set_current(self):
        pass

    def create_stream(self):
        return self

    def allocate(self, nbytes, stream):
        return SimpleNamespace(handle=0x2000, fill=lambda value, stream: self.log.append("fill"))

    def record(self, options):
        self.events += 1
        self.log.append("event")
        self.now += 0.01 if self.events > 2 * timing._WARM_UP else 1
        return self.now

    def sync(self):
        self.log.append("sync")
        self.events = 0

    # An executor.
    def __call__(self, kernel, grid, args, stream):
        self.log.append("read" if args[1] else "empty")

    # A driver.
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")

    def cuStreamBeginCapture(self, stream, mode):
        self.log.append("begin")
        return (0,)

    def cuStreamEndCapture(self, stream):
        self.log.append("end")
        return 1 if self.fails else 0, "graph"

    def cuGraphInstantiate(self, graph, flags):
        return 0, f"executable {graph}"

    def cuGraphLaunch(self, executable, stream):
        assert (executable, stream) == ("executable graph", 0x1000)
        self.log.append("launch")
        return (0,)

    def cuGraphExecDestroy(self, executable):
        self.destroyed += 1

    def cuGraphDestroy(self, graph):
        self.destroyed += 1


@pytest.fixture
def gpu(monkeypatch):
    found = FakeGpu()
    core = SimpleNamespace(Device=lambda: found, EventOptions=lambda **keys: None)
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.setattr(bindings, "driver", found, raising=False)
    monkeypatch.setattr("nbmoe.backend.executor", lambda name: found)
    return found


def test_a_call_runs_before_it_is_captured(gpu):
    timer = timing.Timer()
    gpu.log.clear()
    launch = timer.capture(lambda stream: gpu.log.append("call"))
    launch()
    assert gpu.log == ["sync", "call", "sync", "begin", "call", "end", "launch"]
    timer.forget()
    timer.forget()
    assert gpu.destroyed == 2


def test_a_graph_that_nobody_has_is_destroyed(gpu):
    graph = Graph(lambda: None, 0x1000)
    del graph
    gc.collect()
    assert gpu.destroyed == 2


def test_a_capture_ends_when_the_call_fails(gpu):
    timer, calls = timing.Timer(), []

    def call(stream):
        calls.append(stream)
        if len(calls) == 2:
            raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        timer.capture(call)
    assert gpu.log[-2:] == ["begin", "end"]
    gpu.fails = True
    with pytest.raises(RuntimeError, match="the CUDA driver answers 1"):
        timer.capture(lambda stream: None)


def test_each_run_is_behind_a_flush(gpu):
    timer = timing.Timer()
    gpu.log.clear()
    times = timer.measure(lambda: gpu.log.append("work"), runs=4)
    log = "".join(word[0] for word in gpu.log)  # fill, read, event, work, sync
    dirty = "f" * timing._FILLS
    clean, before = f"{dirty}r", timing._HEAD_START
    runs = [flush * before + f"{flush}ewe" * 7 + "s" for flush in (dirty, clean)]
    assert log == "".join(runs)
    assert times.dirty.median == pytest.approx(10) and times.clean.p90 == pytest.approx(10)


def test_an_empty_graph_reads_nothing(gpu):
    timer = timing.Timer()
    gpu.log.clear()
    timer.empty()()
    assert [word for word in gpu.log if word in ("empty", "read")] == ["empty", "empty"]


class HostArray:
    """A device array whose memory is the host's."""

    def __init__(self, shape, dtype):
        self.host = np.full(shape, 0xEE, dtype)
        self.nbytes = self.host.nbytes
        self.__cuda_array_interface__ = {"data": (self.host.ctypes.data, False)}


@pytest.mark.skipif(simulator_enabled(), reason="numba.cuda is the simulator")
@pytest.mark.parametrize("count", [0, 3, 1000, 1001, 2000, 5003])
def test_random_elements_repeat(count, monkeypatch):
    """The same on a GPU and on the host."""

    def copy(target, source, nbytes):
        ctypes.memmove(target, source, nbytes)
        return (0,)

    def clear(start, value, nbytes):
        ctypes.memset(start, value, nbytes)
        return (0,)

    driver = SimpleNamespace(
        cuMemcpyHtoD=copy, cuMemcpyDtoD=copy, cuMemsetD8=clear, cuCtxSynchronize=lambda: (0,)
    )
    monkeypatch.setattr(bindings, "driver", driver, raising=False)
    monkeypatch.setattr("numba.cuda.device_array", HostArray)
    pool = np.arange(1000, dtype=np.uint16)
    monkeypatch.setattr(memory, "_pool", lambda kind, seed: pool)
    on_gpu = memory.Memory()
    found = on_gpu.codes(count)
    assert np.array_equal(found.host, memory.Memory(on_gpu=False).codes(count))
    assert np.array_equal(found.host, np.arange(count) % 1000)
    on_gpu.clear(found)
    assert not found.host.any()


def test_elements_are_what_they_are_said_to_be():
    made = memory.Memory(on_gpu=False)
    codes = made.codes(4, 5000)
    assert ((codes & 0x7F) < 0x78).all() and 0.4 < (codes >> 7).mean() < 0.6
    bf16 = made.bf16(3, 1000).astype(np.float32)
    assert (abs(bf16) >= 2**-7).all() and (abs(bf16) < 1).all() and (bf16 < 0).any()
    factors = made.factors(10)
    assert factors.dtype == np.float32 and ((factors >= 0.5) & (factors < 1.5)).all()
    assert made.block_scales("e4m3", 2, 200, 5).shape == (2, 2, 2, 32, 4, 4)
    tokens = made.tokens(50, 40).astype(np.float32)
    assert abs(tokens.mean()) < 0.1 and abs(tokens.std() - 1) < 0.1
    same = [memory.digest([a]) for a in (codes, codes.copy(), codes[:2])]
    assert same[0] == same[1] != same[2] and len(same[0]) == 16
