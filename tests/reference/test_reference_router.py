"""P2, P8: the router's rule against float64, against each model's published rule, and at edges."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbmoe import reference
from nbmoe.errors import RangeError
from nbmoe.reference.router import SCORINGS, sort_keys, sum_of_32

BF16 = ml_dtypes.bfloat16


def draw_logits(seed, tokens, experts, scale=3.0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((tokens, experts)) * scale).astype(np.float32)


# Published rules, one token at a time in float64. No two scores here are equal.


def qwen3(logits, top_k, normalize):
    """Qwen3MoeSparseMoeBlock: softmax over all experts, top-k, optionally divided by the sum."""
    odds = [math.exp(v - max(logits)) for v in logits]
    scores = [o / sum(odds) for o in odds]
    chosen = sorted(range(len(scores)), key=lambda e: -scores[e])[:top_k]
    weights = [scores[e] for e in chosen]
    return chosen, [w / sum(weights) for w in weights] if normalize else weights


def gpt_oss(logits, top_k):
    """GptOssTopKRouter: top-k of the logits, softmax over those."""
    chosen = sorted(range(len(logits)), key=lambda e: -logits[e])[:top_k]
    odds = [math.exp(logits[e]) for e in chosen]
    return chosen, [o / sum(odds) for o in odds]


def llama4(logits, top_k):
    """Llama4Router: top-k of the logits, sigmoid of those."""
    chosen = sorted(range(len(logits)), key=lambda e: -logits[e])[:top_k]
    return chosen, [1 / (1 + math.exp(-logits[e])) for e in chosen]


def deepseek_v3(logits, top_k, correction, n_groups, topk_group, factor):
    """Gate of DeepSeek-V3's inference code: groups by their two best, sigmoid, norm, factor."""
    scores = [1 / (1 + math.exp(-v)) for v in logits]
    biased = [s + c for s, c in zip(scores, correction, strict=True)]
    size = len(scores) // n_groups
    groups = [range(g * size, (g + 1) * size) for g in range(n_groups)]
    ranks = [sum(sorted(biased[e] for e in group)[-2:]) for group in groups]
    best = sorted(range(n_groups), key=lambda g: -ranks[g])[:topk_group]
    candidates = [e for g in best for e in groups[g]]
    chosen = sorted(candidates, key=lambda e: -biased[e])[:top_k]
    total = sum(scores[e] for e in chosen)
    return chosen, [scores[e] / total * factor for e in chosen]


def check(got, rule, logits, *args):
    ids, weights = got
    assert ids.dtype == np.int32
    assert weights.dtype == np.float32
    for token, row in enumerate(logits.astype(float)):
        chosen, expected = rule(row.tolist(), *args)
        assert ids[token].tolist() == chosen
        # exp is within 1 ulp; sums of up to 1024 addends and two divisions follow.
        np.testing.assert_allclose(weights[token], expected, rtol=3e-6)


@pytest.mark.parametrize("experts", [4, 60, 128, 129, 384])
@pytest.mark.parametrize("normalize", [True, False])
def test_qwen3(experts, normalize):
    logits = draw_logits(experts, 20, experts)
    check(reference.route(logits, 4, renormalize=normalize), qwen3, logits, 4, normalize)


def test_gpt_oss():
    logits = draw_logits(1, 20, 32)
    check(reference.route(logits, 4, scoring="softmax_after_topk"), gpt_oss, logits, 4)


def test_llama4():
    logits = draw_logits(2, 20, 16)
    check(reference.route(logits, 1, scoring="sigmoid_after_topk"), llama4, logits, 1)


@pytest.mark.parametrize(
    ("experts", "groups", "topk_group", "top_k"), [(32, 8, 4, 8), (256, 8, 4, 8), (384, 1, 1, 8)]
)
def test_deepseek_v3_and_kimi_k2(experts, groups, topk_group, top_k):
    logits = draw_logits(experts, 20, experts, 1.0)
    correction = draw_logits(3, 1, experts, 0.2)[0]
    got = reference.route(
        logits,
        top_k,
        scoring="sigmoid",
        renormalize=True,
        correction_bias=correction,
        n_groups=groups,
        topk_group=topk_group,
        routed_scaling_factor=2.5,
    )
    check(got, deepseek_v3, logits, top_k, correction.tolist(), groups, topk_group, 2.5)


