"""Kernels that may start before the previous one has ended."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numba import config

import emulate
from nbmoe.backend import problem
from nbmoe_kernels.compiler import compile_ptx
from nbmoe_kernels.device.grid_dependency import allow_next_grid
from nbmoe_kernels.kernel import Kernel, kernel
from tests.kernels.assemble import assemble
from tests.kernels.grid_chain import (
    THREADS,
    adds_one,
    adds_one_in_turn,
    copies_twice,
    fills_slowly,
    takes_many,
)
from tests.kernels.test_op_kernels import needs_capability

BLOCKS = 4
SIZE = BLOCKS * THREADS
needs_compiler = pytest.mark.skipif(
    config.ENABLE_CUDASIM, reason="the simulator replaces the compiler"
)
needs_gpu = pytest.mark.skipif(problem("gpu") is not None, reason="no usable GPU")


@pytest.mark.parametrize("engine", ["fast", "interpreted", "checked"])
def test_launches_on_the_host_run_one_after_another(engine: Any) -> None:
    data, early, late = (np.zeros(SIZE, np.uint32) for _ in range(3))

    def launch(it: Kernel, *args: Any) -> None:
        emulate.launch(it, BLOCKS, it.threads, *args, engine=engine)

    launch(fills_slowly, data, np.uint32(7), np.uint32(1))
    launch(copies_twice, data, early, late)
    assert (early == 7).all() and (late == 7).all()


@needs_compiler
@pytest.mark.parametrize("it", [fills_slowly, copies_twice, takes_many], ids=lambda k: k.name)
def test_instructions_are_there_and_in_order(it: Kernel, tmp_path: Any) -> None:
    ptx = compile_ptx(it, (9, 0))
    wait, allow = ptx.index("griddepcontrol.wait;"), ptx.index("griddepcontrol.launch_dependents;")
    assert wait < allow
    # The load and the store of early are on different sides of the wait.
    if it is copies_twice:
        assert ptx.index("ld.global") < wait < ptx.index("st.global") < ptx.rindex("ld.global")
    assert assemble(it, (9, 0), tmp_path).faults() == []


@needs_compiler
def test_a_kernel_that_overlaps_must_wait() -> None:
    @kernel("global u32* out", threads=32, name="waits_for_nobody", overlaps_previous=True)
    def waits_for_nobody(out):
        out[np.uint64(0)] = np.uint32(1)

    @kernel("global u32* out", threads=32, name="hurries_the_next", min_cc=(9, 0))
    def hurries_the_next(out):
        allow_next_grid()
        out[np.uint64(0)] = np.uint32(1)

    for it in (waits_for_nobody, hurries_the_next):
        with pytest.raises(RuntimeError, match=rf"{it.name} .* wait_for_previous_grid"):
            compile_ptx(it, (9, 0))


class Device:
    """Arrays, a stream and a launcher of the current GPU."""

    def __init__(self) -> None:
        from cuda.core import Device

        from nbmoe_kernels.launcher import GpuExecutor

        self.run = GpuExecutor()
        self.stream = Device().create_stream()

    def put(self, array: np.ndarray) -> Any:
        from numba import cuda

        return cuda.to_device(array)

    def launch(self, it: Kernel, *args: Any, stream: Any = None) -> None:
        values = [getattr(a, "device_ctypes_pointer", a) for a in args]
        values = [getattr(v, "value", v) for v in values]
        it.launch(self.run, (BLOCKS, 1, 1), *values, stream=stream or self.stream)


@pytest.fixture
def device() -> Iterator[Device]:
    needs_capability(adds_one)
    yield Device()


@pytest.mark.gpu
@needs_gpu
def test_gpu_starts_early_and_waits(device: Device) -> None:
    """The second kernel reads the old value before its wait, and the new one after it."""
    data, early, late = (device.put(np.zeros(SIZE, np.uint32)) for _ in range(3))
    for launch in (1, 2, 3):  # the first loads the kernels
        device.launch(fills_slowly, data, launch, 2000)
        device.launch(copies_twice, data, early, late)
    device.stream.sync()
    assert (late.copy_to_host() == 3).all()
    assert (early.copy_to_host() == 2).all(), "the launches did not overlap"


@pytest.mark.gpu
@needs_gpu
def test_gpu_graph_of_a_chain(device: Device) -> None:
    """A chain in which each kernel reads what the last wrote, and writes what it read."""
    one, two, early = (device.put(np.zeros(SIZE, np.uint32)) for _ in range(3))
    links, replays = 40, 5
    device.launch(fills_slowly, one, 0, 0)
    device.launch(adds_one, one, two)
    device.launch(copies_twice, two, early, one)
    device.launch(fills_slowly, one, 0, 0)
    builder = device.stream.create_graph_builder()
    builder.begin_building()
    for _ in range(links):
        device.launch(adds_one, one, two, stream=builder.stream)
        device.launch(adds_one, two, one, stream=builder.stream)
    graph = builder.end_building().complete()
    for _ in range(replays):
        graph.launch(device.stream)
    device.stream.sync()
    assert (one.copy_to_host() == 2 * links * replays).all()


HOST_MICROSECONDS = 9.0


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("it", [adds_one, adds_one_in_turn, takes_many], ids=lambda k: k.name)
def test_gpu_launch_costs_the_host_little(it: Kernel, device: Device) -> None:
    """The best of several series: other processes share the host."""
    arrays = [device.put(np.zeros(SIZE, np.uint32)) for _ in it.params]
    addresses = [a.device_ctypes_pointer.value for a in arrays]
    best = float("inf")
    for _ in range(40):
        device.stream.sync()
        begin = time.perf_counter()
        for _ in range(200):
            it.launch(device.run, (BLOCKS, 1, 1), *addresses, stream=device.stream)
        best = min(best, (time.perf_counter() - begin) / 200 * 1e6)
        if best <= HOST_MICROSECONDS:
            return
    pytest.fail(f"a launch takes {best:.1f} us of the host")
