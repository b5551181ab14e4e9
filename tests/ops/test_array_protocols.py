"""Arrays of other libraries: seen where they are, results of the same kind, nothing copied.

torch, jax and cupy are stood in for here; tests/oracles has the real torch and jax.
"""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nbmoe import arrays, ops
from nbmoe.arrays import Kind, describe, to_numpy
from nbmoe.backend import WaitingExecutor, check_reach
from nbmoe.errors import ArgTypeError, DeviceError, DTypeError, LayoutError
from nbmoe.streams import gpu_stream
from tests.bad_inputs.case import FakeDeviceArray
from tests.ops.dlpack_object import IS_COPIED, READ_ONLY, DlpackObject, NumpyDlpack, on_host
from tests.ops.test_arrays import FakeTensor

BF16 = np.dtype(ml_dtypes.bfloat16)
RANDOM = np.random.default_rng(0)
DOWN = RANDOM.standard_normal((6, 16), np.float32).astype(BF16)
RESTORE = np.array([5, 0, 3, 4, 1, 2], np.uint32)
WEIGHTS = RANDOM.standard_normal((3, 2), np.float32)
EXPECTED = ops.moe_finalize(DOWN, RESTORE, WEIGHTS, backend="reference")


def of(x: Any) -> arrays.Array:
    return describe("api", "x", x)


# DLPack


@pytest.mark.parametrize("make", [on_host, NumpyDlpack])
@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint32", "float32", "uint16", "int64"])
def test_dlpack_is_seen_where_it_is(make: Any, dtype: str) -> None:
    x = np.arange(12, dtype=dtype).reshape(3, 4)
    a = of(make(x))
    assert (a.kind, a.shape, a.dtype, a.device) == (Kind.DLPACK_HOST, (3, 4), dtype, None)
    assert a.pointer == x.ctypes.data and a.extent.is_contiguous and a.writeable
    assert a.view is not None and np.shares_memory(a.view, x) and (a.view == x).all()


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ((4, 16, 1), "bfloat16"),
        ((10, 8, 1), "float8_e4m3fn"),
        ((14, 8, 1), "float8_e8m0fnu"),
        ((17, 4, 2), "float4_e2m1fn_x2"),
    ],
)
def test_dlpack_types_that_numpy_has_not(dtype: Any, name: str) -> None:
    x = np.arange(12).astype(f"u{dtype[1] * dtype[2] // 8}").reshape(3, 4)
    a = of(on_host(x, dtype))
    assert a.dtype == name and a.nbytes == x.nbytes
    assert a.view is not None and np.shares_memory(a.view, x)
    assert a.view.dtype == arrays.named_dtype(name) and a.view.tobytes() == x.tobytes()


def test_dlpack_layout() -> None:
    x = np.arange(24, dtype=np.int32).reshape(4, 6)
    for view in (x[:, ::2], x.T, x[::-1]):
        a = of(on_host(view))
        assert a.strides == view.strides and not a.extent.is_contiguous
        assert (a.view == view).all()
    shifted = DlpackObject(x.ctypes.data + 8, (4,), (0, 32, 1), offset=8)
    assert of(shifted).pointer == x.ctypes.data + 8


def test_dlpack_read_only_and_legacy() -> None:
    x = np.zeros(4, np.uint8)
    arguments = (x.ctypes.data, (4,), (1, 8, 1))
    assert of(DlpackObject(*arguments)).writeable
    assert not of(DlpackObject(*arguments, flags=READ_ONLY)).writeable
    assert not of(DlpackObject(*arguments, flags=IS_COPIED)).writeable
    assert of(DlpackObject(*arguments, is_legacy=True)).pointer == x.ctypes.data


@pytest.mark.parametrize("dtype", [(1, 8, 4), (17, 4, 1), (5, 64, 1), (99, 8, 1)])
def test_dlpack_unknown_elements(dtype: Any) -> None:
    with pytest.raises(DTypeError, match="DLPack code"):
        of(DlpackObject(1 << 20, (4,), dtype))


def test_dlpack_elsewhere() -> None:
    with pytest.raises(ArgTypeError, match="device of DLPack type 8"):
        of(DlpackObject(1 << 20, (4,), (1, 8, 1), device=(8, 0)))


def test_dlpack_that_refuses() -> None:
    class Refuses(NumpyDlpack):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("cannot be shared")

    with pytest.raises(ArgTypeError, match="cannot be shared"):
        of(Refuses(np.zeros(3)))


