"""P1, P2, P8: routing is the reference's, on every backend."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbmoe import ops, reference
from nbmoe.reference import RoutingIndices
from tests.ops.compare import POISONS, assert_same, poisoned
from tests.strategies import ROUTINGS, TOKENS, expert_choice, seeds

NO_ROW = 2**32 - 1


def shapes(slots: int, experts: int) -> Any:
    lengths = (slots, experts + 1, slots, experts, 2, experts)
    types = (np.uint32, np.uint32, np.uint32, np.int32, np.uint32, np.uint32)
    return tuple(((n,), t) for n, t in zip(lengths, types, strict=True))


@given(
    st.sampled_from((*TOKENS, 513, 1024)),
    st.sampled_from((1, 2, 7, 31, 32, 33, 256, 513, 1024)),
    st.integers(1, 8),
    st.sampled_from(ROUTINGS),
    seeds,
)
def test_create_indices_equals_reference(
    kernels: Any, tokens: int, experts: int, top_k: int, kind: str, seed: int
) -> None:
    top_k = min(top_k, experts)
    ids = expert_choice(np.random.default_rng(seed), tokens, top_k, experts, kind)
    expected = reference.moe_create_indices(ids, experts)
    for byte in POISONS:
        out = poisoned(shapes(ids.size, experts), byte)
        got = kernels(ops.moe_create_indices, ids, experts, out=out)
        assert isinstance(got, RoutingIndices)
        assert_same(tuple(got), tuple(expected))
    assert_same(tuple(kernels(ops.moe_create_indices, ids.reshape(-1), experts)), tuple(expected))


def test_worked_example(kernels: Any) -> None:
    """max_semantics.md 3.4's example, worked by hand."""
    got = kernels(ops.moe_create_indices, np.int32([3, 0, 3, 5, 0, 3, 7, 5]), 8)
    assert got.expert_start_indices.tolist() == [0, 2, 2, 2, 5, 5, 7, 7, 8]
    assert got.token_expert_order.tolist() == [1, 4, 0, 2, 5, 3, 7, 6]
    assert got.restore_token_order.tolist() == [2, 0, 3, 5, 1, 4, 7, 6]
    assert got.expert_usage_stats.tolist() == [3, 8]
    assert got.expert_ids.tolist() == list(range(8))


def test_masked_slots(kernels: Any) -> None:
    """Bug case 39: a mask drops a slot and nothing else."""
    got = kernels(ops.moe_create_indices, np.int32([[0, -1], [-1, -1], [3, 1]]), 4)
    assert got.expert_start_indices.tolist() == [0, 1, 2, 2, 3]
    assert got.token_expert_order.tolist() == [0, 5, 4, NO_ROW, NO_ROW, NO_ROW]
    assert got.restore_token_order.tolist() == [0, NO_ROW, NO_ROW, NO_ROW, 2, 1]
    assert got.expert_usage_stats.tolist() == [1, 4]


@pytest.mark.parametrize(
    ("counts", "offsets"), [((100, 200, 100), (0, 1, 1)), ((13, 999), (0, 1)), ((0, 1), (0, 0))]
)
def test_scale_offsets(kernels: Any, counts: tuple[int, ...], offsets: tuple[int, ...]) -> None:
    """max_semantics.md 3.3's examples."""
    ids = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    got = kernels(ops.moe_create_indices, ids, len(counts))
    assert got.scales_offset.tolist() == list(offsets)


@given(st.sampled_from(TOKENS), st.integers(1, 9), st.booleans(), seeds)
def test_route_equals_reference(tokens: int, experts: int, renormalize: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((tokens, experts), dtype=np.float32)
    top_k = int(rng.integers(1, experts + 1))
    expected = reference.route(logits, top_k, renormalize=renormalize)
    for name in ("emulate", "reference", None):
        assert_same(ops.route(logits, top_k, renormalize=renormalize, backend=name), expected)


def test_route_ties_and_nan() -> None:
    logits = np.float32([[1, 2, 2, 1], [np.nan, 0, 0, 0], [5, 5, 5, 5]])
    ids, weights = ops.route(logits, 2, renormalize=True)
    assert ids[0].tolist() == [1, 2] and ids[2].tolist() == [0, 1]
    assert weights[0].tolist() == [0.5, 0.5] and weights[2].tolist() == [0.5, 0.5]
    assert np.isnan(weights[1]).all() and len(set(ids[1].tolist())) == 2
