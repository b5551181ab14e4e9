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

Method: one block of 16 warps. Warp w owns a contiguous segment of slots, so ranks by (warp,
position in the segment) are ranks by slot.

    count    each warp counts its segment per expert, 32 slots at a time: lanes with the same expert
             find each other (`match_any`), the lowest adds their number
    scan     thread e turns expert e's counts into exclusive sums over warps; warp 0 scans the
             totals over experts
    scatter  each warp walks its segment again; a slot's row is its expert's start, plus the earlier
             warps' count, plus its rank inside the warp so far

Shared memory (u32 words): counts [warp][expert], then totals [expert], which become starts.

Synchronisation: block barriers (512 threads) after clearing, counting, summing and scanning. Inside
a warp, `sync_warp` separates all lanes' reads of a counter from the lowest lane's update and that
from the next reads.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.op import unroll
from nbmoe_kernels.device.warp import (
    count_bits,
    match_any,
    shuffle_from,
    shuffle_up,
    sync_warp,
)
from nbmoe_kernels.kernel import Executor, Kernel, kernel

WARPS = 16
THREADS = 32 * WARPS
MAX_EXPERTS = 1024
NOWHERE = np.uint32(0xFFFFFFFF)


@functools.cache
def make_create_indices(capacity: int) -> Kernel:
    """The kernel for up to ``capacity`` experts; shared memory grows with it."""
    totals_at = np.uint32(WARPS * capacity)

    @kernel(
        "global u32* token_expert_order, global u32* expert_start_indices, "
        "global u32* restore_token_order, global i32* expert_ids, global u32* expert_usage_stats, "
        "global u32* scales_offset, global i32* topk_ids, u32 num_slots, u32 num_experts",
        threads=THREADS,
        shared_bytes=4 * (WARPS + 1) * capacity,
        name=f"moe_create_indices_{capacity}",
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
    ):
        counts = cuda.shared.array(0, np.uint32, alignment=16)
        thread = np.uint32(cuda.threadIdx.x)
        lane = np.uint32(thread & np.uint32(31))
        warp = np.uint32(thread >> np.uint32(5))
        lower_lanes = np.uint32(np.uint32(np.uint32(1) << lane) - np.uint32(1))
        warp_counts = np.uint32(warp * num_experts)

        word = thread
        while word < np.uint32(np.uint32(WARPS) * num_experts):
            counts[word] = np.uint32(0)
            word = np.uint32(word + np.uint32(THREADS))
        cuda.syncthreads()

        groups = np.uint32(np.uint32(num_slots + np.uint32(31)) >> np.uint32(5))
        groups_per_warp = np.uint32(np.uint32(groups + np.uint32(WARPS - 1)) // np.uint32(WARPS))
        first = np.uint32(np.uint32(warp * groups_per_warp) * np.uint32(32))

        for group in range(groups_per_warp):
            slot = np.uint32(np.uint32(first + np.uint32(np.uint32(group) * np.uint32(32))) + lane)
            expert = NOWHERE
            if slot < num_slots:
                expert = np.uint32(topk_ids[np.uint64(slot)])
            same = match_any(expert)
            if expert < num_experts and np.uint32(same & lower_lanes) == np.uint32(0):
                at = np.uint32(warp_counts + expert)
                counts[at] = np.uint32(counts[at] + count_bits(same))
            # The next group's lowest lane of an expert may be another one.
            sync_warp()
        cuda.syncthreads()

        expert = thread
        while expert < num_experts:
            total = np.uint32(0)
            for w in range(WARPS):
                at = np.uint32(np.uint32(np.uint32(w) * num_experts) + expert)
                here = counts[at]
                counts[at] = total
                total = np.uint32(total + here)
            counts[np.uint32(totals_at + expert)] = total
            expert = np.uint32(expert + np.uint32(THREADS))
        cuda.syncthreads()

        if warp == np.uint32(0):
            rows_before = np.uint32(0)
            tiles_before = np.uint32(0)
            largest = np.uint32(0)
            chunks = np.uint32(np.uint32(num_experts + np.uint32(31)) >> np.uint32(5))
            for chunk in range(chunks):
                expert = np.uint32(np.uint32(np.uint32(chunk) * np.uint32(32)) + lane)
                rows = np.uint32(0)
                if expert < num_experts:
                    rows = counts[np.uint32(totals_at + expert)]
                tiles = np.uint32(np.uint32(rows + np.uint32(127)) >> np.uint32(7))
                rows_sum = rows
                tiles_sum = tiles
                most = rows
                for step in unroll(range(5)):
                    distance = np.uint32(1 << step)
                    more_rows = shuffle_up(rows_sum, distance)
                    more_tiles = shuffle_up(tiles_sum, distance)
                    other = shuffle_up(most, distance)
                    if lane >= distance:
                        rows_sum = np.uint32(rows_sum + more_rows)
                        tiles_sum = np.uint32(tiles_sum + more_tiles)
                        most = max(most, other)
                if expert < num_experts:
                    start = np.uint32(np.uint32(rows_before + rows_sum) - rows)
                    first_tile = np.uint32(np.uint32(tiles_before + tiles_sum) - tiles)
                    counts[np.uint32(totals_at + expert)] = start
                    expert_start_indices[np.uint64(expert)] = start
                    expert_ids[np.uint64(expert)] = np.int32(expert)
                    scales_offset[np.uint64(expert)] = np.uint32(
                        first_tile - np.uint32(start >> np.uint32(7))
                    )
                last = np.uint32(31)
                largest = max(largest, shuffle_from(most, last))
                rows_before = np.uint32(rows_before + shuffle_from(rows_sum, last))
                tiles_before = np.uint32(tiles_before + shuffle_from(tiles_sum, last))
            if lane == np.uint32(0):
                expert_start_indices[np.uint64(num_experts)] = rows_before
                expert_usage_stats[np.uint64(0)] = largest
                expert_usage_stats[np.uint64(1)] = num_experts
        cuda.syncthreads()

        for group in range(groups_per_warp):
            slot = np.uint32(np.uint32(first + np.uint32(np.uint32(group) * np.uint32(32))) + lane)
            expert = NOWHERE
            if slot < num_slots:
                expert = np.uint32(topk_ids[np.uint64(slot)])
            same = match_any(expert)
            rank = count_bits(np.uint32(same & lower_lanes))
            row = NOWHERE
            if expert < num_experts:
                row = np.uint32(
                    np.uint32(
                        counts[np.uint32(totals_at + expert)]
                        + counts[np.uint32(warp_counts + expert)]
                    )
                    + rank
                )
                token_expert_order[np.uint64(row)] = slot
            if slot < num_slots:
                restore_token_order[np.uint64(slot)] = row
            sync_warp()
            if expert < num_experts and rank == np.uint32(0):
                at = np.uint32(warp_counts + expert)
                counts[at] = np.uint32(counts[at] + count_bits(same))
            sync_warp()

        row = np.uint32(expert_start_indices[np.uint64(num_experts)] + thread)
        while row < num_slots:
            token_expert_order[np.uint64(row)] = NOWHERE
            row = np.uint32(row + np.uint32(THREADS))

    return moe_create_indices


def indices_capacity(num_experts: int) -> int:
    """Smallest kernel capacity that holds ``num_experts``: 64 times a power of two."""
    capacity = 64
    while capacity < num_experts:
        capacity *= 2
    return capacity


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
    make_create_indices(indices_capacity(num_experts)).launch(
        executor,
        (1, 1, 1),
        token_expert_order,
        expert_start_indices,
        restore_token_order,
        expert_ids,
        expert_usage_stats,
        scales_offset,
        topk_ids,
        num_slots,
        num_experts,
        stream=stream,
    )
