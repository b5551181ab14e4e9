"""route and create_indices in one launch, for few tokens: one block does both.

The operands and results are those of `route_logits` or `route_sigmoid` and of `create_indices`,
whose slots are the ids of all tokens.

Thread map: one block of 16 warps. Warp w routes tokens from `tokens_per_warp` * w on, one after
another; then the block places the slots as `group_slots` says.

Synchronisation: that of both parts, and a block barrier between them: slots are placed by other
warps than those that stored their ids, and counters lie where choices were kept.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.group_layout import THREADS, WARPS, experts_capacity, layout_of
from nbmoe_kernels.group_slots import make_group_slots
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.route_logits import SCORINGS, make_route_token_by_logits
from nbmoe_kernels.route_select import router_capacity
from nbmoe_kernels.route_sigmoid import group_lane_bits, make_route_token_by_sigmoid

MAX_CAPACITY = 512
MAX_TOKENS = 16
MAX_SLOTS = 1024

_OUTPUTS = (
    "global i32* topk_ids, global f32* topk_weights, global u32* token_expert_order, "
    "global u32* expert_start_indices, global u32* restore_token_order, global i32* expert_ids, "
    "global u32* expert_usage_stats, global u32* scales_offset, "
)
_SIZES = (
    "u32 num_tokens, u32 num_experts, u32 num_parts, u32 tokens_per_warp, u32 groups_per_warp, "
)


def fits(num_tokens: int, width: int, num_experts: int) -> bool:
    """Whether one block is faster than two launches, for `width` ids of a token."""
    small = num_tokens <= MAX_TOKENS and num_tokens * width <= MAX_SLOTS
    return small and router_capacity(num_experts) <= MAX_CAPACITY


@functools.cache
def make_route_logits_grouped(capacity: int) -> Kernel:
    """The kernel for softmax and what else chooses by logits, up to `capacity` experts."""
    route_token = make_route_token_by_logits(capacity)
    group_slots = make_group_slots(capacity, False)

    @kernel(
        f"{_OUTPUTS}global f32* logits, global f32* bias, {_SIZES}"
        "u32 has_bias, u32 top_k, u32 scoring, u32 renormalize, f32 factor, u32 shared_slot",
        threads=THREADS,
        shared_bytes=layout_of(capacity, False).nbytes,
        name=f"route_logits_grouped_{capacity}",
    )
    def route_logits_grouped(
        topk_ids,
        topk_weights,
        token_expert_order,
        expert_start_indices,
        restore_token_order,
        expert_ids,
        expert_usage_stats,
        scales_offset,
        logits,
        bias,
        num_tokens,
        num_experts,
        num_parts,
        tokens_per_warp,
        groups_per_warp,
        has_bias,
        top_k,
        scoring,
        renormalize,
        factor,
        shared_slot,
    ):
        words = cuda.shared.array(0, np.uint32, alignment=16)
        thread = np.uint32(cuda.threadIdx.x)
        lane = np.uint32(thread & np.uint32(31))
        warp = np.uint32(thread >> np.uint32(5))
        token = np.uint32(warp * tokens_per_warp)
        end = min(np.uint32(token + tokens_per_warp), num_tokens)
        while token < end:
            route_token(
                words,
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
            token = np.uint32(token + np.uint32(1))
        cuda.syncthreads()
        group_slots(
            words,
            token_expert_order,
            expert_start_indices,
            restore_token_order,
            expert_ids,
            expert_usage_stats,
            scales_offset,
            topk_ids,
            np.uint32(num_tokens * np.uint32(top_k + shared_slot)),
            np.uint32(num_experts + shared_slot),
            groups_per_warp,
        )

    return route_logits_grouped


@functools.cache
def make_route_sigmoid_grouped(capacity: int) -> Kernel:
    """The kernel for sigmoid, correction bias and groups of experts, up to `capacity` experts."""
    route_token = make_route_token_by_sigmoid(capacity)
    group_slots = make_group_slots(capacity, False)

    @kernel(
        f"{_OUTPUTS}global f32* logits, global f32* bias, global f32* correction_bias, {_SIZES}"
        "u32 has_bias, u32 has_correction, u32 top_k, u32 n_groups, u32 topk_group, "
        "u32 lane_bits, u32 renormalize, f32 factor, u32 shared_slot",
        threads=THREADS,
        shared_bytes=layout_of(capacity, False).nbytes,
        name=f"route_sigmoid_grouped_{capacity}",
    )
    def route_sigmoid_grouped(
        topk_ids,
        topk_weights,
        token_expert_order,
        expert_start_indices,
        restore_token_order,
        expert_ids,
        expert_usage_stats,
        scales_offset,
        logits,
        bias,
        correction_bias,
        num_tokens,
        num_experts,
        num_parts,
        tokens_per_warp,
        groups_per_warp,
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
        words = cuda.shared.array(0, np.uint32, alignment=16)
        thread = np.uint32(cuda.threadIdx.x)
        lane = np.uint32(thread & np.uint32(31))
        warp = np.uint32(thread >> np.uint32(5))
        token = np.uint32(warp * tokens_per_warp)
        end = min(np.uint32(token + tokens_per_warp), num_tokens)
        while token < end:
            route_token(
                words,
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
            token = np.uint32(token + np.uint32(1))
        cuda.syncthreads()
        group_slots(
            words,
            token_expert_order,
            expert_start_indices,
            restore_token_order,
            expert_ids,
            expert_usage_stats,
            scales_offset,
            topk_ids,
            np.uint32(num_tokens * np.uint32(top_k + shared_slot)),
            np.uint32(num_experts + shared_slot),
            groups_per_warp,
        )

    return route_sigmoid_grouped


def _grid(num_tokens: int, width: int) -> tuple[int, int]:
    """(tokens, groups of 32 slots) of each warp."""
    return -(-num_tokens // WARPS), -(-num_tokens * width // THREADS)


def launch_route_logits_grouped(
    executor: Executor,
    topk_ids: Any,
    topk_weights: Any,
    indices: tuple[Any, ...],
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
    """Launch on flat arrays; `indices` are those of `launch_create_indices`, in its order."""
    make_route_logits_grouped(_capacity(num_experts + shared_slot)).launch(
        executor,
        (1, 1, 1),
        topk_ids,
        topk_weights,
        *indices,
        logits,
        bias,
        num_tokens,
        num_experts,
        num_parts,
        *_grid(num_tokens, top_k + shared_slot),
        int(has_bias),
        top_k,
        SCORINGS.index(scoring),
        int(renormalize),
        factor,
        int(shared_slot),
        stream=stream,
    )


def launch_route_sigmoid_grouped(
    executor: Executor,
    topk_ids: Any,
    topk_weights: Any,
    indices: tuple[Any, ...],
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
    """Launch on flat arrays; `indices` are those of `launch_create_indices`, in its order."""
    make_route_sigmoid_grouped(_capacity(num_experts + shared_slot)).launch(
        executor,
        (1, 1, 1),
        topk_ids,
        topk_weights,
        *indices,
        logits,
        bias,
        correction_bias,
        num_tokens,
        num_experts,
        num_parts,
        *_grid(num_tokens, top_k + shared_slot),
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


def _capacity(num_experts: int) -> int:
    return max(router_capacity(num_experts), experts_capacity(num_experts))
