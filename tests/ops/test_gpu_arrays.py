"""On a GPU: eight-bit floats of torch, numba arrays in their place, DLPack and its streams."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nbmoe import arrays, ops
from nbmoe.arrays import Kind, describe, to_backend, to_numpy
from nbmoe.backend import problem
from nbmoe.errors import LayoutError
from tests.ops.test_array_protocols import DOWN, EXPECTED, RESTORE, WEIGHTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(problem("gpu") is not None, reason="no usable GPU"),
]
BF16 = np.dtype(ml_dtypes.bfloat16)
OPERANDS = (DOWN, RESTORE, WEIGHTS)
NAMES = ("bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "uint8", "uint32", "float32")


def to_torch(x: np.ndarray) -> Any:
    torch = pytest.importorskip("torch")
    bits = torch.from_numpy(x.view(np.uint8).copy()).cuda()
    return bits.view(getattr(torch, x.dtype.name)).reshape(x.shape)


class OnlyDlpack:
    """A tensor of torch of which nothing but DLPack is left."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.streams = tensor, []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        self.streams.append(stream)
        return self.tensor.__dlpack__(stream=stream, **options)


@pytest.mark.parametrize("name", NAMES)
def test_numba_carries_every_type_as_bits(name: str) -> None:
    x = np.arange(24, dtype=np.uint8).view(arrays.named_dtype(name))
    placed = to_backend(x, "gpu")
    a = describe("api", "x", placed)
    assert (a.kind, a.shape, a.extent.itemsize) == (Kind.CUDA, x.shape, x.itemsize)
    assert to_numpy(placed, x.dtype).tobytes() == x.tobytes()
    made = describe("api", "x", arrays.empty(a, (3, 4), x.dtype))
    assert made.shape == (3, 4) and made.extent.itemsize == x.itemsize and made.device == a.device


@pytest.mark.parametrize("name", NAMES)
def test_torch_types(name: str) -> None:
    torch = pytest.importorskip("torch")
    x = np.arange(24, dtype=np.uint8).view(arrays.named_dtype(name))
    tensor = to_torch(x)
    a = describe("api", "x", tensor)
    assert (a.kind, a.dtype, a.pointer) == (Kind.TORCH, name, tensor.data_ptr())
    assert to_numpy(tensor).tobytes() == x.tobytes()
    made = arrays.empty(a, (3, 4), x.dtype)
    assert made.dtype is getattr(torch, name) and made.device == tensor.device
    b = describe("api", "x", OnlyDlpack(tensor))
    assert (b.kind, b.dtype, b.pointer, b.device) == (Kind.DLPACK, name, a.pointer, a.device)
    assert to_numpy(OnlyDlpack(tensor)).tobytes() == x.tobytes()


def test_packed_fp4() -> None:
    torch = pytest.importorskip("torch")
    tensor = to_torch(np.arange(24, dtype=np.uint8)).view(torch.float4_e2m1fn_x2)
    assert describe("api", "x", tensor).dtype == "float4_e2m1fn_x2"
    assert to_numpy(tensor).tobytes() == bytes(range(24))


def test_dlpack_waits_for_the_stream_that_fills_it() -> None:
    """The inputs are still being written when the call is made, on a stream of torch's own."""
    torch = pytest.importorskip("torch")
    inputs = [to_torch(x) for x in OPERANDS]
    torch.cuda.synchronize()
    late = [torch.zeros_like(x) for x in inputs]
    torch.cuda.synchronize()
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(200_000_000)
        for target, source in zip(late, inputs, strict=True):
            target.copy_(source)
        wrapped = [OnlyDlpack(x) for x in late]
        result = ops.moe_finalize(*wrapped, stream=other)
    other.synchronize()
    assert all(w.streams == [-1, other.cuda_stream] for w in wrapped)
    host = to_numpy(result, BF16)
    assert host.tobytes() == EXPECTED.tobytes()


def test_cupy_in_cupy_out() -> None:
    cupy = pytest.importorskip("cupy")
    operands = [cupy.asarray(x.view(np.uint16) if x.itemsize == 2 else x) for x in OPERANDS]
    a = describe("api", "x", operands[0])
    assert (a.kind, a.dtype, a.pointer) == (Kind.CUPY, "uint16", operands[0].data.ptr)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    result = ops.moe_finalize(*operands, stream=stream)
    stream.synchronize()
    assert type(result) is cupy.ndarray and result.dtype == np.uint16
    assert cupy.asnumpy(result).tobytes() == EXPECTED.tobytes()
    out = cupy.zeros((3, 16), np.uint16)
    cupy.cuda.Device().synchronize()
    assert ops.moe_finalize(*operands, out=out) is out
    assert cupy.asnumpy(out).tobytes() == EXPECTED.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_jax_types(name: str) -> None:
    jax = pytest.importorskip("jax")
    x = np.arange(24, dtype=np.uint8).view(arrays.named_dtype(name))
    array = jax.device_put(x, jax.devices("gpu")[0])
    a = describe("api", "x", array)
    assert (a.kind, a.dtype, a.pointer) == (Kind.JAX, name, array.unsafe_buffer_pointer())
    assert not a.writeable and to_numpy(array).tobytes() == x.tobytes()
    made = arrays.empty(a, (3, 4), x.dtype).array
    assert isinstance(made, jax.Array) and made.dtype == x.dtype
    assert made.devices() == array.devices()


def test_jax_in_jax_out() -> None:
    """What jax computes with the result is right: the call has waited for its kernel."""
    jax = pytest.importorskip("jax")
    device = jax.devices("gpu")[0]
    operands = [jax.device_put(x, device) for x in OPERANDS]
    results = [ops.moe_finalize(*operands) for _ in range(20)]
    for result in results:
        assert isinstance(result, jax.Array) and result.devices() == {device}
        assert np.asarray(result + result).tobytes() == (EXPECTED + EXPECTED).tobytes()
    assert len({r.unsafe_buffer_pointer() for r in results}) == 20
    assert not np.asarray(jax.numpy.zeros((3, 16), BF16, device=device)).any()


def test_jax_is_no_output() -> None:
    jax = pytest.importorskip("jax")
    operands = [jax.device_put(x, jax.devices("gpu")[0]) for x in OPERANDS]
    out = jax.numpy.zeros((3, 16), BF16, device=jax.devices("gpu")[0])
    with pytest.raises(LayoutError, match="out: expected a writeable array"):
        ops.moe_finalize(*operands, out=out)
