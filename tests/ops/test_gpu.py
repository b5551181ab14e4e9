"""P1, P12 on a GPU: arrays of torch and cupy, streams, and CUDA graphs."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nbmoe import ops
from nbmoe.arrays import to_numpy
from nbmoe.backend import problem
from nbmoe.errors import CaptureError
from nbmoe.reference import RoutingIndices
from tests.bad_inputs.test_bad_call import ON_GPU
from tests.bad_inputs.valid import VALID
from tests.ops.compare import assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(problem("gpu") is not None, reason="no usable GPU"),
]
BF16 = np.dtype(ml_dtypes.bfloat16)


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def mapped(value: Any, move: Any) -> Any:
    """Moves arrays, in tuples too."""
    if isinstance(value, tuple):
        return tuple(mapped(v, move) for v in value)
    return move(value) if isinstance(value, np.ndarray) else value


def torch_tensor(x: Any) -> Any:
    torch = pytest.importorskip("torch")
    if x.dtype == BF16:
        return torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(x).cuda()


def cupy_array(x: Any) -> Any:
    cupy = pytest.importorskip("cupy")
    return cupy.asarray(x.view(np.uint16) if x.dtype == BF16 else x)


def expected(api: str) -> tuple[Any, ...]:
    return as_tuple(getattr(ops, api)(**VALID[api](), backend="reference"))


def assert_results(got: Any, want: tuple[Any, ...]) -> None:
    for g, w in zip(as_tuple(got), want, strict=True):
        assert_same(to_numpy(g), w)


@pytest.mark.parametrize("api", ON_GPU)
@pytest.mark.parametrize("move", [torch_tensor, cupy_array])
def test_arrays_of_other_libraries(api: str, move: Any) -> None:
    """Into their buffers; the types that a library has no name for go as bit patterns."""
    arguments = {name: mapped(value, move) for name, value in VALID[api]().items()}
    got = getattr(ops, api)(**arguments, validate="metadata")
    assert all(g is o for g, o in zip(as_tuple(got), as_tuple(arguments["out"]), strict=True))
    assert_results(got, expected(api))


@pytest.mark.parametrize("api", ON_GPU)
def test_torch_in_torch_out(api: str) -> None:
    """Also on a stream that only torch knows."""
    torch = pytest.importorskip("torch")
    arguments = VALID[api]()
    del arguments["out"]
    arguments = {name: mapped(value, torch_tensor) for name, value in arguments.items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        got = getattr(ops, api)(**arguments)
        torch.cuda.current_stream().synchronize()
    wanted = [torch.bfloat16 if w.dtype == BF16 else None for w in expected(api)]
    for g, dtype in zip(as_tuple(got), wanted, strict=True):
        assert isinstance(g, torch.Tensor) and dtype in (None, g.dtype)
    assert isinstance(got, RoutingIndices) == (api == "moe_create_indices")


@pytest.mark.parametrize("api", ON_GPU)
def test_graph_replay_sees_new_inputs(api: str) -> None:
    """P12, bug case 57: a captured call allocates, reads and waits for nothing."""
    torch = pytest.importorskip("torch")
    arguments = {name: mapped(value, torch_tensor) for name, value in VALID[api]().items()}
    getattr(ops, api)(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        getattr(ops, api)(**arguments)
    first = next(v for v in arguments.values() if isinstance(v, torch.Tensor))
    original = first.clone()
    first.copy_(first.flip(0))
    for buffer in as_tuple(arguments["out"]):
        buffer.view(torch.uint8).fill_(0xAA)
    graph.replay()
    changed = VALID[api]()
    name = next(n for n, v in changed.items() if isinstance(v, np.ndarray))
    changed[name] = np.ascontiguousarray(changed[name][::-1])
    want = as_tuple(getattr(ops, api)(**changed, backend="reference"))
    torch.cuda.synchronize()
    assert_results(arguments["out"], want)
    first.copy_(original)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert_results(arguments["out"], expected(api))


@pytest.mark.parametrize("api", ON_GPU)
def test_reading_in_a_capture_is_refused(api: str) -> None:
    torch = pytest.importorskip("torch")
    arguments = {name: mapped(value, torch_tensor) for name, value in VALID[api]().items()}
    torch.cuda.synchronize()
    with pytest.raises(CaptureError, match="warm up first"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            getattr(ops, api)(**arguments, validate="metadata")