def test_dlpack_on_a_gpu_makes_the_calls_stream_wait() -> None:
    x = DlpackObject(1 << 40, (4,), (1, 8, 1), device=(2, 3))
    a = of(x)
    assert (a.kind, a.device, a.pointer, a.view) == (Kind.DLPACK, 3, 1 << 40, None)
    assert x.streams == [-1]  # nothing waits yet: the stream is not known
    assert gpu_stream("api", 77, [a]) == 77 and x.streams == [-1, 77]
    assert gpu_stream("api", None, [a]) == 0 and x.streams == [-1, 77, 1]


def test_dlpack_operands_and_outputs(kernels: Any) -> None:
    if kernels.name == "gpu":
        pytest.skip("these objects are of the host; test_gpu_arrays has those of a GPU")
    put = to_dlpack if kernels.name != "cudasim" else (lambda x: x)
    out = np.full((3, 16), 0x7FFF, np.uint16)
    result = ops.moe_finalize(
        *map(put, (DOWN, RESTORE, WEIGHTS)),
        out=(target := put(out)),
        backend=None if kernels.name == "cudasim" else kernels.name,
    )
    assert result is target
    assert out.tobytes() == EXPECTED.tobytes()


def to_dlpack(x: np.ndarray) -> Any:
    return on_host(x.view(np.uint16), (4, 16, 1)) if x.dtype == BF16 else on_host(x)


def test_dlpack_results_are_numpys() -> None:
    result = ops.moe_finalize(*map(to_dlpack, (DOWN, RESTORE, WEIGHTS)), backend="reference")
    assert type(result) is np.ndarray and result.dtype == BF16
    assert result.tobytes() == EXPECTED.tobytes()


def test_read_only_dlpack_is_no_output() -> None:
    frozen = np.zeros((3, 16), np.uint16)
    frozen.flags.writeable = False
    operands = map(to_dlpack, (DOWN, RESTORE, WEIGHTS))
    with pytest.raises(LayoutError, match="out: expected a writeable array"):
        ops.moe_finalize(*operands, out=on_host(frozen, (4, 16, 1)), backend="reference")


# torch


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        (np.arange(12, dtype=np.uint16), "bfloat16"),
        (np.arange(12, dtype=np.uint8), "float8_e4m3fn"),
        (np.arange(12, dtype=np.uint8), "float8_e8m0fnu"),
        (np.arange(12, dtype=np.uint8), "float4_e2m1fn_x2"),
        (np.arange(12, dtype=np.uint32), "uint32"),
    ],
)
def test_torch_on_the_host(data: np.ndarray, dtype: str) -> None:
    data = data.reshape(3, 4)
    a = of(FakeTensor(data, dtype, device="cpu"))
    assert (a.kind, a.shape, a.dtype, a.device) == (Kind.TORCH_HOST, (3, 4), dtype, None)
    assert a.view is not None and np.shares_memory(a.view, data) and a.writeable
    assert a.view.tobytes() == data.tobytes()
    strided = of(FakeTensor(data[:, ::2], dtype, device="cpu"))
    assert strided.view is not None and strided.view.strides == data[:, ::2].strides


def test_torch_that_autograd_watches_is_no_output() -> None:
    x = FakeTensor(np.zeros(4, np.float32), "float32", device="cpu")
    x.requires_grad = True
    assert not of(x).writeable


def test_torch_type_that_numpy_has_not() -> None:
    a = of(FakeTensor(np.zeros((2, 3), np.uint8), "quint8", device="cpu"))
    assert a.dtype == "quint8" and a.shape == (2, 3)


# jax


class FakeJax:
    """An array of jax as far as duck typing goes."""

    def __init__(self, data: np.ndarray, platform: str = "cpu", devices: int = 1) -> None:
        self.data, self.dtype, self.shape = data, data.dtype, data.shape
        device = SimpleNamespace(platform=platform, local_hardware_id=2)
        self.on, self.waited = [device] * devices, 0

    def devices(self) -> list[Any]:
        return self.on

    def block_until_ready(self) -> Any:
        self.waited += 1
        return self

    def unsafe_buffer_pointer(self) -> int:
        return self.data.ctypes.data


FakeJax.__module__ = "jaxlib._fake"


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = SimpleNamespace(zeros=lambda shape, dtype, device: FakeJax(np.zeros(shape, dtype)))
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(numpy=numpy))


