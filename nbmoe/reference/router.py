"""From tokens to their experts: the router's logits, scores, choice and weights."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nbmoe import codecs, layouts
from nbmoe.codecs import F32Array
from nbmoe.errors import RangeError, message
from nbmoe.reference import float32, tensor_core

I32Array = npt.NDArray[np.int32]
U32Array = npt.NDArray[np.uint32]

SCORINGS: Final = ("softmax", "softmax_after_topk", "sigmoid_after_topk", "none", "sigmoid")
"""How logits become weights; see `route`."""

MIN_ODDS: Final = np.float32(-88)
CANONICAL_NAN: Final = np.uint32(0x7FFFFFFF)
_LANES: Final = np.arange(32)
_TAKEN: Final = np.uint32(0)


def router_logits(x: npt.NDArray[Any], weight: npt.NDArray[Any]) -> F32Array:
    """x @ weight.T as the tensor core sums bf16 products, kept in float32.

    Args:
        x: (T, H) bf16.
        weight: (E, H) bf16.

    Returns:
        (T, E) float32.
    """
    a, b = (_operand(operand) for operand in (x, weight))
    with np.errstate(all="ignore"):
        return _canonical(tensor_core.matmul(a, b))


def _operand(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows padded with zeros to whole K blocks, in the order in which the tensor core takes K."""
    rows, k = x.shape
    padded = layouts.ceil_div(k, layouts.K_BLOCK) * layouts.K_BLOCK
    operand = np.zeros((rows, padded), codecs.encode_bf16(np.zeros(1, np.float32)).dtype)
    operand[:, :k] = x
    return layouts.group_k(operand).reshape(rows, padded)


def route(
    logits: F32Array,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    bias: F32Array | None = None,
    correction_bias: F32Array | None = None,
    n_groups: int = 1,
    topk_group: int = 1,
    routed_scaling_factor: float = 1.0,
    num_parts: int = 1,
    shared_slot: bool = False,
) -> tuple[I32Array, F32Array]:
    """Chooses each token's experts and weights them, each float32 operation rounded once.

    l[e] is the sum of the `num_parts` parts of a logit, in order, plus bias[e]. With the chosen ids
    c[0..k-1] in order of falling score, the lower id first among equals:

        softmax             chosen by l;  w[j] = odds(l[c[j]] - max l) / sum of odds over all e
        softmax_after_topk  chosen by l;  w[j] = odds(l[c[j]] - max l) / sum of odds over all j
        sigmoid_after_topk  chosen by l;  w[j] = sigmoid(l[c[j]])
        none                chosen by l;  w[j] = l[c[j]]
        sigmoid             chosen by sigmoid(l) + correction_bias;  w[j] = sigmoid(l[c[j]])

    then w is divided by its sum over j if `renormalize`, and multiplied by `routed_scaling_factor`.
    odds(d) = exp(d), +0 below d = -88. `sum_of_32` is the order of all sums. A NaN is larger than
    any score, so it is chosen, and seen; -0 equals +0.

    With `n_groups` > 1 only experts of the `topk_group` best groups of E / n_groups can be chosen;
    a group ranks by the sum of its two largest biased scores.

    Args:
        logits: (T, num_parts * E) float32.
        top_k: Experts per token, 1..E.
        scoring: One of `SCORINGS`.
        renormalize: Divide the k weights of a token by their sum.
        bias: (E,) float32 added to the logits.
        correction_bias: (E,) float32 added to the scores for the choice alone.
        n_groups: Groups of experts.
        topk_group: Groups that a token chooses from.
        routed_scaling_factor: Factor of the weights, rounded to float32.
        num_parts: Parts of a logit.
        shared_slot: Put expert 0 with weight 1 before each token's choice, whose ids go up by one.

    Returns:
        topk_ids (T, C + k) int32 and topk_weights (T, C + k) float32, C = 1 with `shared_slot`.

    Raises:
        RangeError: `top_k` is outside 1..E.
    """
    tokens, experts = len(logits), logits.shape[1] // num_parts
    if not 1 <= top_k <= experts:
        raise RangeError(message("route", "top_k", f"1..{experts}", top_k))
    one = np.float32(1)
    with np.errstate(all="ignore"):
        parts = logits.reshape(tokens, num_parts, experts)
        logit = parts[:, 0]
        for part in range(1, num_parts):
            logit = logit + parts[:, part]
        if bias is not None:
            logit = logit + bias
        if scoring == "sigmoid":
            scores = float32.sigmoid(logit)
            biased = scores if correction_bias is None else scores + correction_bias
            keys = sort_keys(biased)
            if n_groups > 1:
                keys = _only_best_groups(keys, n_groups, topk_group)
        else:
            keys = sort_keys(logit)
            scores = _scores_of(keys)
        ids = _largest(keys, top_k)
        weights = np.take_along_axis(scores, ids, axis=1)
        largest = _scores_of(keys.max(axis=1, keepdims=True))
        if scoring == "softmax":
            weights = _odds(weights - largest) / sum_of_32(_odds(scores - largest))
        elif scoring == "softmax_after_topk":
            weights = _odds(weights - largest)
        elif scoring == "sigmoid_after_topk":
            weights = float32.sigmoid(weights)
        if renormalize or scoring == "softmax_after_topk":
            weights = weights / sum_of_32(weights)
        weights = _canonical(weights * np.float32(routed_scaling_factor))
    if shared_slot:
        ids = np.concatenate([np.zeros((tokens, 1), np.int32), ids + np.int32(1)], axis=1)
        weights = np.concatenate([np.full((tokens, 1), one), weights], axis=1)
    return ids, weights


