"""Counts source slots by expert and places them: what the kernels that make indices share.

The grid's blocks, and in a block its 16 warps, own contiguous segments of slots, `groups_per_warp`
groups of 32 a warp. So ranks by (block, warp, position in the segment) are ranks by slot. Every
block finds where its slots go without a word from the others: with more than one block, each counts
all slots, those before its own apart.

    clear    counters
    count    a slot adds 1 to its warp's counter of its expert, and with many blocks each slot of
             the grid adds 1 to a counter of its expert (sums do not depend on an order)
    sum      a thread an expert: exclusive sums over warps; with many blocks a warp an expert: sums
             of the counters of all slots
    scan     warp 0: exclusive sums over experts, of rows and of 128-row tiles
    place    a slot's row is its expert's start, plus the slots of earlier blocks and warps, plus
             its rank in the warp: lanes with the same expert find each other (`match_any`)

Shared memory: see `group_layout`.

Synchronisation: a block barrier (512 threads) after each step. Counting adds atomically. Inside a
warp, when it places more than one group, `sync_warp` separates all lanes' reads of a counter from
the lowest lane's update and that from the next reads.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.atomics import reduction
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.warp import (
    count_bits,
    match_any,
    reduce_lanes,
    shuffle_from,
    shuffle_up,
    sync_warp,
)
from nbmoe_kernels.group_all_slots import make_all_slots
from nbmoe_kernels.group_layout import NOWHERE, THREADS, WARPS, layout_of, load_expert

_BATCH = 4
"""Own slots that a thread asks for at once."""

add_to = reduction("add", space="shared", scope="cta")
largest_of_lanes = reduce_lanes("max")


@device_function
def nothing(words, ids, thread, num_slots, num_experts, own_first):
    """What one block does to know of the others' slots."""