def test_jax_on_the_host() -> None:
    x = FakeJax(np.arange(12, dtype=np.uint16).view(BF16).reshape(3, 4))
    a = of(x)
    assert (a.kind, a.shape, a.dtype) == (Kind.JAX_HOST, (3, 4), "bfloat16")
    assert a.pointer == x.data.ctypes.data and x.waited == 1
    assert a.view is not None and np.shares_memory(a.view, x.data)
    assert not a.writeable and not to_numpy(x).flags.writeable


def test_jax_on_a_gpu() -> None:
    a = of(FakeJax(np.zeros(4, np.uint8), "gpu"))
    assert (a.kind, a.device, a.view, a.writeable) == (Kind.JAX, 2, None, False)


def test_jax_that_cannot_be_used() -> None:
    with pytest.raises(ArgTypeError, match="on 2 devices"):
        of(FakeJax(np.zeros(4, np.uint8), devices=2))
    with pytest.raises(ArgTypeError, match="platform 'tpu'"):
        of(FakeJax(np.zeros(4, np.uint8), "tpu"))
    tracer = type("Tracer", (), {"__module__": "jax.core"})()
    with pytest.raises(ArgTypeError, match=r"got a Tracer — call it outside of jax\.jit"):
        of(tracer)


@pytest.mark.usefixtures("jax")
@pytest.mark.parametrize("backend", ["reference", "emulate"])
def test_jax_results_are_jaxs(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbmoe.backend.simulator_enabled", lambda: False)
    result = ops.moe_finalize(*map(FakeJax, (DOWN, RESTORE, WEIGHTS)), backend=backend)
    assert type(result) is FakeJax and result.data.dtype == BF16
    assert result.data.tobytes() == EXPECTED.tobytes()


def test_a_launch_for_jax_waits_for_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax has no stream that could be made to wait."""
    events: list[Any] = []
    monkeypatch.setattr("nbmoe.backend.synchronize", lambda stream: events.append(stream))
    waits = WaitingExecutor(lambda *_: events.append("launched"))
    waits(None, (1, 1, 1), (), 7)  # type: ignore[arg-type]
    assert events == ["launched", 7]


def test_jax_is_no_output() -> None:
    out = FakeJax(np.zeros((3, 16), BF16))
    with pytest.raises(LayoutError, match="out: expected a writeable array"):
        ops.moe_finalize(DOWN, RESTORE, WEIGHTS, out=out, backend="reference")
    assert not out.data.any()


@pytest.mark.parametrize(
    "x",
    [
        FakeJax(np.zeros(4, np.uint8)),
        FakeTensor(np.zeros(4, np.uint8), "uint8", device="cpu"),
        on_host(np.zeros(4, np.uint8)),
    ],
    ids=["jax", "torch", "DLPack"],
)
def test_host_arrays_are_not_moved_to_a_gpu(x: Any) -> None:
    with pytest.raises(
        DeviceError, match=r"x: expected an array of the GPU .*, got one of the host"
    ):
        check_reach("api", "gpu", {"x": of(x)})
    on_gpu = of(FakeDeviceArray((4,), "|u1"))
    with pytest.raises(DeviceError, match="y: expected an array of the host"):
        check_reach("api", None, {"x": of(x), "y": on_gpu})


# cupy, numba


def test_cupy_results_are_cupys(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def __init__(self, ordinal: int) -> None:
            assert ordinal == 3

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    fake = SimpleNamespace(
        cuda=SimpleNamespace(Device=Device), empty=lambda shape, dtype: ("cupy", shape, dtype)
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    owner = type("ndarray", (FakeDeviceArray,), {"__module__": "cupy._core"})
    like = of(owner((2, 3), "<u2", device_id=3))
    assert like.kind is Kind.CUPY
    assert arrays.empty(like, (5,), BF16) == ("cupy", (5,), np.uint16)
    assert arrays.empty(like, (5,), ml_dtypes.float8_e4m3fn) == ("cupy", (5,), np.uint8)


def test_nothing_imports_the_libraries() -> None:
    """An array of theirs is proof that the caller has."""
    package = Path(arrays.__file__).parent
    for path in (package / "arrays.py", package / "operand.py", *package.glob("protocols/*.py")):
        imported = re.findall(r"^\s*(?:import|from) (\w+)", path.read_text("utf-8"), re.MULTILINE)
        assert not {"torch", "jax", "jaxlib", "cupy"} & set(imported), path


class AnswersForEverything:
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def test_odd_objects_are_no_arrays() -> None:
    for odd in (AnswersForEverything(), SimpleNamespace(__dlpack__=1), np.float32(1), "x"):
        with pytest.raises(ArgTypeError, match="expected an array"):
            of(odd)
