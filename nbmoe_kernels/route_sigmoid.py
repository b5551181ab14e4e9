"""route by sigmoid: experts by score plus correction bias, in the best groups of experts.

With s[e] = 1 / (1 + exp(-l[e])), l[e] = logits[t, e] (+ bias[e]) and b[e] = s[e] (+
correction_bias[e]), each operation rounded once:

    rank of a group  the sum of its two largest b, the larger first
    ids              the top_k largest b in the topk_group groups of the highest ranks
    w[j]             s[c[j]], divided by the sum over j if `renormalize`, then times `factor`

The lower group or id goes first among equals. A group is E / n_groups consecutive experts. Orders
of sums, and NaNs: see `route_select`.

Shapes: as in `route_logits`, and correction_bias (E,) f32. n_groups <= 32, and with more than one a
group has at least two experts.

Thread map: a warp a token, lane l for the experts l + 32 i, for the choices l + 32 i and for group
l. Lane l starts on expert l of its group, so that the lanes read different banks.

Synchronisation (only with groups): the warp meets after the keys are stored, since a group's lane
reads those of others, and again before lanes drop the keys of groups that were not chosen.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.math import add_rn, div_rn, mul_rn, sigmoid
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.device.warp import sync_warp
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.route_select import (
    NOBODY,
    SHARED_BYTES,
    TAKEN,
    THREADS,
    WARPS,
    key_of_score,
    largest_of_lanes,
    load_logit,
    score_of_key,
    smallest_of_lanes,
    sum_of_lanes,
    take_best,
)

MAX_GROUPS = 32
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@device_function
def rank_of_group(keys, first, size, start):
    """Key of the sum of the two largest scores of keys[first : first + size], from `start` on."""
    largest = TAKEN
    second = TAKEN
    at = start
    for _ in range(size):
        key = keys[np.uint32(first + at)]
        second = max(second, min(largest, key))
        largest = max(largest, key)
        at = np.uint32(at + np.uint32(1))
        if at == size:
            at = np.uint32(0)
    return key_of_score(add_rn(score_of_key(largest), score_of_key(second)))


@device_function
def best_groups(rank, lane, topk_group):
    """Mask of the lanes with the `topk_group` largest ranks, the lower lane first among equals."""
    kept = np.uint32(0)
    for _ in range(topk_group):
        largest = largest_of_lanes(rank)
        candidate = NOBODY
        if rank == largest:
            candidate = lane
        group = smallest_of_lanes(candidate)
        kept = np.uint32(kept | np.uint32(np.uint32(1) << group))
        if lane == group:
            rank = TAKEN
    return kept


@functools.cache
def make_route_sigmoid() -> Kernel:
    """The kernel; it has no configuration."""

    @kernel(
        "global i32* topk_ids, global f32* topk_weights, global f32* logits, global f32* bias, "
        "global f32* correction_bias, u32 num_tokens, u32 num_experts, u32 num_parts, "
        "u32 has_bias, u32 has_correction, u32 top_k, u32 n_groups, u32 topk_group, "
        "u32 renormalize, f32 factor, u32 shared_slot",
        threads=THREADS,
        shared_bytes=SHARED_BYTES,
        name="route_sigmoid",
    )
    def route_sigmoid(
        topk_ids,
        topk_weights,
        logits,
        bias,
        correction_bias,
        num_tokens,
        num_experts,
        num_parts,
        has_bias,
        has_correction,
        top_k,
        n_groups,
        topk_group,
        renormalize,
        factor,
        shared_slot,
    ):
        keys = cuda.shared.array(0, np.uint32, alignment=16)
        thread = np.uint32(cuda.threadIdx.x)
        lane = np.uint32(thread & np.uint32(31))
        warp = np.uint32(thread >> np.uint32(5))
        token = np.uint32(np.uint32(np.uint32(cuda.blockIdx.x) * np.uint32(WARPS)) + warp)
        if token < num_tokens:
            base = np.uint32(warp * num_experts)
            row = np.uint64(token) * np.uint64(np.uint32(num_experts * num_parts))
            width = np.uint32(top_k + shared_slot)
            first = np.uint64(token) * np.uint64(width)
            if shared_slot != np.uint32(0) and lane == np.uint32(0):
                topk_ids[first] = np.int32(0)
                topk_weights[first] = _ONE
            first = first + np.uint64(shared_slot)

            expert = lane
            while expert < num_experts:
                logit = load_logit(logits, bias, row, expert, num_experts, num_parts, has_bias)
                score = sigmoid(logit)
                if has_correction != np.uint32(0):
                    score = add_rn(score, correction_bias[np.uint64(expert)])
                keys[np.uint32(base + expert)] = key_of_score(score)
                expert = np.uint32(expert + np.uint32(32))

            if n_groups > np.uint32(1):
                size = np.uint32(num_experts // n_groups)
                sync_warp()
                rank = TAKEN
                if lane < n_groups:
                    group_first = np.uint32(base + np.uint32(lane * size))
                    start = np.uint32(lane % size)
                    rank = rank_of_group(keys, group_first, size, start)
                kept = best_groups(rank, lane, topk_group)
                sync_warp()
                expert = lane
                while expert < num_experts:
                    group = np.uint32(expert // size)
                    if np.uint32(np.uint32(kept >> group) & np.uint32(1)) == np.uint32(0):
                        keys[np.uint32(base + expert)] = TAKEN
                    expert = np.uint32(expert + np.uint32(32))

            for j in range(top_k):
                chosen, _ = take_best(keys, base, lane, num_experts)
                if np.uint32(np.uint32(j) & np.uint32(31)) == lane:
                    topk_ids[first + np.uint64(j)] = np.int32(chosen + shared_slot)

            total = _ZERO
            j = lane
            while j < top_k:
                expert = np.uint32(np.uint32(topk_ids[first + np.uint64(j)]) - shared_slot)
                logit = load_logit(logits, bias, row, expert, num_experts, num_parts, has_bias)
                score = sigmoid(logit)
                topk_weights[first + np.uint64(j)] = score
                total = add_rn(total, score)
                j = np.uint32(j + np.uint32(32))
            total = sum_of_lanes(total)

            j = lane
            while j < top_k:
                weight = topk_weights[first + np.uint64(j)]
                if renormalize != np.uint32(0):
                    weight = div_rn(weight, total)
                topk_weights[first + np.uint64(j)] = mul_rn(weight, factor)
                j = np.uint32(j + np.uint32(32))

    return route_sigmoid


def launch_route_sigmoid(
    executor: Executor,
    topk_ids: Any,
    topk_weights: Any,
    logits: Any,
    bias: Any,
    correction_bias: Any,
    *,
    num_tokens: int,
    num_experts: int,
    num_parts: int,
    has_bias: bool,
    has_correction: bool,
    top_k: int,
    n_groups: int,
    topk_group: int,
    renormalize: bool,
    factor: float,
    shared_slot: bool,
    stream: Any = None,
) -> None:
    """Launch on flat arrays; at most `MAX_EXPERTS` experts and `MAX_GROUPS` groups."""
    make_route_sigmoid().launch(
        executor,
        (-(-num_tokens // WARPS), 1, 1),
        topk_ids,
        topk_weights,
        logits,
        bias,
        correction_bias,
        num_tokens,
        num_experts,
        num_parts,
        int(has_bias),
        int(has_correction),
        top_k,
        n_groups,
        topk_group,
        int(renormalize),
        factor,
        int(shared_slot),
        stream=stream,
    )
