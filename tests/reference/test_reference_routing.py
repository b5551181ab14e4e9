"""P2, P8: routing is stable, complete and right for empty, masked and extreme cases."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbmoe import reference
from nbmoe.errors import RoutingError

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


def test_gather_rows():
    rows = np.arange(12, dtype=np.float32).reshape(3, 4).astype(ml_dtypes.bfloat16)
    order = np.uint32([5, NO_ROW, 0, 2])
    got = reference.gather_rows(rows, order, divisor=2)
    assert got.astype(int).tolist() == [[8, 9, 10, 11], [0] * 4, [0, 1, 2, 3], [4, 5, 6, 7]]
    weights = np.float32([[2, 0], [0.5, 0], [0, 100]])
    got = reference.gather_rows(rows, order, divisor=2, weights=weights).astype(float)
    assert got.tolist() == [[800, 900, 1000, 1104], [0] * 4, [0, 2, 4, 6], [2, 2.5, 3, 3.5]]
