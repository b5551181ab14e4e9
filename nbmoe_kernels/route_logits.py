"""route by logits: each token's top_k largest logits and their weights.

With l[e] = logits[t, e] (+ bias[e]) and the chosen ids c[0], c[1], ... in order of falling l, the
lower id first among equals:

    softmax             w[j] = odds(l[c[j]] - max l) / sum over e of odds(l[e] - max l)
    softmax_after_topk  w[j] = odds(l[c[j]] - max l), divided by the sum over j
    sigmoid_after_topk  w[j] = 1 / (1 + exp(-l[c[j]]))
    none                w[j] = l[c[j]]

then, if `renormalize`, divided by the sum over j, then times `factor`. odds(d) = exp(d) of the
specification, +0 below d = -88. Orders of sums, and NaNs: see `route_select`.

Shapes: topk_ids (T, C + top_k) i32 and topk_weights (T, C + top_k) f32 with C = 1 if `shared_slot`,
else 0; logits (T, num_parts * E) f32, whose parts are summed; bias (E,) f32. E <= 1024.
With `shared_slot` column 0 is expert 0 with weight 1 and the chosen ids are one higher.

Thread map: a warp a token, lane l for the experts l + 32 i and for the choices l + 32 i.
A token's choices lie in its warp's part of shared memory, `scratch` from word `base` on.

Synchronisation: none but the warp's reductions; each lane reads back only what it wrote.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.math import (
    add_rn,
    bits_f32,
    div_rn,
    exp_f32,
    f32_bits,
    mul_rn,
    sub_rn,
)
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.route_select import (
    TAKEN,
    THREADS,
    WARPS,
    key_of_score,
    largest_of_lanes,
    make_load_logits,
    make_take_best,
    odds_of,
    router_capacity,
    score_of_key,
    sum_of_lanes,
)

SCORINGS = ("softmax", "softmax_after_topk", "sigmoid_after_topk", "none")
"""Scorings of this kernel; it is told their position."""

_SOFTMAX, _SOFTMAX_AFTER, _SIGMOID_AFTER = (np.uint32(i) for i in range(3))
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@functools.cache
def make_route_token_by_logits(capacity: int) -> Any:
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
        num_experts,
        num_parts,
        has_bias,
        top_k,
        scoring,
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
        values = cuda.local.array(per_lane, np.float32)
        load_logits(values, logits, bias, row, lane, num_experts, num_parts, has_bias)
        best = TAKEN
        for i in unroll(range(per_lane)):
            keys[i] = TAKEN
            if np.uint32(lane + np.uint32(32 * i)) < num_experts:
                keys[i] = key_of_score(values[i])
            best = max(best, keys[i])
        largest = score_of_key(largest_of_lanes(best))

        total = _ZERO
        if scoring == _SOFTMAX:
            for i in unroll(range(per_lane)):
                if np.uint32(lane + np.uint32(32 * i)) < num_experts:
                    total = add_rn(total, odds_of(sub_rn(score_of_key(keys[i]), largest)))
            total = sum_of_lanes(total)

        j = np.uint32(0)
        while j < top_k:
            chosen, key = take_best(keys, lane)
            if np.uint32(j & np.uint32(31)) == lane:
                topk_ids[first + np.uint64(j)] = np.int32(chosen + shared_slot)
                scratch[np.uint32(base + j)] = key
            j = np.uint32(j + np.uint32(1))

        chosen_total = _ZERO
        j = lane
        while j < top_k:
            score = score_of_key(scratch[np.uint32(base + j)])
            if scoring == _SOFTMAX:
                score = div_rn(odds_of(sub_rn(score, largest)), total)
            elif scoring == _SOFTMAX_AFTER:
                score = odds_of(sub_rn(score, largest))
            elif scoring == _SIGMOID_AFTER:
                score = div_rn(_ONE, add_rn(_ONE, exp_f32(sub_rn(_ZERO, score))))
            scratch[np.uint32(base + j)] = f32_bits(score)
            chosen_total = add_rn(chosen_total, score)
            j = np.uint32(j + np.uint32(32))
        chosen_total = sum_of_lanes(chosen_total)

        j = lane
        while j < top_k:
            weight = bits_f32(scratch[np.uint32(base + j)])
            if renormalize != np.uint32(0) or scoring == _SOFTMAX_AFTER:
                weight = div_rn(weight, chosen_total)
            topk_weights[first + np.uint64(j)] = mul_rn(weight, factor)
            j = np.uint32(j + np.uint32(32))

    return route_token


@functools.cache
def make_route_logits(capacity: int) -> Kernel:
    """The kernel for up to `capacity` experts."""
    route_token = make_route_token_by_logits(capacity)

    @kernel(
        "global i32* topk_ids, global f32* topk_weights, global f32* logits, global f32* bias, "
        "u32 num_tokens, u32 num_experts, u32 num_parts, u32 has_bias, u32 top_k, u32 scoring, "
        "u32 renormalize, f32 factor, u32 shared_slot",
        threads=THREADS,
        shared_bytes=4 * WARPS * capacity,
        name=f"route_logits_{capacity}",
    )
    def route_logits(
        topk_ids,
        topk_weights,
        logits,
        bias,
        num_tokens,
        num_experts,
        num_parts,
        has_bias,
        top_k,
        scoring,
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
                num_experts,
                num_parts,
                has_bias,
                top_k,
                scoring,
                renormalize,
                factor,
                shared_slot,
            )

    return route_logits


def launch_route_logits(
    executor: Executor,
    topk_ids: Any,
    topk_weights: Any,
    logits: Any,
    bias: Any,
    *,
    num_tokens: int,
    num_experts: int,
    num_parts: int,
    has_bias: bool,
    top_k: int,
    scoring: str,
    renormalize: bool,
    factor: float,
    shared_slot: bool,
    stream: Any = None,
) -> None:
    """Launch on flat arrays; at most `MAX_EXPERTS` experts. `scoring` is one of `SCORINGS`."""
    make_route_logits(router_capacity(num_experts)).launch(
        executor,
        (-(-num_tokens // WARPS), 1, 1),
        topk_ids,
        topk_weights,
        logits,
        bias,
        num_tokens,
        num_experts,
        num_parts,
        int(has_bias),
        top_k,
        SCORINGS.index(scoring),
        int(renormalize),
        factor,
        int(shared_slot),
        stream=stream,
    )