@functools.cache
def make_group_slots(capacity: int, many_blocks: bool) -> Any:
    """The device function for a capacity, for a grid of one block or of any number."""
    layout = layout_of(capacity, many_blocks)
    experts_per_lane = capacity // 32
    clear_all = count_all = sum_all = nothing
    if many_blocks:
        clear_all, count_all, sum_all = make_all_slots(layout)
    starts_at, before_at, tiles_at = (
        np.uint32(at) for at in (layout.starts, layout.before, layout.tiles)
    )
    total_at, largest_at = np.uint32(layout.sums), np.uint32(layout.sums + 1)

    @device_function
    def sum_warps(words, thread, num_experts):
        """Own counters become exclusive sums over warps, and with one block each expert's rows."""
        counts = cuda.local.array(WARPS, np.uint32)
        expert = thread
        while expert < num_experts:
            at = expert
            for w in unroll(range(WARPS)):
                counts[w] = words[at]
                at = np.uint32(at + num_experts)
            total = np.uint32(0)
            at = expert
            for w in unroll(range(WARPS)):
                words[at] = total
                total = np.uint32(total + counts[w])
                at = np.uint32(at + num_experts)
            if not many_blocks:
                words[np.uint32(before_at + expert)] = np.uint32(0)
                words[np.uint32(starts_at + expert)] = total
            expert = np.uint32(expert + np.uint32(THREADS))

    @device_function
    def scan_experts(words, lane, num_experts):
        """Rows of experts become starts, past the slots of earlier blocks; also tiles and sums."""
        rows = cuda.local.array(experts_per_lane, np.uint32)
        first = np.uint32(lane * np.uint32(experts_per_lane))
        rows_sum = np.uint32(0)
        tiles_sum = np.uint32(0)
        most = np.uint32(0)
        for i in unroll(range(experts_per_lane)):
            expert = np.uint32(first + np.uint32(i))
            rows[i] = np.uint32(0)
            if expert < num_experts:
                rows[i] = words[np.uint32(starts_at + expert)]
            most = max(most, rows[i])
            rows_sum = np.uint32(rows_sum + rows[i])
            tiles_sum = np.uint32(
                tiles_sum + np.uint32(np.uint32(rows[i] + np.uint32(127)) >> np.uint32(7))
            )
        most = largest_of_lanes(most)
        row = rows_sum
        tile = tiles_sum
        for step in unroll(range(5)):
            distance = np.uint32(1 << step)
            more_rows = shuffle_up(row, distance)
            more_tiles = shuffle_up(tile, distance)
            if lane >= distance:
                row = np.uint32(row + more_rows)
                tile = np.uint32(tile + more_tiles)
        total = shuffle_from(row, np.uint32(31))
        row = np.uint32(row - rows_sum)
        tile = np.uint32(tile - tiles_sum)
        for i in unroll(range(experts_per_lane)):
            expert = np.uint32(first + np.uint32(i))
            if expert < num_experts:
                words[np.uint32(starts_at + expert)] = row
                words[np.uint32(tiles_at + expert)] = tile
            row = np.uint32(row + rows[i])
            tile = np.uint32(tile + np.uint32(np.uint32(rows[i] + np.uint32(127)) >> np.uint32(7)))
        if lane == np.uint32(0):
            words[total_at] = total
            words[largest_at] = most

    @device_function
    def place(words, order, restore, ids, lane, warp_counts, first, groups, num_slots, num_experts):
        """The rows of a warp's slots."""
        lower_lanes = np.uint32(np.uint32(np.uint32(1) << lane) - np.uint32(1))
        group = np.uint32(0)
        while group < groups:
            slot = np.uint32(np.uint32(first + np.uint32(group * np.uint32(32))) + lane)
            expert = load_expert(ids, slot, num_slots)
            same = match_any(expert)
            rank = count_bits(np.uint32(same & lower_lanes))
            group = np.uint32(group + np.uint32(1))
            own_at = np.uint32(warp_counts + expert)
            row = NOWHERE
            if expert < num_experts:
                start = np.uint32(
                    words[np.uint32(starts_at + expert)] + words[np.uint32(before_at + expert)]
                )
                row = np.uint32(np.uint32(start + words[own_at]) + rank)
                order[np.uint64(row)] = slot
            if slot < num_slots:
                restore[np.uint64(slot)] = row
            if group < groups:
                sync_warp()
                if expert < num_experts and rank == np.uint32(0):
                    words[own_at] = np.uint32(words[own_at] + count_bits(same))
                sync_warp()

    @device_function
    def group_slots(
        words,
        token_expert_order,
        expert_start_indices,
        restore_token_order,
        expert_ids,
        expert_usage_stats,
        scales_offset,
        ids,
        num_slots,
        num_experts,
        groups_per_warp,
    ):
        thread = np.uint32(cuda.threadIdx.x)
        block = np.uint32(cuda.blockIdx.x)
        lane = np.uint32(thread & np.uint32(31))
        warp = np.uint32(thread >> np.uint32(5))
        warp_counts = np.uint32(warp * num_experts)
        own_first = np.uint32(block * np.uint32(groups_per_warp * np.uint32(THREADS)))
        first = np.uint32(own_first + np.uint32(warp * np.uint32(groups_per_warp * np.uint32(32))))

        word = thread
        while word < np.uint32(np.uint32(WARPS) * num_experts):
            words[word] = np.uint32(0)
            word = np.uint32(word + np.uint32(THREADS))
        clear_all(words, ids, thread, num_slots, num_experts, own_first)
        cuda.syncthreads()

        batch = cuda.local.array(_BATCH, np.uint32)
        group = np.uint32(0)
        while group < groups_per_warp:
            for i in unroll(range(_BATCH)):
                nth = np.uint32(group + np.uint32(i))
                slot = np.uint32(np.uint32(first + np.uint32(nth * np.uint32(32))) + lane)
                batch[i] = load_expert(ids, slot, num_slots)
                if nth >= groups_per_warp:
                    batch[i] = NOWHERE
            for i in unroll(range(_BATCH)):
                if batch[i] < num_experts:
                    add_to(words, np.uint32(warp_counts + batch[i]), np.uint32(1))
            group = np.uint32(group + np.uint32(_BATCH))
        count_all(words, ids, thread, num_slots, num_experts, own_first)
        cuda.syncthreads()

        sum_warps(words, thread, num_experts)
        sum_all(words, ids, thread, num_slots, num_experts, own_first)
        cuda.syncthreads()

        if warp == np.uint32(0):
            scan_experts(words, lane, num_experts)
        cuda.syncthreads()

        place(
            words,
            token_expert_order,
            restore_token_order,
            ids,
            lane,
            warp_counts,
            first,
            groups_per_warp,
            num_slots,
            num_experts,
        )
        total = words[total_at]
        blocks = np.uint32(1)
        if many_blocks:
            blocks = np.uint32(cuda.gridDim.x)
        row = np.uint32(total + np.uint32(np.uint32(block * np.uint32(THREADS)) + thread))
        while row < num_slots:
            token_expert_order[np.uint64(row)] = NOWHERE
            row = np.uint32(row + np.uint32(blocks * np.uint32(THREADS)))
        if block == np.uint32(0):
            expert = thread
            while expert < num_experts:
                start = words[np.uint32(starts_at + expert)]
                offset = np.uint32(
                    words[np.uint32(tiles_at + expert)] - np.uint32(start >> np.uint32(7))
                )
                expert_start_indices[np.uint64(expert)] = start
                expert_ids[np.uint64(expert)] = np.int32(expert)
                scales_offset[np.uint64(expert)] = offset
                expert = np.uint32(expert + np.uint32(THREADS))
            if thread == np.uint32(0):
                expert_start_indices[np.uint64(num_experts)] = total
                expert_usage_stats[np.uint64(0)] = words[largest_at]
                expert_usage_stats[np.uint64(1)] = num_experts

    return group_slots
