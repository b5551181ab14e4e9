"""P2, P8: routing is stable, complete and right for empty, masked and extreme cases."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbmoe import reference
from nbmoe.errors import RangeError, RoutingError

NO_ROW = 0xFFFFFFFF


def slow_indices(ids, experts):
    """Lists of sources per expert, filled in order."""
    rows = [[i for i, owner in enumerate(ids) if owner == e] for e in range(experts)]
    order = [i for group in rows for i in group]
    restore = [order.index(i) if i in order else NO_ROW for i in range(len(ids))]
    start = [sum(map(len, rows[:e])) for e in range(experts + 1)]
    tiles = [sum(-(-len(group) // 128) for group in rows[:e]) for e in range(experts)]
    offsets = [tile - first // 128 for tile, first in zip(tiles, start, strict=False)]
    order += [NO_ROW] * (len(ids) - len(order))
    return order, start, restore, offsets, max([0, *map(len, rows)])


def check(ids, experts):
    got = reference.moe_create_indices(np.array(ids, np.int32), experts)
    order, start, restore, offsets, most = slow_indices(np.ravel(ids).tolist(), experts)
    assert got.token_expert_order.tolist() == order
    assert got.expert_start_indices.tolist() == start
    assert got.restore_token_order.tolist() == restore
    assert got.expert_ids.tolist() == list(range(experts))
    assert got.expert_usage_stats.tolist() == [most, experts]
    assert got.scales_offset.tolist() == offsets
    unsigned = [*got[:3], *got[4:]]
    assert all(array.dtype == np.uint32 for array in unsigned)
    assert got.expert_ids.dtype == np.int32
    return got


def test_worked_example():
    got = check([3, 0, 3, 5, 0, 3, 7, 5], 8)
    assert got.expert_start_indices.tolist() == [0, 2, 2, 2, 5, 5, 7, 7, 8]
    assert got.expert_usage_stats.tolist() == [3, 8]
    assert got.token_expert_order.tolist() == [1, 4, 0, 2, 5, 3, 7, 6]


@given(st.integers(1, 9).flatmap(lambda e: st.tuples(st.lists(st.integers(-1, e - 1)), st.just(e))))
@settings(deadline=None)
def test_any_routing(case):
    check(*case)


@pytest.mark.parametrize(
    ("ids", "experts"),
    [
        ([], 3),
        ([-1, -1], 2),
        ([0] * 300, 1),
        ([2] * 129, 4),
        ([[2, 2], [2, 2]], 3),
        ([[0, -1], [-1, -1], [3, 1]], 4),
        (list(range(256)) * 2, 256),
    ],
)
def test_extreme_routings(ids, experts):
    check(ids, experts)


def test_two_axes_are_token_major():
    flat = reference.moe_create_indices(np.array([1, 0, 0, 2], np.int32), 3)
    shaped = reference.moe_create_indices(np.array([[1, 0], [0, 2]], np.int32), 3)
    for one, other in zip(flat, shaped, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("bad", [4, -2, 1000])
def test_ids_out_of_range(bad):
    with pytest.raises(RoutingError, match=rf"topk_ids: expected -1 or 0\.\.3, got {bad}"):
        reference.moe_create_indices(np.array([0, bad], np.int32), 4)


def test_route_is_a_softmax():
    logits = np.random.default_rng(0).standard_normal((50, 16)).astype(np.float32) * 4
    ids, weights = reference.route(logits, 4, renormalize=False)
    assert ids.dtype == np.int32
    assert weights.dtype == np.float32
    softmax = np.exp(logits.astype(float))
    softmax /= softmax.sum(axis=1, keepdims=True)
    for token in range(50):
        best = sorted(range(16), key=lambda e, p=softmax[token]: -p[e])[:4]
        assert ids[token].tolist() == best
        np.testing.assert_allclose(weights[token], softmax[token, best], rtol=1e-6)
    _, normal = reference.route(logits, 4, renormalize=True)
    np.testing.assert_allclose(normal.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(normal, weights / weights.sum(axis=1, keepdims=True), rtol=1e-6)


def test_route_to_one_expert():
    logits = np.array([[0, 3, 1], [5, 3, 1]], np.float32)
    ids, weights = reference.route(logits, 1, renormalize=True)
    assert ids.tolist() == [[1], [0]]
    assert weights.tolist() == [[1], [1]]


def test_route_ties_go_to_the_lower_id():
    logits = np.array([[1, 2, 2, 0, 2]], np.float32)
    assert reference.route(logits, 3, renormalize=True)[0].tolist() == [[1, 2, 4]]
    assert reference.route(np.zeros((1, 6), np.float32), 6, renormalize=True)[0].tolist() == [
        list(range(6))
    ]


def test_route_of_large_and_infinite_logits():
    logits = np.array([[3e38, 0, -3e38], [0, -np.inf, -np.inf]], np.float32)
    ids, weights = reference.route(logits, 2, renormalize=True)
    assert ids.tolist() == [[0, 1], [0, 1]]
    assert weights.tolist() == [[1, 0], [1, 0]]


def test_a_nan_logit_stays_in_its_token():
    logits = np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32)
    ids, weights = reference.route(logits, 2, renormalize=True)
    logits[1, 3] = np.nan
    nan_ids, nan_weights = reference.route(logits, 2, renormalize=True)
    np.testing.assert_array_equal(nan_ids[[0, 2]], ids[[0, 2]])
    np.testing.assert_array_equal(nan_weights[[0, 2]], weights[[0, 2]])
    assert nan_ids[1].tolist() == [0, 1]
    assert np.isnan(nan_weights[1]).all()


def test_route_of_no_tokens():
    ids, weights = reference.route(np.zeros((0, 4), np.float32), 2, renormalize=True)
    assert ids.shape == weights.shape == (0, 2)


@pytest.mark.parametrize("top_k", [0, 5, -1])
def test_top_k_out_of_range(top_k):
    with pytest.raises(RangeError, match=rf"top_k: expected 1\.\.4, got {top_k}"):
        reference.route(np.zeros((1, 4), np.float32), top_k, renormalize=True)
