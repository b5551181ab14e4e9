"""P1, P3, P8: the operations in a row make a layer, equal to the same row of references."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nbmoe import layouts, ops
from tests.ops.compare import assert_same
from tests.strategies import (
    ROUTINGS,
    TOKENS,
    VALUES,
    WIDTHS,
    activations,
    codes,
    expert_choice,
    scale_bytes,
    seeds,
)

Caller = Callable[..., Any]


@dataclass(frozen=True)
class Layer:
    """Random weights of E experts and their factors."""

    gate_up: NDArray[np.uint8]
    gate_up_scales: NDArray[np.uint8]
    down: NDArray[np.uint8]
    down_scales: NDArray[np.uint8]
    factors: NDArray[np.float32]
    inverse_inputs: NDArray[np.float32]


def make_layer(rng: np.random.Generator, experts: int, hidden: int, moe_dim: int) -> Layer:
    def weights(n: int, k: int) -> tuple[Any, Any]:
        scales = layouts.interleave_scales(scale_bytes(rng, (experts, n, k // 16)))
        return codes(rng, (experts, n, k // 2)), scales

    gate_up, gate_up_scales = weights(2 * moe_dim, hidden)
    down, down_scales = weights(hidden, moe_dim)
    return Layer(
        *(gate_up, gate_up_scales, down, down_scales),
        factors=rng.uniform(0.001, 0.01, experts).astype(np.float32),
        inverse_inputs=rng.uniform(1, 50, experts).astype(np.float32),
    )


def apply(call: Caller, layer: Layer, x: Any, ids: Any, weights: Any) -> Any:
    """Experts and combine for given choices, every operation through `call`."""
    experts, top_k = len(layer.factors), ids.shape[1]
    r = call(ops.moe_create_indices, ids, experts)
    slots = (r.expert_start_indices, r.scales_offset, r.expert_ids)
    a, a_scales = call(
        *(ops.grouped_quantize_dynamic_block_scaled, x, *slots, layer.inverse_inputs),
        indices=r.token_expert_order,
        indices_divisor=top_k,
    )
    c, c_scales = call(
        *(ops.grouped_matmul_blocked_swiglu, a, layer.gate_up, a_scales, layer.gate_up_scales),
        *slots,
        expert_scales=layer.factors,
        c_input_scales=layer.inverse_inputs,
    )
    product = (c, layer.down, c_scales, layer.down_scales)
    y = call(ops.grouped_matmul_block_scaled, *product, *slots, layer.factors)
    return call(ops.moe_finalize, y, r.restore_token_order, weights)


def by_reference(op: Caller, *args: Any, **kwargs: Any) -> Any:
    return op(*args, backend="reference", **kwargs)


@given(
    *(st.sampled_from(TOKENS), st.integers(1, 5), st.integers(1, 3)),
    *(st.sampled_from(WIDTHS), st.sampled_from(WIDTHS)),
    *(st.sampled_from(ROUTINGS), st.sampled_from(VALUES), seeds),
)
@example(129, 4, 2, 176, 48, "one expert", "gauss", 0)
@example(0, 2, 1, 48, 16, "uniform", "gauss", 0)
def test_equals_reference(
    kernels: Any,
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    moe_dim: int,
    routing: str,
    kind: str,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    top_k = min(top_k, experts)
    layer = make_layer(rng, experts, hidden, moe_dim)
    x = activations(rng, tokens, hidden, kind)
    ids = expert_choice(rng, tokens, top_k, experts, routing)
    weights = rng.uniform(0, 1, ids.shape).astype(np.float32)
    got = apply(kernels, layer, x, ids, weights)
    assert_same(got, apply(by_reference, layer, x, ids, weights))


@pytest.mark.parametrize("neighbour", ["finite", "nan"])
def test_tokens_are_independent(kernels: Any, neighbour: str) -> None:
    """P3: a token alone gives the bytes that it gives in a batch, whatever is beside it."""
    rng = np.random.default_rng(1)
    layer = make_layer(rng, 3, 80, 48)
    x = activations(rng, 20, 80, "gauss")
    ids = expert_choice(rng, 20, 2, 3, "uniform")
    weights = rng.uniform(0, 1, ids.shape).astype(np.float32)
    if neighbour == "nan":
        x[3] = np.nan
        weights[3] = np.nan
    batch = apply(kernels, layer, x, ids, weights)
    assert np.isnan(batch.view(np.uint16).view(ml_dtypes.bfloat16)[3].astype(np.float32)).all() == (
        neighbour == "nan"
    )
    for t in (0, 2, 3, 4, 19):
        one = slice(t, t + 1)
        alone = apply(kernels, layer, x[one], ids[one], weights[one])
        assert_same(alone[0], batch[t], f"token {t}")


def test_order_of_tokens_does_not_matter(kernels: Any) -> None:
    """Permuting tokens permutes outputs."""
    rng = np.random.default_rng(2)
    layer = make_layer(rng, 4, 48, 64)
    x = activations(rng, 33, 48, "heavy")
    ids = expert_choice(rng, 33, 2, 4, "zipf")
    weights = rng.uniform(0, 1, ids.shape).astype(np.float32)
    order = rng.permutation(33)
    straight = apply(kernels, layer, x, ids, weights)
    mixed = apply(kernels, layer, x[order], ids[order], weights[order])
    assert_same(mixed, straight[order])


def test_numbering_of_experts_does_not_matter(kernels: Any) -> None:
    """Relabelling experts changes nothing."""
    rng = np.random.default_rng(3)
    layer = make_layer(rng, 4, 48, 64)
    x = activations(rng, 17, 48, "gauss")
    ids = expert_choice(rng, 17, 2, 4, "masked")
    weights = rng.uniform(0, 1, ids.shape).astype(np.float32)
    order = rng.permutation(4)
    renamed = Layer(*(getattr(layer, f)[order] for f in Layer.__dataclass_fields__))
    new_name = np.append(np.argsort(order), -1).astype(np.int32)
    assert_same(
        apply(kernels, renamed, x, new_name[ids], weights), apply(kernels, layer, x, ids, weights)
    )
