"""moe_create_indices: from each token's expert ids to rows grouped by expert.

Outputs, with M = tokens * top_k source slots in token-major order and E experts:

    expert_start_indices[e]  rows of all experts before e              (E + 1,) u32
    token_expert_order[p]    source slot of grouped row p              (M,) u32
    restore_token_order[i]   grouped row of source slot i              (M,) u32
    expert_ids[e]            e                                         (E,) i32
    expert_usage_stats       largest expert's rows, E                  (2,) u32
    scales_offset[e]         128-row tiles before e, minus start // 128 (E,) u32

The order is stable: inside an expert, rows keep the order of their source slots. A slot whose id is
not in 0..E-1 (-1 by convention) belongs to no expert: its restore is 0xFFFFFFFF, as is the tail of
token_expert_order.

Method and synchronisation: see `group_slots`.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.group_layout import (
    MAX_EXPERTS,
    NOWHERE,
    THREADS,
    experts_capacity,
    layout_of,
)
from nbmoe_kernels.group_slots import make_group_slots
from nbmoe_kernels.kernel import Executor, Kernel, kernel

__all__ = [
    "MAX_EXPERTS",
    "NOWHERE",
    "index_grid",
    "launch_create_indices",
    "make_create_indices",
]

MAX_BLOCKS = 64
"""Each block counts all slots, so more of them are no faster."""
ONE_BLOCK_SLOTS = 1024
"""Up to so many, one block places its slots sooner than many count all."""


@functools.cache
def make_create_indices(capacity: int, many_blocks: bool = False) -> Kernel:
    """The kernel for up to ``capacity`` experts, for a grid of one block or of any number."""
    group_slots = make_group_slots(capacity, many_blocks)
    blocks = "many_" if many_blocks else ""

    @kernel(
        "global u32* token_expert_order, global u32* expert_start_indices, "
        "global u32* restore_token_order, global i32* expert_ids, global u32* expert_usage_stats, "
        "global u32* scales_offset, global i32* topk_ids, u32 num_slots, u32 num_experts, "
        "u32 groups_per_warp",
        threads=THREADS,
        shared_bytes=layout_of(capacity, many_blocks).nbytes,
        name=f"moe_create_indices_{blocks}{capacity}",
    )
    def moe_create_indices(
        token_expert_order,
        expert_start_indices,
        restore_token_order,
        expert_ids,
        expert_usage_stats,
        scales_offset,
        topk_ids,
        num_slots,
        num_experts,
        groups_per_warp,
    ):
        words = cuda.shared.array(0, np.uint32, alignment=16)
        group_slots(
            words,
            token_expert_order,
            expert_start_indices,
            restore_token_order,
            expert_ids,
            expert_usage_stats,
            scales_offset,
            topk_ids,
            num_slots,
            num_experts,
            groups_per_warp,
        )

    return moe_create_indices


def index_grid(num_slots: int) -> tuple[int, int]:
    """(blocks, groups of 32 slots for each of their warps)."""
    if num_slots <= ONE_BLOCK_SLOTS:
        return 1, -(-num_slots // THREADS)
    groups_per_warp = -(-num_slots // (THREADS * MAX_BLOCKS))
    return -(-num_slots // (THREADS * groups_per_warp)), groups_per_warp


def launch_create_indices(
    executor: Executor,
    token_expert_order: Any,
    expert_start_indices: Any,
    restore_token_order: Any,
    expert_ids: Any,
    expert_usage_stats: Any,
    scales_offset: Any,
    topk_ids: Any,
    *,
    num_slots: int,
    num_experts: int,
    stream: Any = None,
) -> None:
    """Launch on flat arrays; at most `MAX_EXPERTS` experts."""
    blocks, groups_per_warp = index_grid(num_slots)
    make_create_indices(experts_capacity(num_experts), blocks > 1).launch(
        executor,
        (blocks, 1, 1),
        token_expert_order,
        expert_start_indices,
        restore_token_order,
        expert_ids,
        expert_usage_stats,
        scales_offset,
        topk_ids,
        num_slots,
        num_experts,
        groups_per_warp,
        stream=stream,
    )
