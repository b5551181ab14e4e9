"""Arrays at the boundary: described without reading, allocated in kind, moved only when asked."""

import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nbmoe import arrays
from nbmoe.arrays import Kind, describe, to_backend, to_numpy
from nbmoe.errors import ArgTypeError, DTypeError, LayoutError
from tests.bad_inputs.case import FakeDeviceArray

BF16 = np.dtype(ml_dtypes.bfloat16)


class FakeTensor:
    """A torch tensor as far as duck typing goes, over host memory; device is cuda, cpu or other."""

    def __init__(self, data: np.ndarray, dtype: str, *, device: str = "cuda") -> None:
        self.data, self.dtype, self.is_cuda = data, f"torch.{dtype}", device == "cuda"
        self.shape = data.shape
        self.device = SimpleNamespace(type=device, index=1)
        self.requires_grad = False

    def data_ptr(self) -> int:
        return self.data.ctypes.data

    def element_size(self) -> int:
        return self.data.itemsize

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.data.itemsize for s in self.data.strides)

    def new_empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return ("torch memory", shape, dtype)


def of(x: Any) -> arrays.Array:
    return describe("api", "x", x)


def test_numpy() -> None:
    x = np.zeros((3, 4), BF16)
    a = of(x)
    assert (a.kind, a.shape, a.dtype, a.extent.itemsize) == (Kind.NUMPY, (3, 4), "bfloat16", 2)
    assert a.strides == (8, 2) and a.nbytes == 24 and a.view is x and a.writeable
    assert a.pointer == x.ctypes.data and a.device is None and not a.kind.on_gpu


@pytest.mark.parametrize(
    ("make", "contiguous"),
    [
        (lambda x: x, True),
        (lambda x: x[:2], True),
        (lambda x: x[:, :3], False),
        (lambda x: x[:1, :3], True),
        (lambda x: x.T, False),
        (lambda x: x[::-1], False),
        (lambda x: x[:0, ::2], True),
        (lambda x: x[..., None], True),
        (lambda x: np.broadcast_to(x[:1], x.shape), False),
    ],
)
def test_contiguity_is_numpys(make: Any, contiguous: bool) -> None:
    x = make(np.zeros((4, 6), np.int32))
    assert of(x).extent.is_contiguous is contiguous
    assert x.flags.c_contiguous is contiguous


def test_overlap() -> None:
    room = np.zeros(64, np.uint8)
    first = of(room[:32])
    assert first.overlaps(of(room[31:40])) and of(room[31:40]).overlaps(first)
    assert not first.overlaps(of(room[32:])) and not of(room[32:]).overlaps(first)
    assert not first.overlaps(of(room[8:8]))
    elsewhere = FakeDeviceArray((32,), "|u1", pointer=room.ctypes.data)
    assert not first.overlaps(of(elsewhere))


def test_cuda_array_interface() -> None:
    a = of(FakeDeviceArray((2, 3), "<u2", device_id=3, stream=9))
    assert (a.kind, a.shape, a.dtype, a.device) == (Kind.CUDA, (2, 3), "uint16", 3)
    assert a.strides == (6, 2) and a.extent.is_contiguous and a.view is None and a.stream == 9
    assert not of(FakeDeviceArray((2, 3), "<u2", strides=(12, 2))).extent.is_contiguous


def test_owner_that_says_its_size() -> None:
    """More than is described is fine: the array may be a view."""
    for nbytes in (6, 7):
        x = FakeDeviceArray((2, 3), "|u1")
        x.nbytes = nbytes  # type: ignore[attr-defined]
        assert of(x).shape == (2, 3)


def test_numba_device() -> None:
    """Numba keeps the GPU in the memory's context."""
    x = FakeDeviceArray((4,), "|u1")
    owner = SimpleNamespace(
        __cuda_array_interface__=x.__cuda_array_interface__,
        dtype=BF16,
        gpu_data=SimpleNamespace(context=SimpleNamespace(device=SimpleNamespace(id=2))),
    )
    assert of(owner).device == 2 and of(owner).dtype == "bfloat16"


def test_torch() -> None:
    x = np.zeros((3, 4), BF16)
    a = of(FakeTensor(x, "bfloat16"))
    assert (a.kind, a.shape, a.dtype, a.device) == (Kind.TORCH, (3, 4), "bfloat16", 1)
    assert a.pointer == x.ctypes.data and a.strides == (8, 2) and a.extent.is_contiguous
    assert not of(FakeTensor(x[:, ::2], "bfloat16")).extent.is_contiguous
    with pytest.raises(ArgTypeError, match="a torch tensor on the host or a CUDA GPU, got one on"):
        of(FakeTensor(x, "bfloat16", device="mps"))


def test_torch_outputs_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(bfloat16="torch bf16", uint8="torch u8")
    monkeypatch.setitem(sys.modules, "torch", fake)
    like = of(FakeTensor(np.zeros(4, np.uint8), "uint8"))
    assert arrays.empty(like, (2, 3), BF16) == ("torch memory", (2, 3), "torch bf16")
    assert arrays.empty(like, (5,), np.uint8) == ("torch memory", (5,), "torch u8")


def test_host_outputs_are_zero() -> None:
    out = arrays.empty(of(np.ones(3, np.uint8)), (4, 5), BF16)
    assert type(out) is np.ndarray and out.dtype == BF16 and not out.any()


@pytest.mark.parametrize("bad", [None, 3, 3.0, "x", [1, 2], (1, 2), np.float32(1), object()])
def test_no_array(bad: Any) -> None:
    with pytest.raises(ArgTypeError, match=r"api\(\): x: expected an array"):
        of(bad)


def test_bad_interfaces() -> None:
    with pytest.raises(DTypeError, match="typestr 'nonsense'"):
        of(FakeDeviceArray((2,), "nonsense"))
    masked = FakeDeviceArray((2,), "|u1").__cuda_array_interface__ | {"mask": "x"}
    with pytest.raises(LayoutError, match="without a mask"):
        of(SimpleNamespace(__cuda_array_interface__=masked))


def test_to_backend_and_back() -> None:
    x = np.arange(12, dtype=np.float32).astype(BF16).reshape(3, 4)
    assert to_backend(x, "emulate") is x and to_backend(x, "reference") is x
    strided = to_backend(x[:, ::2], "emulate")
    assert strided.flags.c_contiguous and (strided == x[:, ::2]).all()
    assert to_numpy(x) is x
    bits = to_numpy(x.view(np.uint16), BF16)
    assert bits.dtype == BF16 and (bits == x).all()
    with pytest.raises(ArgTypeError, match=r"to_numpy\(\): array: expected an array"):
        to_numpy([1, 2])


def test_named_dtype() -> None:
    for name in ("bfloat16", "float8_e4m3fn", "uint8", "float32"):
        assert arrays.named_dtype(name).name == name
