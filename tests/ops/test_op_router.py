"""P1, P3, P7: the router is the reference's on every backend; P10: its bad input."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbmoe import ops
from nbmoe.errors import (
    ArgTypeError,
    ConfigError,
    RangeError,
    ShapeError,
    UnsupportedError,
)
from nbmoe.reference.router import SCORINGS
from nbmoe_kernels import router_logits
from tests.ops.compare import assert_equals_reference, assert_same
from tests.strategies import VALUES, activations, seeds

SPECIALS = np.float32([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, -100, 1e-45, 1])


def draw(seed: int, tokens: int, experts: int, share: float = 0.05) -> Any:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((tokens, experts)) * 4).astype(np.float32)
    special = rng.random(logits.shape) < share
    logits[special] = rng.choice(SPECIALS, special.sum())
    return logits


def shapes(tokens: int, width: int) -> Any:
    return (((tokens, width), np.int32), ((tokens, width), np.float32))


@given(
    st.sampled_from(SCORINGS),
    st.sampled_from((0, 1, 4, 9)),
    st.sampled_from((1, 8, 32, 60, 129)),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_route_equals_reference(
    kernels: Any,
    scoring: str,
    tokens: int,
    experts: int,
    num_parts: int,
    renormalize: bool,
    shared_slot: bool,
    biased: bool,
    data: st.DataObject,
) -> None:
    top_k = data.draw(st.sampled_from(sorted({1, min(8, experts), min(40, experts)})))
    seed = data.draw(seeds)
    rng = np.random.default_rng(seed)
    options: dict[str, Any] = {
        "scoring": scoring,
        "renormalize": renormalize and scoring != "none",
        "num_parts": num_parts,
        "shared_slot": shared_slot,
        "routed_scaling_factor": 2.5,
    }
    if biased:
        options["bias"] = rng.standard_normal(experts).astype(np.float32)
    if biased and scoring == "sigmoid":
        options["correction_bias"] = rng.standard_normal(experts).astype(np.float32)
    if scoring == "sigmoid" and experts % 4 == 0 and top_k <= experts // 2:
        options |= {"n_groups": 4, "topk_group": 2}
    assert_equals_reference(
        kernels,
        ops.route,
        shapes(tokens, top_k + shared_slot),
        draw(seed, tokens, experts * num_parts),
        top_k,
        **options,
    )


@pytest.mark.parametrize(
    ("experts", "top_k", "options"),
    [
        (384, 8, {}),
        (1024, 3, {}),
        (36, 36, {"renormalize": True}),
        (256, 8, {"scoring": "sigmoid", "n_groups": 8, "topk_group": 4, "renormalize": True}),
        (64, 4, {"scoring": "sigmoid", "n_groups": 32, "topk_group": 2}),
    ],
)
def test_large_routers_equal_reference(
    kernels: Any, experts: int, top_k: int, options: dict[str, Any]
) -> None:
    logits = draw(experts, 2, experts, 0.01)
    assert_equals_reference(kernels, ops.route, shapes(2, top_k), logits, top_k, **options)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_tokens_are_independent(kernels: Any, scoring: str) -> None:
    """P3."""
    logits = draw(0, 6, 33)
    batch = kernels(ops.route, logits, 5, scoring=scoring)
    for t in range(6):
        alone = kernels(ops.route, logits[t : t + 1], 5, scoring=scoring)
        assert_same(tuple(a[0] for a in alone), tuple(b[t] for b in batch), f"token {t}")


def test_equal_logits_go_to_the_lowest_ids(kernels: Any) -> None:
    ids, _ = kernels(ops.route, np.zeros((5, 70), np.float32), 34)
    assert (ids == np.arange(34)).all()
    ids, _ = kernels(
        ops.route, np.zeros((5, 64), np.float32), 6, scoring="sigmoid", n_groups=16, topk_group=2
    )
    assert (ids == np.arange(6)).all()
    ids, _ = kernels(ops.route, np.float32([[-0.0, 0.0, -0.0, 0.0]]), 4)
    assert ids.tolist() == [[0, 1, 2, 3]]


def test_what_is_far_below_has_no_weight(kernels: Any) -> None:
    """exp of the specification stops falling at -88; the weight of a masked expert does not."""
    logits = np.float32([[0, -np.inf, -88.1, -88, -200]])
    for scoring in ("softmax", "softmax_after_topk"):
        ids, weights = kernels(ops.route, logits, 5, scoring=scoring)
        assert ids.tolist() == [[0, 3, 2, 4, 1]]
        assert weights[0, 0] == 1 and 0 < weights[0, 1] < 1e-38
        assert not weights[0, 2:].any()


@given(
    st.sampled_from((0, 1, 7, 8, 17)),
    st.sampled_from((1, 4, 16, 60, 129)),
    st.sampled_from((8, 64, 72, 448)),
    st.sampled_from(VALUES),
    st.booleans(),
    seeds,
)
def test_logits_equal_reference(
    kernels: Any, tokens: int, experts: int, hidden: int, kind: str, is_many: bool, seed: int
) -> None:
    """By the kernel for few tokens and by the one for many."""
    rng = np.random.default_rng(seed)
    x = activations(rng, tokens, hidden + 8, kind)[:, :hidden].copy()
    weight = rng.standard_normal((experts, hidden)).astype(ml_dtypes.bfloat16)
    result = (((tokens, experts), np.float32),)
    with pytest.MonkeyPatch.context() as patch:
        if is_many:
            patch.setattr(router_logits, "MAX_TOKENS", 0)
        assert_equals_reference(kernels, ops.router_logits, result, x, weight)


LOGITS = np.zeros((3, 8), np.float32)
BAD = [
    ({"top_k": 9}, RangeError, "top_k"),
    ({"scoring": "argmax"}, ConfigError, "scoring"),
    ({"scoring": None}, ArgTypeError, "scoring"),
    ({"scoring": "none", "renormalize": True}, ConfigError, "renormalize"),
    ({"renormalize": 1}, ArgTypeError, "renormalize"),
    ({"shared_slot": 1}, ArgTypeError, "shared_slot"),
    ({"correction_bias": np.zeros(8, np.float32)}, ConfigError, "correction_bias"),
    ({"n_groups": 2}, ConfigError, "n_groups"),
    ({"scoring": "sigmoid", "n_groups": 3}, ConfigError, "n_groups"),
    ({"scoring": "sigmoid", "n_groups": 8}, ConfigError, "n_groups"),
    ({"scoring": "sigmoid", "n_groups": 33}, RangeError, "n_groups"),
    ({"scoring": "sigmoid", "n_groups": 2, "topk_group": 3}, RangeError, "topk_group"),
    ({"scoring": "sigmoid", "n_groups": 4, "top_k": 3}, RangeError, "top_k"),
    ({"routed_scaling_factor": 0}, RangeError, "routed_scaling_factor"),
    ({"routed_scaling_factor": 1e39}, RangeError, "routed_scaling_factor"),
    ({"routed_scaling_factor": "2"}, ArgTypeError, "routed_scaling_factor"),
    ({"bias": np.zeros(7, np.float32)}, ShapeError, "bias"),
    ({"num_parts": 3}, ShapeError, "logits"),
    ({"num_parts": 0}, RangeError, "num_parts"),
]


@pytest.mark.parametrize(("change", "error", "arg"), BAD)
def test_bad_options(change: dict[str, Any], error: type[Exception], arg: str) -> None:
    with pytest.raises(error, match=rf"^route\(\): {arg}: "):
        ops.route(LOGITS, **{"top_k": 2, **change})


def test_wrong_length_of_correction_bias() -> None:
    """R19."""
    with pytest.raises(ShapeError, match=r"^route\(\): correction_bias: "):
        ops.route(LOGITS, 2, scoring="sigmoid", correction_bias=np.zeros(9, np.float32))


def test_too_many_experts() -> None:
    """R7."""
    with pytest.raises(UnsupportedError, match=r"at most 1024 experts, got E = 4096"):
        ops.route(np.zeros((1, 4096), np.float32), 2)


def test_weights_without_a_sum() -> None:
    """R20: only "full" looks; otherwise the weights are NaN."""
    logits = np.full((2, 4), -200, np.float32)
    logits[0] = 0
    options: dict[str, Any] = {"scoring": "sigmoid", "renormalize": True}
    with pytest.raises(RangeError, match=r"only 0 in row 1"):
        ops.route(logits, 2, validate="full", **options)
    assert np.isnan(ops.route(logits, 2, backend="reference", **options)[1][1]).all()


def test_logits_of_other_sizes() -> None:
    x = np.zeros((2, 16), ml_dtypes.bfloat16)
    with pytest.raises(ShapeError, match=r"^router_logits\(\): weight: "):
        ops.router_logits(x, x[:, :8].copy())
    with pytest.raises(ShapeError, match=r"^router_logits\(\): x: .*H % 8 == 0"):
        ops.router_logits(x[:, :4].copy(), x[:, :4].copy())
