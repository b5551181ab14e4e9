"""Streams: which are accepted, which one is used when none is given."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nbmoe.arrays import describe
from nbmoe.errors import ArgTypeError, DeviceError
from nbmoe.streams import gpu_stream, host_stream
from tests.bad_inputs.case import FakeDeviceArray
from tests.ops.test_arrays import FakeTensor


def on_gpu(stream: int | None = None, device: int = 0) -> Any:
    return describe("t", "x", FakeDeviceArray((4,), "|u1", device_id=device, stream=stream))


class CudaCore:
    """A stream with the protocol, as numba's and cuda.core's."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 11)


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (12, 12),
        (CudaCore(), 11),
        (SimpleNamespace(__cuda_stream__=(0, 13)), 13),
        (SimpleNamespace(cuda_stream=14, device=SimpleNamespace(index=0)), 14),
        (SimpleNamespace(ptr=15, device_id=0), 15),
    ],
)
def test_accepted(stream: Any, handle: int) -> None:
    assert gpu_stream("api", stream, [on_gpu()]) == handle


@pytest.mark.parametrize("bad", [True, -1, 1.5, "x", object()])
def test_refused(bad: Any) -> None:
    with pytest.raises(ArgTypeError, match=r"api\(\): stream: expected None, a handle"):
        gpu_stream("api", bad, [on_gpu()])


def test_default_is_what_the_operands_export() -> None:
    assert gpu_stream("api", None, [on_gpu(), on_gpu()]) == 0
    assert gpu_stream("api", None, [on_gpu(7), on_gpu(), on_gpu(7)]) == 7
    with pytest.raises(DeviceError, match="operands exported on 2 streams — pass stream="):
        gpu_stream("api", None, [on_gpu(7), on_gpu(8)])
    assert gpu_stream("api", 9, [on_gpu(7), on_gpu(8)]) == 9


def test_default_with_torch_is_torchs_current(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = {1: SimpleNamespace(cuda_stream=21)}
    fake = SimpleNamespace(cuda=SimpleNamespace(current_stream=streams.__getitem__))
    monkeypatch.setitem(sys.modules, "torch", fake)
    tensor = describe("t", "x", FakeTensor(np.zeros(4, np.uint8), "uint8"))
    assert gpu_stream("api", None, [tensor]) == 21


def test_stream_of_another_gpu() -> None:
    stream = SimpleNamespace(ptr=5, device_id=1)
    with pytest.raises(DeviceError, match="a stream of GPU 0, where the operands are, got one of"):
        gpu_stream("api", stream, [on_gpu()])
    assert gpu_stream("api", stream, [on_gpu(device=1)]) == 5


def test_host() -> None:
    host_stream("api", None)
    host_stream("api", 0)
    for bad in (True, 7, "x", CudaCore()):
        with pytest.raises(ArgTypeError, match="None or a stream of Numba's simulator"):
            host_stream("api", bad)