def sum_of_32(values: F32Array) -> F32Array:
    """Sums rows in the order of a warp: lane l takes l, l + 32, ... in turn, from +0; then lanes
    16, 8, 4, 2 and 1 apart add each other's, so that all hold the sum.

    Args:
        values: (T, n) float32.

    Returns:
        (T, 1) float32.
    """
    tokens, n = values.shape
    padded = np.zeros((tokens, layouts.ceil_div(n, 32) * 32), np.float32)
    padded[:, :n] = values
    lanes = np.zeros((tokens, 32), np.float32)
    for begin in range(0, padded.shape[1], 32):
        lanes = lanes + padded[:, begin : begin + 32]
    for distance in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[:, _LANES ^ distance]
    return lanes[:, :1]


def sort_keys(scores: F32Array) -> U32Array:
    """Unsigned integers in the order of the scores: NaN largest, -0 as +0, never 0."""
    bits = np.where(scores == 0, np.float32(0), scores).astype(np.float32).view(np.uint32)
    keys = np.where(bits >> 31, ~bits, bits | np.uint32(0x80000000))
    return np.where(np.isnan(scores), np.uint32(0xFFFFFFFF), keys).astype(np.uint32)


def _scores_of(keys: U32Array) -> F32Array:
    bits = np.where(keys >> 31, keys ^ np.uint32(0x80000000), ~keys)
    return bits.astype(np.uint32).view(np.float32)


def _largest(keys: U32Array, count: int) -> I32Array:
    """Positions of the largest keys of each row, falling, the lower first among equals."""
    order = np.argsort(-keys.astype(np.int64), axis=1, kind="stable")
    return order[:, :count].astype(np.int32)


def _only_best_groups(keys: U32Array, n_groups: int, topk_group: int) -> U32Array:
    tokens, experts = keys.shape
    groups = keys.reshape(tokens, n_groups, experts // n_groups)
    two = _scores_of(np.sort(groups, axis=2)[:, :, -2:])
    ranks = sort_keys(two[:, :, 1] + two[:, :, 0])
    allowed = np.zeros((tokens, n_groups), bool)
    np.put_along_axis(allowed, _largest(ranks, topk_group), True, axis=1)
    return np.where(allowed[:, :, np.newaxis], groups, _TAKEN).reshape(tokens, experts)


def _odds(differences: F32Array) -> F32Array:
    odds = float32.exp(differences)
    return np.where(differences < MIN_ODDS, np.float32(0), odds)


def _canonical(values: F32Array) -> F32Array:
    nan = CANONICAL_NAN.view(np.float32)
    return np.where(np.isnan(values), nan, values).astype(np.float32)