def test_groups_that_lose_are_not_chosen_though_all_biased_scores_are_negative():
    """Published code that masks losing groups with 0 would choose from them here."""
    correction = np.full(8, -5, np.float32)
    got, _ = reference.route(
        np.float32([[1, 1, 0, 0, 0, 0, 3, 3]]),
        4,
        scoring="sigmoid",
        correction_bias=correction,
        n_groups=4,
        topk_group=2,
    )
    assert got.tolist() == [[6, 7, 0, 1]]


def test_correction_bias_chooses_and_does_not_weigh():
    logits = np.float32([[2, 1, 0]])
    bias = np.float32([0, 0, 10])
    ids, weights = reference.route(logits, 1, scoring="sigmoid", correction_bias=bias)
    assert ids.tolist() == [[2]]
    assert weights.tolist() == [[0.5]]


def test_the_gate_alone():
    ids, weights = reference.route(np.float32([[3, -1, 4]]), 2, scoring="none")
    assert ids.tolist() == [[2, 0]]
    assert weights.tolist() == [[4, 3]]


def test_bias_parts_and_factor():
    logits = np.float32([[1, 2, 3, 10, 20, 30]])
    ids, weights = reference.route(
        logits,
        3,
        scoring="none",
        bias=np.float32([0, 100, 0]),
        num_parts=2,
        routed_scaling_factor=0.5,
    )
    assert ids.tolist() == [[1, 2, 0]]
    assert weights.tolist() == [[61, 16.5, 5.5]]


def test_shared_slot():
    logits = draw_logits(4, 5, 6)
    ids, weights = reference.route(logits, 2)
    shared_ids, shared_weights = reference.route(logits, 2, shared_slot=True)
    assert not shared_ids[:, 0].any()
    assert (shared_weights[:, 0] == 1).all()
    np.testing.assert_array_equal(shared_ids[:, 1:], ids + 1)
    np.testing.assert_array_equal(shared_weights[:, 1:], weights)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_ties_go_to_the_lower_id(scoring):
    ids, _ = reference.route(np.float32([[1, 2, 2, 0, 2]]), 3, scoring=scoring)
    assert ids.tolist() == [[1, 2, 4]]
    levels = (np.arange(200) % 3).astype(np.float32)[np.newaxis]
    expected = [e for level in (2, 1, 0) for e in range(level, 200, 3)]
    assert reference.route(levels, 200, scoring=scoring)[0][0].tolist() == expected
    zeros = np.float32([[0.0, -0.0, 0.0, -0.0]])
    assert reference.route(zeros, 4, scoring=scoring)[0].tolist() == [[0, 1, 2, 3]]


def test_ties_of_groups_go_to_the_lower_group():
    options = {"scoring": "sigmoid", "n_groups": 4, "topk_group": 2}
    assert reference.route(np.zeros((1, 8), np.float32), 3, **options)[0].tolist() == [[0, 1, 2]]


SPECIALS = np.float32([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, -3e38, 1e-45, 1])


