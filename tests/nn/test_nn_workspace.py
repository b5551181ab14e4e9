"""P12: after the first call with a number of tokens, a call allocates nothing."""

import dataclasses
import gc
import weakref

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


def counted(calls):
    """Rows [0, 10], [1, 11], ... of a table; notes each time that it is made."""

    def make(count):
        calls.append(count)
        return np.arange(count, dtype=np.uint32)[:, np.newaxis] + np.array([0, 10], np.uint32)

    return make


def test_tables_are_made_once_and_sliced(backend):
    workspace, calls = Workspace(backend), []
    make = counted(calls)
    first = workspace.constant_rows("table", 3, make)
    assert to_numpy(first).tolist() == [[0, 10], [1, 11], [2, 12]]
    assert workspace.constant_rows("table", 3, make) is first
    for index in (0, 2):
        assert to_numpy(workspace.constant_row("table", index, make)).tolist() == [
            index,
            index + 10,
        ]
    assert workspace.constant_rows("table", 2, make).shape == (2, 2)
    assert calls == [3] and workspace.allocations == 1
    assert to_numpy(workspace.constant_row("table", 3, make)).tolist() == [3, 13]
    assert calls == [3, 6] and workspace.allocations == 2
    assert workspace.constant_rows("nothing", 0, make).shape == (0, 2)
    assert workspace.allocations == 2


def kept(array):
    """A weak reference to the memory behind a view of the host.

    Device arrays do not show who owns their memory; `test_nn_gpu` replays graphs over it instead.
    """
    if hasattr(array, "gpu_data"):
        pytest.skip("device arrays do not show who owns their memory")
    owner = array
    while getattr(owner, "base", None) is not None:
        owner = owner.base
    return weakref.ref(owner)


def test_memory_that_was_handed_out_stays(backend):
    """A captured graph has addresses only: nothing of a smaller size may be freed or moved."""
    workspace = Workspace(backend)
    make = counted([])
    views = [
        workspace.array("a", (4, 8), np.float32),
        workspace.constant_row("b", 4, make),
        workspace.constant_rows("c", 4, make),
    ]
    memory, places = [kept(view) for view in views], [address(view) for view in views]
    del views
    for size in (5, 90, 3000):  # more views than are kept, too
        for rows in range(size, size + 400):
            workspace.array("a", (rows, 8), np.float32)
            workspace.constant_row("b", rows, make)
            workspace.constant_rows("c", rows, make)
    gc.collect()
    assert all(owner() is not None for owner in memory)
    new = (workspace.array("a", (4, 8), np.float32), workspace.constant_rows("c", 4, make))
    assert address(new[0]) != places[0] and address(new[1]) != places[2]


def test_what_is_kept_is_bounded(backend):
    workspace = Workspace(backend)
    make = counted([])
    for rows in range(1, 301):
        workspace.array("a", (rows, 16), np.uint8)
        workspace.constant_rows("b", rows, make)
    most = 300 * 16 + 300 * 8
    assert most <= workspace.nbytes < 4 * most
    assert workspace.allocations <= 2 * 10
    reserved = Workspace(backend)
    reserved.array("a", (300, 16), np.uint8)
    assert reserved.nbytes == 300 * 16


@pytest.mark.parametrize("pair", FORMATS, ids="-".join)
def test_a_warm_call_allocates_nothing(pair, fast_backend, monkeypatch):
    shared = random_stack(1, *pair, experts=1, moe=64)  # wider: computed apart
    layer = make_layer(random_layer(0, *pair, shared=shared), backend=fast_backend)
    x = to_backend(random_tokens(5, 64, seed=1), layer.backend.name)
    out = to_backend(np.zeros((5, 64), BFLOAT16), layer.backend.name)
    layer(x, out=out)
    expected = to_numpy(out, BFLOAT16).tobytes()
    allocations, buffers = layer.workspace.allocations, dict(layer.workspace._views)
    forbid_memory(monkeypatch)
    assert layer(x, out=out) is out
    assert to_numpy(out, BFLOAT16).tobytes() == expected
    assert layer.workspace.allocations == allocations
    assert all(layer.workspace._views[key] is view for key, view in buffers.items())


def weights_of(pair, weight_first):
    """A layer with its shared experts apart, since they are wider."""
    weights = random_layer(0, *pair, shared=random_stack(1, *pair, experts=1, moe=64))
    return dataclasses.replace(weights, apply_router_weight_first=weight_first)


LAYERS = [
    random_layer(0, "mxfp8"),
    weights_of(("bf16", ""), False),
    weights_of(("mxfp8", ""), True),
    weights_of(("fp8_block", ""), True),
]


def forbid_memory(monkeypatch):
    """Fails on allocations and uploads, but for those of size 0, which are neither."""

    def upload(array, backend):
        assert array.size == 0, "uploaded"
        return to_backend(array, backend)

    for module in (arrays, launch.arrays):
        monkeypatch.setattr(module, "empty", lambda *args: pytest.fail("memory was allocated"))
    monkeypatch.setattr("nbmoe.nn.workspace.to_backend", upload)


@pytest.mark.parametrize("weights", LAYERS)
def test_fewer_tokens_use_the_same_memory(weights, fast_backend):
    layer = make_layer(weights, backend=fast_backend)
    x = random_tokens(9, 64, seed=1)
    most = layer(x)
    allocations = layer.workspace.allocations
    assert layer(x[:4]).tobytes() == most[:4].tobytes()
    assert layer(x).tobytes() == most.tobytes()
    assert layer.workspace.allocations == allocations


@pytest.mark.parametrize("weights", LAYERS)
def test_reserve(weights, fast_backend, monkeypatch):
    layer = make_layer(weights, backend=fast_backend)
    layer.reserve(8)
    allocations = layer.workspace.allocations
    x = random_tokens(8, 64, seed=1)
    expected = make_layer(weights, backend="reference")(x).tobytes()
    inputs = [to_backend(x[:tokens], fast_backend) for tokens in range(9)]
    forbid_memory(monkeypatch)
    for given in inputs:
        out = to_backend(np.ones(given.shape, BFLOAT16), fast_backend)
        layer(given, out=out)
        assert to_numpy(out, BFLOAT16).tobytes() == expected[: 128 * len(given)]
    assert layer.workspace.allocations == allocations


def test_a_larger_call_leaves_the_memory_of_a_smaller_one(fast_backend):
    """What a graph of the smaller call holds: every buffer and constant, at its address."""
    layer = make_layer(LAYERS[2], backend=fast_backend)
    layer(random_tokens(8, 64, seed=1))
    workspace = layer.workspace
    views = [*workspace._views.values(), *workspace._rows.values()]
    memory = [kept(view) for view in views]
    assert len(memory) > 10
    del views
    layer(random_tokens(40, 64, seed=2))
    gc.collect()
    assert all(owner() is not None for owner in memory)


def test_results_of_calls_are_apart(fast_backend):
    layer = make_layer(random_layer(0, "bf16"), backend=fast_backend)
    first = layer(random_tokens(3, 64, seed=1))
    before = first.tobytes()
    layer(random_tokens(3, 64, seed=2))
    assert first.tobytes() == before
