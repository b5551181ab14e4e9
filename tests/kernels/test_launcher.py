"""What the launcher refuses and hands over, with a driver that only records what it is asked."""

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from nbmoe_kernels import launcher
from nbmoe_kernels.kernel import NotLoadedError, kernel

bindings = pytest.importorskip("cuda.bindings.driver", reason="the launcher's own structures")

NONE, ACTIVE, INVALIDATED = range(3)
OVERLAP = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@kernel("global u32* out", threads=32, name="probe")
def probe(out: Any) -> None: ...


@kernel(
    "global u32* out, u32 count, f32 scale, i64 offset",
    threads=96,
    name="overlapping",
    shared_bytes=1024,
    min_cc=(9, 0),
    overlaps_previous=True,
)
def overlapping(out: Any, count: Any, scale: Any, offset: Any) -> None: ...


def read_argument(slots: int, i: int, kind: Any) -> Any:
    """What a kernel would find as its argument ``i``."""
    address = ctypes.c_void_p.from_address(slots + 8 * i).value
    return kind.from_address(address).value


def make_executor(status: int, launches: list[Any]) -> launcher.GpuExecutor:
    def launch(config: Any, function: Any, slots: int, extra: int) -> tuple[int]:
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        attributes = [(a.id, a.value.programmaticStreamSerializationAllowed) for a in config.attrs]
        assert config.numAttrs == len(attributes)
        stream = int(config.hStream)
        shared = config.sharedMemBytes
        launches.append((int(function), grid, block, shared, stream, attributes, slots))
        return (0,)

    executor = object.__new__(launcher.GpuExecutor)
    executor._driver = SimpleNamespace(
        CUstream=bindings.CUstream,
        CUlaunchConfig=bindings.CUlaunchConfig,
        CUlaunchAttribute=bindings.CUlaunchAttribute,
        CUlaunchAttributeID=bindings.CUlaunchAttributeID,
        CUstreamCaptureStatus=SimpleNamespace(CU_STREAM_CAPTURE_STATUS_NONE=NONE),
        cuStreamIsCapturing=lambda stream: (0, status),
        cuLaunchKernelEx=launch,
    )
    executor._several_devices = False
    executor._streams, executor._loaded = {}, {}
    return executor


def load(executor: launcher.GpuExecutor, it: Any) -> None:
    function = bindings.CUfunction(77)
    executor._loaded[it] = launcher._LoadedKernel(executor._driver, None, function, it)


@pytest.mark.parametrize("status", [ACTIVE, INVALIDATED])
def test_nothing_is_loaded_during_a_capture(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """C24: only a kernel that is loaded may be captured."""

    def compile_it(*args: Any) -> bytes:
        raise AssertionError("compiled during a capture")

    monkeypatch.setattr(launcher, "compile_cubin", compile_it)
    launches: list[Any] = []
    executor = make_executor(status, launches)
    with pytest.raises(NotLoadedError, match="probe is not loaded yet"):
        executor(probe, (1, 1, 1), (1 << 20,), 5)
    assert not launches and not executor._loaded
    load(executor, probe)
    executor(probe, (1, 1, 1), (1 << 20,), 5)
    assert len(launches) == 1


def test_a_launch_hands_over_grid_stream_resources_and_arguments() -> None:
    launches: list[Any] = []
    executor = make_executor(NONE, launches)
    load(executor, overlapping)
    executor(overlapping, (3, 2, 1), (1 << 40, 7, 0.5, -9), SimpleNamespace(cuda_stream=5))
    function, grid, block, shared, stream, _, slots = launches[0]
    assert (function, grid, block, shared, stream) == (77, (3, 2, 1), (96, 1, 1), 1024, 5)
    kinds = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_float, ctypes.c_int64)
    assert [read_argument(slots, i, kind) for i, kind in enumerate(kinds)] == [1 << 40, 7, 0.5, -9]
    # The prepared configuration keeps nothing of the last launch.
    executor(overlapping, (1, 1, 1), (1 << 41, 8, 1.5, 9), None)
    _, grid, _, _, stream, _, slots = launches[1]
    assert (grid, stream, read_argument(slots, 1, ctypes.c_uint32)) == ((1, 1, 1), 0, 8)


def test_only_a_kernel_that_says_so_overlaps_the_previous_one() -> None:
    launches: list[Any] = []
    executor = make_executor(NONE, launches)
    for it, args in ((probe, (0,)), (overlapping, (0, 0, 0.0, 0))):
        load(executor, it)
        executor(it, (1, 1, 1), args, None)
    assert [launch[5] for launch in launches] == [[], [(OVERLAP, 1)]]


def test_more_arguments_are_no_more_python_work() -> None:
    """Calls, of Python and of C, that one launch makes."""

    def calls(count: int) -> list[str]:
        params = ", ".join(f"global u32* p{i}" for i in range(count))
        it = kernel(params, threads=32, name=f"takes_{count}")(lambda *args: None)
        executor = make_executor(NONE, [])
        executor._driver.cuLaunchKernelEx = lambda *args: (0,)
        load(executor, it)
        made: list[str] = []
        args = (*range(count),)

        def record(frame: Any, event: str, what: Any) -> None:
            if event in ("call", "c_call"):
                made.append(what.__name__ if what else frame.f_code.co_name)

        it.launch(executor, (1, 1, 1), *args, stream=5)
        sys.setprofile(record)
        try:
            it.launch(executor, (1, 1, 1), *args, stream=5)
        finally:
            sys.setprofile(None)
        return made

    few, many = calls(1), calls(40)
    assert few == many and len(few) < 25, few
