"""Which expert gets which token, and the order that groups routed rows by expert."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from nbmoe.codecs import F32Array
from nbmoe.errors import RangeError, RoutingError, message
from nbmoe.layouts import U32Array, scales_offset

NO_ROW: Final = 0xFFFFFFFF
MASKED: Final = -1

I32Array = npt.NDArray[np.int32]


class RoutingIndices(NamedTuple):
    """What the grouped kernels need to know about a routing.

    Attributes:
        token_expert_order: (M,) uint32. Position p of the grouped rows holds source i = t * k + j.
            Positions from expert_start_indices[E] on, one for each masked id, hold 0xFFFFFFFF.
        expert_start_indices: (E + 1,) uint32 exclusive prefix sums of rows per expert [rows].
        restore_token_order: (M,) uint32. Source i went to position p; 0xFFFFFFFF if masked.
        expert_ids: (E,) int32, 0..E-1: the expert of each slot.
        expert_usage_stats: (2,) uint32: most rows of any expert, number of experts.
        scales_offset: (E,) uint32, see `nbmoe.layouts.scales_offset` [128-row tiles].
    """

    token_expert_order: U32Array
    expert_start_indices: U32Array
    restore_token_order: U32Array
    expert_ids: I32Array
    expert_usage_stats: U32Array
    scales_offset: U32Array


def route(logits: F32Array, top_k: int, *, renormalize: bool) -> tuple[I32Array, F32Array]:
    """Softmax over experts, then the k most probable, ties to the lower id.

    The softmax is computed in float64 and rounded once to float32. Selection compares the float32
    probabilities. A token with a NaN logit gets NaN weights.

    Args:
        logits: (T, E) float32 router outputs.
        top_k: Experts per token, 1..E.
        renormalize: Divide the k weights of a token by their sum.

    Returns:
        topk_ids (T, k) int32 in order of falling probability, topk_weights (T, k) float32.

    Raises:
        RangeError: `top_k` is outside 1..E.
    """
    experts = logits.shape[1]
    if not 1 <= top_k <= experts:
        raise RangeError(message("route", "top_k", f"1..{experts}", top_k))
    with np.errstate(invalid="ignore", under="ignore"):
        wide = logits.astype(np.float64)
        odds = np.exp(wide - wide.max(axis=1, keepdims=True))
        probabilities = (odds / odds.sum(axis=1, keepdims=True)).astype(np.float32)
        ids = np.argsort(-probabilities, axis=1, kind="stable")[:, :top_k].astype(np.int32)
        weights = np.take_along_axis(probabilities, ids, axis=1)
        if renormalize:
            total = weights.sum(axis=1, keepdims=True, dtype=np.float64)
            weights = (weights / total).astype(np.float32)
    return ids, weights


def moe_create_indices(topk_ids: I32Array, num_experts: int) -> RoutingIndices:
    """Groups routed rows by expert, keeping the order of sources inside an expert.

    Args:
        topk_ids: (M,) or (T, k) int32 expert ids, token-major. -1 masks a source out.
        num_experts: E.

    Returns:
        RoutingIndices with M = topk_ids.size.

    Raises:
        RoutingError: An id is neither -1 nor in 0..E-1.
    """
    ids = np.asarray(topk_ids).ravel().astype(np.int64)
    legal = (ids >= MASKED) & (ids < num_experts)
    if not legal.all():
        rule = f"-1 or 0..{num_experts - 1}"
        raise RoutingError(message("moe_create_indices", "topk_ids", rule, ids[~legal][0]))
    kept = ids != MASKED
    counts = np.bincount(ids[kept], minlength=num_experts)
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)

    sources = np.argsort(np.where(kept, ids, num_experts), kind="stable")
    order = np.full(ids.size, NO_ROW, np.uint32)
    restore = np.full(ids.size, NO_ROW, np.uint32)
    routed = sources[: kept.sum()]
    order[: len(routed)] = routed
    restore[routed] = np.arange(len(routed))
    return RoutingIndices(
        token_expert_order=order,
        expert_start_indices=start,
        restore_token_order=restore,
        expert_ids=np.arange(num_experts, dtype=np.int32),
        expert_usage_stats=np.array([counts.max(initial=0), num_experts], np.uint32),
        scales_offset=scales_offset(start),
    )
