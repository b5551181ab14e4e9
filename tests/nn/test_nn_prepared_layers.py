"""P1, P12: prepared weights and tokens change no byte of a layer, whatever else it does."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from nbmoe import ops
from nbmoe.backend import Backend
from nbmoe.checkpoints.router import Router
from nbmoe.errors import ArgTypeError, DeviceError, UnsupportedError
from nbmoe.nn import (
    GateUpFormat,
    MoE,
    MoEQuantized,
    block_experts,
    preparation,
    random_tokens,
)
from nbmoe.nn.comparison import compare_with_float64
from nbmoe.validate.product_prepared import reads_prepared
from tests.nn.test_nn_formats import chained_config, same_bytes
from tests.nn.test_nn_stacked_moe import build, small_layer
from tests.nn.weights import FORMATS, random_layer, random_stack

PREPARED = [pair for pair in FORMATS if not pair[0].startswith("fp8")]
TOKENS = 3
"""So few that the matmuls run with their narrowest tiles: each shape is a kernel to compile."""


def make(weights: Any, backend: str, **options: Any) -> Any:
    return (MoE if weights.format == "bf16" else MoEQuantized)(weights, backend=backend, **options)


def path(weights: Any, backend: str, fused: tuple[str, ...] = ("nvfp4",)) -> dict[str, Any]:
    """The chained path where another fused kernel would have to be compiled for the host.

    Fused kernels of all formats have tests of their own, and a GPU runs them here.
    """
    is_block_scaled = weights.activation_format in ("nvfp4", "mxfp4", "mxfp8")
    is_chained = is_block_scaled and weights.activation_format not in fused
    is_chained = is_chained and backend in ("emulate", "cudasim")
    return {"quant_config": chained_config(weights)} if is_chained else {}


def expected(weights: Any, x: Any) -> bytes:
    """What the specification says, from the documented layouts."""
    output: bytes = make(weights, "reference", prepared=False)(x).tobytes()
    return output


@pytest.mark.parametrize("pair", PREPARED, ids="-".join)
def test_bytes_do_not_depend_on_it(pair: tuple[str, str], backend: str) -> None:
    shared = random_stack(8, *pair, experts=1, moe=64, biased=True)
    weights = random_layer(1, *pair, biased=True, shared=shared)
    x = random_tokens(TOKENS, 64, seed=2)
    layer = make(weights, backend, prepared=True, **path(weights, backend))
    assert layer(x).tobytes() == expected(weights, x)


def test_two_kernels_for_many_rows_give_the_fused_bytes(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = random_layer(2, "nvfp4", "nvfp4", biased=True)
    x = random_tokens(TOKENS, 64, seed=3)
    layer = make(weights, backend, prepared=True)
    calls: list[tuple[int, int]] = []

    def never(num_active: int, total_rows: int) -> bool:
        calls.append((num_active, total_rows))
        return False

    monkeypatch.setattr(block_experts, "fusing_pays", never)
    assert layer(x).tobytes() == expected(weights, x)
    assert calls == [(layer.experts.num_experts, TOKENS * weights.router.top_k)]


@pytest.mark.parametrize("pair", [("nvfp4", ""), ("mxfp8", "")], ids="-".join)
def test_one_launch_for_all_of_it_gives_the_same_bytes(
    pair: tuple[str, str], fast_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again with the same counters, for none and for more tokens than before.

    Shared experts are a slot, or a second user of the layer's buffers.
    """
    if pair[0] != "nvfp4" and fast_backend in ("emulate", "cudasim"):
        pytest.skip("the emulator compiles one format's kernel; tests/kernels has the others")
    asked: list[Any] = []

    def always(*problem: Any) -> bool:
        asked.append(problem)
        return True

    monkeypatch.setattr(block_experts, "mega_ffn_pays", always)
    shared = random_stack(8, *pair, experts=1, moe=32, biased=True)
    weights = random_layer(11, *pair, biased=True, shared=shared)
    for shared_slot in (True, False):
        how = {"fused_shared_expert": shared_slot}
        layer = make(weights, fast_backend, prepared=True, **how)
        specified = make(weights, "reference", prepared=False, **how)
        for tokens in (2, 0, 5, 2):
            x = random_tokens(tokens, 64, seed=tokens)
            assert layer(x).tobytes() == specified(x).tobytes()
        rows = 5 * (weights.router.top_k + shared_slot)
        assert (pair[0], pair[0], 32, layer.experts.num_experts, rows) in asked
        # Traces show what lies between: they take the kernels apart.
        assert layer.trace(x).output.tobytes() == specified(x).tobytes()


def test_calls_leave_the_counters_at_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_experts, "mega_ffn_pays", lambda *problem: True)
    layer = make(random_layer(2, "nvfp4", "nvfp4"), "emulate", prepared=True)
    layer(random_tokens(TOKENS, 64, seed=3))
    buffers = layer.workspace.allocations
    experts = layer.experts.num_experts
    size = ops.mega_ffn_arrival_count_size(TOKENS * layer.top_k, experts)
    counters = layer.workspace.array("mega_ffn_counters", (size,), np.uint32)
    assert layer.workspace.allocations == buffers, "they are the layer's own"
    assert not np.asarray(counters).any()


