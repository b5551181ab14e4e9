"""P1, P12 on a GPU: layers on arrays of torch, on its streams, and in CUDA graphs."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nbmoe.backend import problem
from nbmoe.nn import make_layer, random_tokens
from tests.nn.weights import FORMATS, random_layer, random_stack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(problem("gpu") is not None, reason="no usable GPU"),
]
BF16 = np.dtype(ml_dtypes.bfloat16)
TOKENS = 20


def torch_tokens(seed: int) -> Any:
    torch = pytest.importorskip("torch")
    x = random_tokens(TOKENS, 64, seed=seed)
    return torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)


def bits(tensor: Any) -> bytes:
    torch = pytest.importorskip("torch")
    return tensor.view(torch.int16).cpu().numpy().tobytes()


def expected(weights: Any, seed: int) -> bytes:
    return make_layer(weights, backend="reference")(random_tokens(TOKENS, 64, seed=seed)).tobytes()


def weights_of(pair: tuple[str, str]) -> Any:
    shared = random_stack(1, *pair, experts=1, moe=64)  # wider: computed apart
    return random_layer(2, *pair, biased=True, shared=shared)


@pytest.mark.parametrize("pair", FORMATS, ids="-".join)
def test_torch_on_a_stream_of_its_own(pair: tuple[str, str]) -> None:
    """All kernels of a call run on torch's current stream, behind what fills the input there."""
    torch = pytest.importorskip("torch")
    weights = weights_of(pair)
    layer = make_layer(weights, backend="gpu")
    source = torch_tokens(3)
    layer(source)  # kernels are loaded
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.zeros_like(source)
        torch.cuda._sleep(20_000_000)
        x.copy_(source)
        y = layer(x)
        torch.cuda.current_stream().synchronize()
    assert y.dtype == torch.bfloat16
    assert bits(y) == expected(weights, 3)


@pytest.mark.parametrize("pair", FORMATS, ids="-".join)
def test_graph_of_a_layer(pair: tuple[str, str]) -> None:
    """A captured call reads, allocates and waits for nothing: replays see new tokens."""
    torch = pytest.importorskip("torch")
    weights = weights_of(pair)
    layer = make_layer(weights, backend="gpu")
    x, out = torch_tokens(4), torch_tokens(5)
    layer(x, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x, out=out)
    for seed in (6, 7, 4):
        x.copy_(torch_tokens(seed))
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert bits(out) == expected(weights, seed)


def test_host_tokens_go_there_and_back() -> None:
    weights = weights_of(("mxfp8", ""))
    layer = make_layer(weights, backend="gpu")
    x = random_tokens(TOKENS, 64, seed=8)
    y = layer(x)
    assert y.dtype == BF16
    assert y.tobytes() == expected(weights, 8)
    assert layer.trace(x).output.tobytes() == y.tobytes()
    assert layer(x[:0]).shape == (0, 64)
