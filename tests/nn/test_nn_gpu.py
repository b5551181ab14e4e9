"""P1, P12 on a GPU: layers on arrays of torch, on its streams, and in CUDA graphs."""

import dataclasses
import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nbmoe.backend import problem
from nbmoe.nn import block_experts, make_layer, random_tokens
from tests.nn.weights import FORMATS, random_layer, random_stack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(problem("gpu") is not None, reason="no usable GPU"),
]
BF16 = np.dtype(ml_dtypes.bfloat16)
TOKENS = 20


def torch_tokens(seed: int, tokens: int = TOKENS) -> Any:
    torch = pytest.importorskip("torch")
    x = random_tokens(tokens, 64, seed=seed)
    return torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)


def bits(tensor: Any) -> bytes:
    torch = pytest.importorskip("torch")
    return tensor.view(torch.int16).cpu().numpy().tobytes()


def expected(weights: Any, seed: int, tokens: int = TOKENS) -> bytes:
    x = random_tokens(tokens, 64, seed=seed)
    return make_layer(weights, backend="reference")(x).tobytes()


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


@pytest.mark.parametrize("one_launch", [False, True])
@pytest.mark.parametrize("pair", [("nvfp4", ""), ("mxfp8", "")], ids="-".join)
def test_captured_layers(
    pair: tuple[str, str], one_launch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`capture` at two sizes, replayed in turns on another stream, beside plain calls."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(block_experts, "mega_ffn_pays", lambda *problem: one_launch)
    weights = weights_of(pair)
    layer = make_layer(weights, backend="gpu")
    graphs = [layer.capture(few) for few in (3, 40)]
    stream = torch.cuda.Stream()
    for seed in (6, 7, 8):
        for graph in graphs:
            tokens = torch_tokens(seed, graph.tokens)
            x = torch.as_tensor(graph.x, device="cuda").view(torch.int16)
            x.copy_(tokens.view(torch.int16))
            torch.cuda.synchronize()
            out = graph.replay(stream)
            torch.cuda.synchronize()
            assert out.copy_to_host().tobytes() == expected(weights, seed, graph.tokens)
        assert bits(layer(torch_tokens(seed, 9))) == expected(weights, seed, 9)


def captured(layer: Any, x: Any, out: Any) -> Any:
    """A graph of `layer(x, out=out)`, after a call that warms up."""
    torch = pytest.importorskip("torch")
    layer(x, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x, out=out)
    return graph


def overwrite_freed_memory() -> Any:
    """Takes what has been given back to the driver, of any size, and fills it."""
    from numba import cuda

    gc.collect()
    cuda.current_context().memory_manager.deallocations.clear()
    sizes = [1 << power for power in range(8, 23)]
    filled = [cuda.to_device(np.full(n, 0x77, np.uint8)) for n in sizes for _ in range(16)]
    cuda.synchronize()
    return filled


@pytest.mark.parametrize("weight_first", [False, True])
@pytest.mark.parametrize(
    "pair", [("nvfp4", ""), ("mxfp8", ""), ("fp8_block", ""), ("bf16", "")], ids="-".join
)
def test_graphs_outlive_larger_calls(pair: tuple[str, str], weight_first: bool) -> None:
    """Buffers and constants that a larger call replaces stay what a graph of a smaller one uses."""
    torch = pytest.importorskip("torch")
    weights = dataclasses.replace(weights_of(pair), apply_router_weight_first=weight_first)
    layer = make_layer(weights, backend="gpu")
    few, many = 8, 300
    x, out = torch_tokens(4, few), torch_tokens(5, few)
    small = captured(layer, x, out)
    allocations = layer.workspace.allocations
    large_x, large_out = torch_tokens(6, many), torch_tokens(7, many)
    layer(large_x, out=large_out)
    torch.cuda.synchronize()
    assert bits(large_out) == expected(weights, 6, many)
    assert layer.workspace.allocations > allocations  # the buffers of the graph were replaced
    large = captured(layer, large_x, large_out)
    filled = overwrite_freed_memory()
    for seed in (8, 9):
        x.copy_(torch_tokens(seed, few))
        large_x.copy_(torch_tokens(seed, many))
        for graph, given, found in ((small, few, out), (large, many, large_out)):
            found.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert bits(found) == expected(weights, seed, given)
    assert all((array.copy_to_host() == 0x77).all() for array in filled)


def test_a_reserved_layer_captures_fewer_tokens() -> None:
    """After `reserve` and a call that loads kernels, a capture needs no memory at any size."""
    torch = pytest.importorskip("torch")
    weights = dataclasses.replace(weights_of(("mxfp8", "")), apply_router_weight_first=True)
    layer = make_layer(weights, backend="gpu")
    layer.reserve(TOKENS)
    allocations = layer.workspace.allocations
    for tokens in (TOKENS, 7, 1):
        x, out = torch_tokens(4, tokens), torch_tokens(5, tokens)
        graph = captured(layer, x, out)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert bits(out) == expected(weights, 4, tokens)
    assert layer.workspace.allocations == allocations


def test_host_tokens_go_there_and_back() -> None:
    weights = weights_of(("mxfp8", ""))
    layer = make_layer(weights, backend="gpu")
    x = random_tokens(TOKENS, 64, seed=8)
    y = layer(x)
    assert y.dtype == BF16
    assert y.tobytes() == expected(weights, 8)
    assert layer.trace(x).output.tobytes() == y.tobytes()
    assert layer(x[:0]).shape == (0, 64)
