"""P1, P2, P8: routing is the reference's, on every backend."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbmoe import ops, reference
from nbmoe.errors import RoutingError, ShapeError
from nbmoe.reference import RoutingIndices
from nbmoe_kernels import create_indices
from tests.ops.compare import POISONS, assert_equals_reference, assert_same, poisoned
from tests.strategies import ROUTINGS, TOKENS, VALUES, activations, expert_choice, seeds

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


@given(
    st.sampled_from((1, 17, 129, 257, 521)),
    st.sampled_from((1, 3, 61, 64, 200, 512)),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(0, 1),
    st.sampled_from(ROUTINGS),
    seeds,
)
def test_create_indices_in_many_blocks(
    kernels: Any,
    tokens: int,
    experts: int,
    top_k: int,
    groups_per_warp: int,
    idle_blocks: int,
    kind: str,
    seed: int,
) -> None:
    """The number of blocks, and of slots of each, does not show in the result."""
    top_k = min(top_k, experts)
    ids = expert_choice(np.random.default_rng(seed), tokens, top_k, experts, kind)
    blocks = -(-ids.size // (512 * groups_per_warp)) + idle_blocks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(create_indices, "index_grid", lambda _: (blocks, groups_per_warp))
        out = poisoned(shapes(ids.size, experts), POISONS[0])
        got = kernels(ops.moe_create_indices, ids, experts, out=out)
    assert_same(tuple(got), tuple(reference.moe_create_indices(ids, experts)))


@given(st.integers(0, 2**22))
def test_grid_of_create_indices(slots: int) -> None:
    """All slots have a place, no block is idle, and there are as few as `MAX_BLOCKS`."""
    blocks, groups_per_warp = create_indices.index_grid(slots)
    assert 1 <= blocks <= create_indices.MAX_BLOCKS
    assert blocks * groups_per_warp * 512 >= slots
    assert slots == 0 or (blocks - 1) * groups_per_warp * 512 < slots
    assert (blocks == 1) == (slots <= create_indices.ONE_BLOCK_SLOTS)


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


@given(
    st.sampled_from(TOKENS),
    st.integers(1, 4),
    st.sampled_from((8, 48, 176, 1032)),
    st.sampled_from(VALUES),
    st.booleans(),
    seeds,
)
def test_gather_rows_equals_reference(
    kernels: Any, tokens: int, divisor: int, columns: int, kind: str, weighted: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = activations(rng, tokens, columns, kind)
    order = rng.permutation(tokens * divisor).astype(np.uint32)
    order[rng.random(order.size) < 0.1] = NO_ROW
    factors = rng.standard_normal((tokens, divisor)).astype(np.float32) if weighted else None
    shapes = (((order.size, columns), ml_dtypes.bfloat16),)
    assert_equals_reference(
        kernels, ops.gather_rows, shapes, rows, order, divisor=divisor, weights=factors
    )


def test_gather_refuses_rows_beyond_the_input() -> None:
    rows = np.zeros((2, 8), ml_dtypes.bfloat16)
    with pytest.raises(RoutingError, match=r"^gather_rows\(\): order: .*order\[1\] = 4"):
        ops.gather_rows(rows, np.uint32([NO_ROW, 4]), divisor=2)
    with pytest.raises(ShapeError, match=r"weights: expected \(R, divisor\)"):
        ops.gather_rows(rows, np.uint32([1]), divisor=2, weights=np.ones((2, 1), np.float32))
