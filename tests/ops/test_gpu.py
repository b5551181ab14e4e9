"""P1, P12 on a GPU: arrays of torch and cupy, streams, and CUDA graphs."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nbmoe import backend
from nbmoe.arrays import to_numpy
from nbmoe.backend import problem
from nbmoe.errors import CaptureError
from nbmoe.operand import plain_dtype
from nbmoe.reference import RoutingIndices
from nbmoe_kernels.launcher import GpuExecutor
from tests.bad_inputs.valid import VALID, function
from tests.conftest import is_prepared
from tests.ops.compare import assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(problem("gpu") is not None, reason="no usable GPU"),
]
BF16 = np.dtype(ml_dtypes.bfloat16)


def as_tuple(value: Any) -> tuple[Any, ...]:
    value = value.data if is_prepared(value) else value
    return value if isinstance(value, tuple) else (value,)


def mapped(value: Any, move: Any) -> Any:
    """Moves arrays, in tuples too."""
    if isinstance(value, tuple):
        return tuple(mapped(v, move) for v in value)
    return move(value) if isinstance(value, np.ndarray) else value


def torch_tensor(x: Any) -> Any:
    torch = pytest.importorskip("torch")
    bits = torch.from_numpy(x.view(plain_dtype(x.dtype))).cuda()
    return bits.view(getattr(torch, x.dtype.name))


def cupy_array(x: Any) -> Any:
    cupy = pytest.importorskip("cupy")
    return cupy.asarray(x.view(plain_dtype(x.dtype)))


def expected(entry: str) -> tuple[Any, ...]:
    return as_tuple(function(entry)(**VALID[entry](), backend="reference"))


def assert_results(got: Any, want: tuple[Any, ...]) -> None:
    for g, w in zip(as_tuple(got), want, strict=True):
        assert_same(to_numpy(g), w)


@pytest.mark.parametrize("entry", tuple(VALID))
@pytest.mark.parametrize("move", [torch_tensor, cupy_array])
def test_arrays_of_other_libraries(entry: str, move: Any) -> None:
    """Into their buffers; the types that a library has no name for go as bit patterns."""
    arguments = {name: mapped(value, move) for name, value in VALID[entry]().items()}
    got = function(entry)(**arguments, validate="metadata")
    assert all(g is o for g, o in zip(as_tuple(got), as_tuple(arguments["out"]), strict=True))
    assert_results(got, expected(entry))


@pytest.mark.parametrize("entry", tuple(VALID))
def test_torch_in_torch_out(entry: str) -> None:
    """Also on a stream that only torch knows."""
    torch = pytest.importorskip("torch")
    arguments = VALID[entry]()
    del arguments["out"]
    arguments = {name: mapped(value, torch_tensor) for name, value in arguments.items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        got = function(entry)(**arguments)
        torch.cuda.current_stream().synchronize()
    wanted = [torch.bfloat16 if w.dtype == BF16 else None for w in expected(entry)]
    for g, dtype in zip(as_tuple(got), wanted, strict=True):
        assert isinstance(g, torch.Tensor) and dtype in (None, g.dtype)
    assert isinstance(got, RoutingIndices) == (entry == "moe_create_indices")


@pytest.mark.parametrize("entry", tuple(VALID))
def test_graph_replay_sees_new_inputs(entry: str) -> None:
    """P12, bug case 57: a captured call allocates, reads and waits for nothing."""
    torch = pytest.importorskip("torch")
    arguments = {name: mapped(value, torch_tensor) for name, value in VALID[entry]().items()}
    function(entry)(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(entry)(**arguments)
    first = next(v for v in arguments.values() if isinstance(v, torch.Tensor))
    first = first.view(torch.uint8)  # torch flips no four- or eight-bit floats
    original = first.clone()
    first.copy_(first.flip(0))
    for buffer in as_tuple(arguments["out"]):
        buffer.view(torch.uint8).fill_(0xAA)
    graph.replay()
    changed = VALID[entry]()
    name = next(n for n, v in changed.items() if isinstance(v, np.ndarray))
    changed[name] = changed[name][::-1].copy()
    want = as_tuple(function(entry)(**changed, backend="reference"))
    torch.cuda.synchronize()
    assert_results(arguments["out"], want)
    first.copy_(original)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert_results(arguments["out"], expected(entry))


@pytest.mark.parametrize("entry", tuple(VALID))
def test_reading_in_a_capture_is_refused(entry: str) -> None:
    torch = pytest.importorskip("torch")
    arguments = {name: mapped(value, torch_tensor) for name, value in VALID[entry]().items()}
    torch.cuda.synchronize()
    with pytest.raises(CaptureError, match="warm up first"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            function(entry)(**arguments, validate="metadata")


def test_kernel_that_is_not_loaded_is_refused_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """C24 with the driver's own word on the capture; `test_launcher` has a stand-in for it."""
    torch = pytest.importorskip("torch")
    arguments = {name: mapped(v, torch_tensor) for name, v in VALID["moe_finalize"]().items()}
    cold = GpuExecutor(0)
    monkeypatch.setattr(backend, "executor", lambda *args, **kwargs: cold)
    torch.cuda.synchronize()
    with pytest.raises(CaptureError, match=r"moe_finalize.*warm up first"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            function("moe_finalize")(**arguments)
    function("moe_finalize")(**arguments)
    torch.cuda.synchronize()
    assert_results(arguments["out"], expected("moe_finalize"))
