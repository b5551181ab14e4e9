"""Routing in one launch has the bytes of its two parts, on every backend."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbmoe import ops, reference
from nbmoe.arrays import to_numpy
from nbmoe.errors import RangeError, ShapeError
from nbmoe.ops.route_indices import route_with_indices
from nbmoe.reference import RoutingIndices
from nbmoe.reference.router import SCORINGS
from nbmoe_kernels import route_grouped
from tests.ops.compare import POISONS, assert_same, poisoned
from tests.ops.test_op_router import draw
from tests.ops.test_op_routing import shapes as index_shapes
from tests.strategies import seeds


def expected(logits: Any, top_k: int, **options: Any) -> tuple[Any, ...]:
    ids, weights = reference.route(logits, top_k, **options)
    experts = logits.shape[1] // options.get("num_parts", 1) + options.get("shared_slot", False)
    return ids, weights, *reference.moe_create_indices(ids, experts)


def got(kernels: Any, logits: Any, top_k: int, **options: Any) -> tuple[Any, ...]:
    arrays = {k: kernels.put(v) for k, v in options.items()}
    ids, weights, indices = route_with_indices(
        kernels.put(logits), top_k, **arrays, backend=kernels.name
    )
    assert isinstance(indices, RoutingIndices)
    return tuple(map(to_numpy, (ids, weights, *indices)))


@given(
    st.sampled_from(SCORINGS),
    st.sampled_from((0, 1, 2, 15, 16, 17, 31, 64, 67)),
    st.sampled_from((1, 2, 7, 31, 64, 128)),
    st.integers(1, 8),
    st.booleans(),
    seeds,
)
def test_equals_both_references(
    kernels: Any,
    scoring: str,
    tokens: int,
    experts: int,
    top_k: int,
    shared_slot: bool,
    seed: int,
) -> None:
    top_k = min(top_k, experts)
    rng = np.random.default_rng(seed)
    options: dict[str, Any] = {"scoring": scoring, "shared_slot": shared_slot}
    if shared_slot:
        options |= {"num_parts": 2, "bias": rng.standard_normal(experts).astype(np.float32)}
    if scoring == "sigmoid" and experts >= 64 and top_k <= 2 * experts // 8:
        correction = rng.standard_normal(experts).astype(np.float32)
        options |= {"n_groups": 8, "topk_group": 2, "correction_bias": correction}
    logits = draw(seed, tokens, experts * options.get("num_parts", 1))
    wanted = expected(logits, top_k, **options)
    assert_same(got(kernels, logits, top_k, **options), wanted)
    width = top_k + shared_slot
    shapes = ((wanted[0].shape, np.int32), (wanted[1].shape, np.float32))
    out = poisoned(
        (*shapes, *index_shapes(tokens * width, experts + shared_slot)), POISONS[seed % 2]
    )
    assert_same(got(kernels, logits, top_k, out=out, **options), wanted)


def test_skewed_and_wide(kernels: Any) -> None:
    """All tokens go to the same experts; as many experts as one block has room for."""
    logits = np.tile(draw(3, 1, 511, 0), (40, 1))
    wanted = expected(logits, 8, shared_slot=True)
    assert_same(got(kernels, logits, 8, shared_slot=True), wanted)


@pytest.mark.parametrize(
    ("tokens", "width", "experts", "fits"),
    [(16, 8, 128, True), (17, 8, 128, False), (1, 1, 512, True), (1, 1, 513, False)],
)
def test_what_one_block_does(tokens: int, width: int, experts: int, fits: bool) -> None:
    assert route_grouped.fits(tokens, width, experts) == fits


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for few tokens, two for many; none routes no tokens."""
    from nbmoe import backend

    launched: list[str] = []
    monkeypatch.setattr(backend, "executor", lambda *_, **__: lambda k, *_: launched.append(k.name))
    for tokens in (0, 4, 65):
        route_with_indices(np.zeros((tokens, 8), np.float32), 2, backend="emulate")
    names = ["moe_create_indices_64", "route_logits_grouped_128"]
    assert launched == [*names, "route_logits_128", "moe_create_indices_64"]


def test_errors_are_those_of_the_parts() -> None:
    logits = np.zeros((3, 8), np.float32)
    with pytest.raises(RangeError, match=r"^route_with_indices\(\): top_k: "):
        route_with_indices(logits, 9)
    ids, weights = ops.route(logits, 2, backend="reference")
    indices = ops.moe_create_indices(ids, 8, backend="reference")
    with pytest.raises(ShapeError, match=r"^route_with_indices\(\): out\.topk_ids: "):
        route_with_indices(logits, 3, out=(ids, weights, *indices), backend="reference")
    result = route_with_indices(logits, 2, out=(ids, weights, *indices), backend="reference")
    assert result[0] is ids and result[2].expert_ids is indices.expert_ids