@given(
    st.sampled_from(SCORINGS),
    st.integers(1, 70),
    st.integers(0, 5),
    st.sampled_from((0.0, 0.3, 1.0)),
    st.data(),
)
def test_ids_are_different_and_in_range_whatever_the_logits(scoring, experts, tokens, share, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    logits = rng.standard_normal((tokens, experts)).astype(np.float32)
    special = rng.random(logits.shape) < share
    logits[special] = rng.choice(SPECIALS, special.sum())
    top_k = data.draw(st.integers(1, experts))
    options = {}
    if scoring == "sigmoid" and experts % 2 == 0 and experts > 2 and top_k <= experts // 2:
        options = {"n_groups": 2, "topk_group": 1}
    ids, weights = reference.route(logits, top_k, scoring=scoring, **options)
    assert ids.shape == weights.shape == (tokens, top_k)
    for row in ids:
        assert len(set(row.tolist())) == top_k
        assert 0 <= row.min() <= row.max() < experts
    if top_k == experts:
        assert (np.sort(ids, axis=1) == np.arange(experts)).all()


def test_a_nan_logit_stays_in_its_token_and_shows():
    logits = draw_logits(1, 3, 5)
    before = reference.route(logits, 2, renormalize=True)
    logits[1, 3] = np.nan
    ids, weights = reference.route(logits, 2, renormalize=True)
    for got, clean in zip((ids, weights), before, strict=True):
        np.testing.assert_array_equal(got[[0, 2]], clean[[0, 2]])
    assert ids[1, 0] == 3
    assert (weights[1].view(np.uint32) == 0x7FFFFFFF).all()


def test_large_and_infinite_logits():
    logits = np.float32([[3e38, 0, -3e38], [0, -np.inf, -np.inf]])
    ids, weights = reference.route(logits, 2, renormalize=True)
    assert ids.tolist() == [[0, 1], [0, 1]]
    assert weights.tolist() == [[1, 0], [1, 0]]


def test_one_expert_of_one_token_and_none():
    ids, weights = reference.route(np.float32([[0, 3, 1], [5, 3, 1]]), 1, renormalize=True)
    assert ids.tolist() == [[1], [0]]
    assert weights.tolist() == [[1], [1]]
    ids, weights = reference.route(np.zeros((0, 4), np.float32), 2)
    assert ids.shape == weights.shape == (0, 2)


@pytest.mark.parametrize("top_k", [0, 5, -1])
def test_top_k_out_of_range(top_k):
    with pytest.raises(RangeError, match=rf"top_k: expected 1\.\.4, got {top_k}"):
        reference.route(np.zeros((1, 4), np.float32), top_k)


def test_order_of_sums():
    """Lanes in turn, then a butterfly: written out for 33 addends that no order but one gives."""
    values = np.zeros((1, 64), np.float32)
    values[0, [0, 32, 16]] = 1, 2.0**24, 1  # lane 0 loses its 1 before lane 16 adds another
    assert sum_of_32(values)[0, 0] == 2.0**24
    values[0, [0, 32, 16]] = 2.0**24, 1, 2
    assert sum_of_32(values)[0, 0] == 2.0**24 + 2
    values[0, [0, 32, 16, 8]] = 2.0**24, 0, 1, 1  # 16 apart comes before 8 apart
    assert sum_of_32(values)[0, 0] == 2.0**24


def test_sort_keys_are_in_the_order_of_floats():
    bits = np.random.default_rng(0).integers(0, 2**32, 3000, dtype=np.uint32)
    scores = np.concatenate([bits.view(np.float32), SPECIALS])
    keys = sort_keys(scores).astype(np.int64)
    assert (keys > 0).all()
    number = ~np.isnan(scores)
    assert (keys[~number] == 0xFFFFFFFF).all()
    found = np.sign(keys[number][:, None] - keys[number])
    with np.errstate(invalid="ignore"):
        less = scores[number][:, None] < scores[number]
        equal = scores[number][:, None] == scores[number]
    assert ((found < 0) == less).all()
    assert ((found == 0) == equal).all()


@pytest.mark.parametrize(("tokens", "experts", "hidden"), [(7, 5, 24), (3, 60, 128), (1, 1, 8)])
def test_logits_are_near_the_exact_product(tokens, experts, hidden):
    rng = np.random.default_rng(hidden)
    x = rng.standard_normal((tokens, hidden)).astype(BF16)
    weight = rng.standard_normal((experts, hidden)).astype(BF16)
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    # A step of 16 products cuts each to 2**-25 of the largest, which is below the sum of all.
    bound = np.abs(x.astype(np.float64)) @ np.abs(weight.astype(np.float64)).T
    found = reference.router_logits(x, weight)
    assert (np.abs(found - exact) <= bound * 2.0**-20).all()


def test_a_nan_token_stays_in_its_row_of_logits():
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal((4, 80)).astype(BF16) for _ in range(2))
    clean = reference.router_logits(x, weight)
    x[2, 5] = np.nan
    logits = reference.router_logits(x, weight)
    assert np.isnan(logits[2]).all()
    np.testing.assert_array_equal(np.delete(logits, 2, 0), np.delete(clean, 2, 0))
