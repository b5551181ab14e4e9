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
l. To rank the groups, which are in shared memory, 2**lane_bits lanes look through each.

Synchronisation (only with groups): the warp meets after the keys are stored, since lanes read those
of others, and again before choices are stored in their place.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.math import add_rn, bits_f32, div_rn, f32_bits, mul_rn, sigmoid
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.warp import shuffle_from, shuffle_xor, sync_warp
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.route_select import (
    NOBODY,
    TAKEN,
    THREADS,
    WARPS,
    key_of_score,
    largest_of_lanes,
    load_logit,
    make_load_logits,
    make_take_best,
    router_capacity,
    score_of_key,
    smallest_of_lanes,
    sum_of_lanes,
)

MAX_GROUPS = 32
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@device_function
def ranks_of_groups(keys, base, lane, size, n_groups, lane_bits):
    """Key of the sum of the two largest scores of group l, on lane l; `TAKEN` past the last group.

    2**lane_bits lanes look through a group together.
    """
    share = np.uint32(np.uint32(1) << lane_bits)
    group = np.uint32(lane >> lane_bits)
    largest = TAKEN
    second = TAKEN
    if group < n_groups:
        first = np.uint32(base + np.uint32(group * size))
        at = np.uint32(lane & np.uint32(share - np.uint32(1)))
        while at < size:
            key = keys[np.uint32(first + at)]
            second = max(second, min(largest, key))
            largest = max(largest, key)
            at = np.uint32(at + share)
    distance = np.uint32(1)
    while distance < share:
        other = shuffle_xor(largest, distance)
        other_second = shuffle_xor(second, distance)
        second = max(min(largest, other), max(second, other_second))
        largest = max(largest, other)
        distance = np.uint32(distance << np.uint32(1))
    rank = key_of_score(add_rn(score_of_key(largest), score_of_key(second)))
    rank = shuffle_from(rank, np.uint32(lane << lane_bits))
    if lane >= n_groups:
        rank = TAKEN
    return rank


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
def make_route_token_by_sigmoid(capacity: int) -> Any:
    """The device function that routes a token, by one warp, among up to `capacity` experts."""
    per_lane = capacity // 32
    load_logits, take_best = make_load_logits(per_lane), make_take_best(per_lane)

    @device_function
    def route_token(
        scratch,
        base,
        lane,
        token,
        topk_ids,
        topk_weights,
        logits,
        bias,
        correction_bias,
        num_experts,
        num_parts,
        has_bias,
        has_correction,
        top_k,
        n_groups,
        topk_group,
        lane_bits,
        renormalize,
        factor,
        shared_slot,
    ):
        row = np.uint64(token) * np.uint64(np.uint32(num_experts * num_parts))
        width = np.uint32(top_k + shared_slot)
        first = np.uint64(token) * np.uint64(width)
        if shared_slot != np.uint32(0) and lane == np.uint32(0):
            topk_ids[first] = np.int32(0)
            topk_weights[first] = _ONE
        first = first + np.uint64(shared_slot)

        keys = cuda.local.array(per_lane, np.uint32)
        scores = cuda.local.array(per_lane, np.float32)
        load_logits(scores, logits, bias, row, lane, num_experts, num_parts, has_bias)
        for i in unroll(range(per_lane)):
            expert = np.uint32(lane + np.uint32(32 * i))
            score = sigmoid(scores[i])
            keys[i] = TAKEN
            if expert < num_experts:
                if has_correction != np.uint32(0):
                    score = add_rn(score, correction_bias[np.uint64(expert)])
                keys[i] = key_of_score(score)

        if n_groups > np.uint32(1):
            size = np.uint32(num_experts // n_groups)
            for i in unroll(range(per_lane)):
                scratch[np.uint32(base + np.uint32(lane + np.uint32(32 * i)))] = keys[i]
            sync_warp()
            rank = ranks_of_groups(scratch, base, lane, size, n_groups, lane_bits)
            kept = best_groups(rank, lane, topk_group)
            sync_warp()
            for i in unroll(range(per_lane)):
                # Past the last expert there is no group, but also no key to be dropped.
                group = min(np.uint32(np.uint32(lane + np.uint32(32 * i)) // size), np.uint32(31))
                if np.uint32(np.uint32(kept >> group) & np.uint32(1)) == np.uint32(0):
                    keys[i] = TAKEN

        j = np.uint32(0)
        while j < top_k:
            chosen, _ = take_best(keys, lane)
            if np.uint32(j & np.uint32(31)) == lane:
                topk_ids[first + np.uint64(j)] = np.int32(chosen + shared_slot)
                scratch[np.uint32(base + j)] = chosen
            j = np.uint32(j + np.uint32(1))

        total = _ZERO
        j = lane
        while j < top_k:
            expert = scratch[np.uint32(base + j)]
            logit = load_logit(logits, bias, row, expert, num_experts, num_parts, has_bias)
            score = sigmoid(logit)
            scratch[np.uint32(base + j)] = f32_bits(score)
            total = add_rn(total, score)
            j = np.uint32(j + np.uint32(32))
        total = sum_of_lanes(total)

        j = lane
        while j < top_k:
            weight = bits_f32(scratch[np.uint32(base + j)])
            if renormalize != np.uint32(0):
                weight = div_rn(weight, total)
            topk_weights[first + np.uint64(j)] = mul_rn(weight, factor)
            j = np.uint32(j + np.uint32(32))

    return route_token


@functools.cache
def make_route_sigmoid(capacity: int) -> Kernel:
    """The kernel for up to `capacity` experts."""
    route_token = make_route_token_by_sigmoid(capacity)

    @kernel(
        "global i32* topk_ids, global f32* topk_weights, global f32* logits, global f32* bias, "
        "global f32* correction_bias, u32 num_tokens, u32 num_experts, u32 num_parts, "
        "u32 has_bias, u32 has_correction, u32 top_k, u32 n_groups, u32 topk_group, "
        "u32 lane_bits, u32 renormalize, f32 factor, u32 shared_slot",
        threads=THREADS,
        shared_bytes=4 * WARPS * capacity,
        name=f"route_sigmoid_{capacity}",
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
        lane_bits,
        renormalize,
        factor,
        shared_slot,
    ):
        scratch = cuda.shared.array(0, np.uint32, alignment=16)
        thread = np.uint32(cuda.threadIdx.x)
        lane = np.uint32(thread & np.uint32(31))
        warp = np.uint32(thread >> np.uint32(5))
        token = np.uint32(np.uint32(np.uint32(cuda.blockIdx.x) * np.uint32(WARPS)) + warp)
        if token < num_tokens:
            route_token(
                scratch,
                np.uint32(warp * np.uint32(capacity)),
                lane,
                token,
                topk_ids,
                topk_weights,
                logits,
                bias,
                correction_bias,
                num_experts,
                num_parts,
                has_bias,
                has_correction,
                top_k,
                n_groups,
                topk_group,
                lane_bits,
                renormalize,
                factor,
                shared_slot,
            )

    return route_sigmoid


def group_lane_bits(n_groups: int) -> int:
    """log2 of how many lanes look through a group together, so that all groups are at work."""
    return (32 // n_groups).bit_length() - 1


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
    make_route_sigmoid(router_capacity(num_experts)).launch(
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
        group_lane_bits(n_groups),
        int(renormalize),
        factor,
        int(shared_slot),
        stream=stream,
    )
