"""What the launcher refuses, with a driver that only says whether a stream is being captured."""

from types import SimpleNamespace
from typing import Any

import pytest

from nbmoe_kernels import launcher
from nbmoe_kernels.kernel import NotLoadedError, kernel

NONE, ACTIVE, INVALIDATED = range(3)


@kernel("global u32* out", threads=32, name="probe")
def probe(out: Any) -> None: ...


def make_executor(status: int, launches: list[Any]) -> launcher.GpuExecutor:
    executor = object.__new__(launcher.GpuExecutor)
    executor._driver = SimpleNamespace(
        CUstream=int,
        CUstreamCaptureStatus=SimpleNamespace(CU_STREAM_CAPTURE_STATUS_NONE=NONE),
        cuStreamIsCapturing=lambda stream: (0, status),
        cuLaunchKernel=lambda *args: launches.append(args) or (0,),
    )
    executor._several_devices = False
    executor._streams, executor._loaded = {}, {}
    return executor


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
    executor._loaded[probe] = launcher._LoadedKernel(None, None, probe)
    executor(probe, (1, 1, 1), (1 << 20,), 5)
    assert len(launches) == 1