@pytest.mark.parametrize("pair", [("nvfp4", ""), ("mxfp4", "mxfp8")], ids="-".join)
def test_a_trace_shows_the_documented_layouts(pair: tuple[str, str], fast_backend: str) -> None:
    """Of shared experts too."""
    shared = random_stack(8, *pair, experts=1, moe=64, biased=True)
    weights = random_layer(3, *pair, biased=True, shared=shared)
    x = random_tokens(TOKENS, 64, seed=4)
    options = path(weights, fast_backend, fused=())
    found = make(weights, fast_backend, prepared=True, **options).trace(x)
    wanted = make(weights, "reference", prepared=False, **options).trace(x)
    for name, part in wanted.shared_parts.items():
        own = found.shared_parts[name]
        assert (own is None) == (part is None), name
        assert part is None or own.tobytes() == part.tobytes(), name
    same_bytes(*(dataclasses.replace(t, shared_parts=None) for t in (found, wanted)))


def test_chained_and_weighted_first(fast_backend: str) -> None:
    weights = random_layer(5, "nvfp4", "", biased=True)
    weights = dataclasses.replace(weights, apply_router_weight_first=True)
    x = random_tokens(TOKENS, 64, seed=6)
    for config in (None, chained_config(weights)):
        layer = make(weights, fast_backend, prepared=True, quant_config=config)
        assert layer(x).tobytes() == expected(weights, x)


def test_all_tokens_on_one_expert_and_none(fast_backend: str) -> None:
    weights = random_layer(7, "mxfp4", "")
    gate = weights.router.weight.copy() * 0
    gate[2, 0] = 100
    weights = dataclasses.replace(weights, router=Router(weight=gate, top_k=1))
    x = random_tokens(TOKENS, 64, seed=8)
    x[:, 0] = 1
    layer = make(weights, fast_backend, prepared=True, **path(weights, fast_backend))
    assert layer(x).tobytes() == expected(weights, x)
    assert layer(x[:0]).shape == (0, 64)


@pytest.mark.parametrize("pair", [("nvfp4", ""), ("mxfp4", "bf16")], ids="-".join)
def test_a_second_call_allocates_nothing(pair: tuple[str, str], fast_backend: str) -> None:
    layer = make(random_layer(9, *pair), fast_backend, prepared=True)
    x = random_tokens(TOKENS, 64, seed=10)
    first = layer(x)
    before = layer.workspace.allocations
    assert layer(x).tobytes() == first.tobytes()
    layer(x[:1])
    assert layer.workspace.allocations == before


@pytest.mark.parametrize("pair", [("bf16", ""), ("mxfp4", "mxfp8")], ids="-".join)
def test_stacked_layers(pair: tuple[str, str], fast_backend: str) -> None:
    weights = small_layer(pair)
    x = random_tokens(TOKENS, 64, seed=15)
    options = path(weights, fast_backend)
    layer = build(weights, fast_backend, GateUpFormat.INTERLEAVED, prepared=True, **options)
    assert layer(x).tobytes() == expected(weights, x)


@pytest.mark.parametrize("fmt", preparation.FP8_FORMATS)
def test_fp8_is_multiplied_as_e4m3(fmt: str, fast_backend: str) -> None:
    """Other sums than those of the documented layouts, the same on every backend."""
    if fmt == "fp8_block" and fast_backend == "emulate":
        pytest.skip("its kernel takes long to compile, and has tests of its own")
    moe = 128 if fmt == "fp8_block" else 32
    weights = random_layer(11, fmt, "", biased=True, moe=moe)
    x = random_tokens(TOKENS, 64, seed=16)
    layer = make(weights, fast_backend, prepared=True)
    reference = make(weights, "reference", prepared=True)
    assert layer(x).tobytes() == reference(x).tobytes()
    trace = layer.trace(x)
    same_bytes(trace, reference.trace(x))
    assert trace.output.tobytes() == layer(x).tobytes()
    assert compare_with_float64(weights, x, trace).arithmetic < 6e-3


@pytest.mark.parametrize("value", [1, "yes", 0.0])
def test_not_a_bool(value: Any) -> None:
    with pytest.raises(ArgTypeError, match="prepared: expected a bool or None, got"):
        make(random_layer(12, "nvfp4", ""), "reference", prepared=value)


def choice(
    monkeypatch: pytest.MonkeyPatch, prepared: bool | None, *, hopper: bool, **stack_options: Any
) -> bool:
    """What a layer of few experts on a GPU does."""
    monkeypatch.setattr(preparation, "_current_gpu", lambda: 0)
    monkeypatch.setattr(preparation, "reads_prepared", lambda ordinal: hopper)
    stack = random_stack(13, **{"fmt": "nvfp4", **stack_options})
    gpu = Backend("gpu", "a test")
    return preparation.preparer("MoEQuantized", prepared, stack, gpu) is not None


def test_none_prepares_where_the_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice(monkeypatch, None, hopper=True)
    assert choice(monkeypatch, True, hopper=True)
    assert not choice(monkeypatch, None, hopper=False)
    assert not choice(monkeypatch, False, hopper=True)
    with pytest.raises(DeviceError, match=r"prepared: .* compute capability 9\.0"):
        choice(monkeypatch, True, hopper=False)


def test_none_changes_no_byte_of_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not choice(monkeypatch, None, hopper=True, fmt="fp8_row")
    assert choice(monkeypatch, True, hopper=True, fmt="fp8_row")


def test_too_many_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {"experts": 1025, "hidden": 16, "moe": 16}
    assert not choice(monkeypatch, None, hopper=True, **many)
    with pytest.raises(UnsupportedError, match=r"prepared: .* 1025 experts, more than 1024"):
        choice(monkeypatch, True, hopper=True, **many)


def test_none_prepares_on_a_hopper_gpu_alone(fast_backend: str) -> None:
    layer = make(random_layer(14, "nvfp4", ""), fast_backend)
    assert bool(layer.experts.prepared) == (fast_backend == "gpu" and reads_prepared())
