"""P12: after the first call with a number of tokens, a call allocates nothing."""

import numpy as np
import pytest

from nbmoe import arrays
from nbmoe.arrays import BFLOAT16, describe, to_backend, to_numpy
from nbmoe.nn import Workspace, make_layer, random_tokens
from nbmoe.ops import launch
from tests.nn.weights import FORMATS, random_layer, random_stack


def address(array):
    return describe("test", "array", array).pointer


def test_views_share_a_buffer_and_names_do_not(backend):
    workspace = Workspace(backend)
    large = workspace.array("a", (4, 8), np.float32)
    small = workspace.array("a", (2, 8), np.float32)
    other = workspace.array("b", (2, 8), np.float32)
    assert address(small) == address(large) != address(other)
    assert workspace.array("a", (2, 8), np.float32) is small
    assert workspace.allocations == 2
    assert workspace.array("a", (5, 8), np.float32).shape == (5, 8)
    assert workspace.allocations == 3
    assert workspace.array("a", (2, 8), np.float32) is not small  # of the new buffer


def test_types_and_sizes(backend):
    workspace = Workspace(backend)
    for shape, dtype in (((3, 5), BFLOAT16), ((0, 5), np.uint32), ((7,), np.uint8)):
        assert workspace.array(str(shape), shape, dtype).shape == shape
    constant = workspace.constant("c", 2, np.arange(2, dtype=np.uint32))
    assert to_numpy(constant).tolist() == [0, 1]
    assert workspace.constant("c", 2, np.zeros(2, np.uint32)) is constant


@pytest.mark.parametrize("pair", FORMATS, ids="-".join)
def test_a_warm_call_allocates_nothing(pair, fast_backend, monkeypatch):
    shared = random_stack(1, *pair, experts=1, moe=64)  # wider: computed apart
    layer = make_layer(random_layer(0, *pair, shared=shared), backend=fast_backend)
    x = to_backend(random_tokens(5, 64, seed=1), layer.backend.name)
    out = to_backend(np.zeros((5, 64), BFLOAT16), layer.backend.name)
    layer(x, out=out)
    expected = to_numpy(out, BFLOAT16).tobytes()
    allocations, buffers = layer.workspace.allocations, dict(layer.workspace._views)
    for module in (arrays, launch.arrays):
        monkeypatch.setattr(module, "empty", lambda *args: pytest.fail("memory was allocated"))
    monkeypatch.setattr("nbmoe.nn.workspace.to_backend", lambda *args: pytest.fail("uploaded"))
    assert layer(x, out=out) is out
    assert to_numpy(out, BFLOAT16).tobytes() == expected
    assert layer.workspace.allocations == allocations
    assert all(layer.workspace._views[key] is view for key, view in buffers.items())


def test_fewer_tokens_use_the_same_memory(fast_backend):
    layer = make_layer(random_layer(0, "mxfp8"), backend=fast_backend)
    x = random_tokens(9, 64, seed=1)
    most = layer(x)
    allocations = layer.workspace.allocations
    assert layer(x[:4]).tobytes() == most[:4].tobytes()
    assert layer(x).tobytes() == most.tobytes()
    assert layer.workspace.allocations == allocations


def test_reserve(fast_backend):
    layer = make_layer(random_layer(0, "bf16"), backend=fast_backend)
    layer.reserve(8)
    allocations = layer.workspace.allocations
    layer(random_tokens(8, 64, seed=1))
    assert layer.workspace.allocations == allocations


def test_results_of_calls_are_apart(fast_backend):
    layer = make_layer(random_layer(0, "bf16"), backend=fast_backend)
    first = layer(random_tokens(3, 64, seed=1))
    before = first.tobytes()
    layer(random_tokens(3, 64, seed=2))
    assert first.tobytes() == before
