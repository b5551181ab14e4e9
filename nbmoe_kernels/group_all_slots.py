"""Counts the slots of all blocks, in every block: the steps of `group_slots` with many blocks.

An expert has `copies` counters, one a lane if there is room for them, so that lanes do not wait for
each other. There are two of each: for slots before the block's own, and for the others. One more
"expert" counts the slots of none, so that no lane has a branch of its own.
"""

from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.atomics import reduction
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.warp import reduce_lanes
from nbmoe_kernels.group_layout import THREADS, WARPS, Layout, load_expert

_BATCH, _TAIL = 16, 8
"""Slots that a thread asks for at once, of a whole batch and of the rest."""
_BATCH_SLOTS = THREADS * _BATCH
_SUMS = 4
"""Experts that a warp sums at once."""
_SUM_WORDS = 2 * _SUMS

add_to = reduction("add", space="shared", scope="cta")
sum_of_lanes = reduce_lanes("add")


def make_all_slots(layout: Layout) -> tuple[Any, Any, Any]:
    """The device functions of the steps clear, count and sum, with equal parameters."""
    copies = layout.copies
    starts_at, before_at = np.uint32(layout.starts), np.uint32(layout.before)
    counters_at = np.uint32(layout.counters)

    @device_function
    def clear_all(words, ids, thread, num_slots, num_experts, own_first):
        word = thread
        while word < np.uint32(np.uint32(2 * copies) * np.uint32(num_experts + np.uint32(1))):
            words[np.uint32(counters_at + word)] = np.uint32(0)
            word = np.uint32(word + np.uint32(THREADS))

    @device_function
    def count_one(words, expert, num_experts, side_at, copy):
        row = np.uint32(min(expert, num_experts) * np.uint32(copies))
        add_to(words, np.uint32(np.uint32(side_at + copy) + row), np.uint32(1))

    @device_function
    def count_all(words, ids, thread, num_slots, num_experts, own_first):
        copy = np.uint32(thread & np.uint32(copies - 1))
        side_words = np.uint32(np.uint32(num_experts + np.uint32(1)) * np.uint32(copies))
        others_at = np.uint32(counters_at + side_words)
        batch = cuda.local.array(_BATCH, np.uint32)
        # Whole batches: the next one, or the last again, is asked for before one is counted.
        whole = np.uint32(num_slots // np.uint32(_BATCH_SLOTS))
        first = np.uint32(0)
        if whole != np.uint32(0):
            for i in unroll(range(_BATCH)):
                batch[i] = np.uint32(ids[np.uint64(thread) + np.uint64(THREADS * i)])
            end = np.uint32(whole * np.uint32(_BATCH_SLOTS))
            last = np.uint32(end - np.uint32(_BATCH_SLOTS))
            while first < end:
                ahead = min(np.uint32(first + np.uint32(_BATCH_SLOTS)), last)
                at = np.uint64(np.uint32(ahead + thread))
                for i in unroll(range(_BATCH)):
                    expert = batch[i]
                    batch[i] = np.uint32(ids[at + np.uint64(THREADS * i)])
                    side_at = others_at
                    if np.uint32(first + np.uint32(THREADS * i)) < own_first:
                        side_at = counters_at
                    count_one(words, expert, num_experts, side_at, copy)
                first = np.uint32(first + np.uint32(_BATCH_SLOTS))
        while first < num_slots:
            for i in unroll(range(_TAIL)):
                slot = np.uint32(np.uint32(first + thread) + np.uint32(THREADS * i))
                batch[i] = load_expert(ids, slot, num_slots)
            for i in unroll(range(_TAIL)):
                side_at = others_at
                if np.uint32(first + np.uint32(THREADS * i)) < own_first:
                    side_at = counters_at
                count_one(words, batch[i], num_experts, side_at, copy)
            first = np.uint32(first + np.uint32(THREADS * _TAIL))

    @device_function
    def sum_all(words, ids, thread, num_slots, num_experts, own_first):
        lane = np.uint32(thread & np.uint32(31))
        side_words = np.uint32(np.uint32(num_experts + np.uint32(1)) * np.uint32(copies))
        counts = cuda.local.array(_SUM_WORDS, np.uint32)
        first = np.uint32(thread >> np.uint32(5))
        while first < num_experts:
            for i in unroll(range(_SUMS)):
                # Past the last expert is the count of none, which is not used.
                expert = min(np.uint32(first + np.uint32(WARPS * i)), num_experts)
                row = np.uint32(np.uint32(expert * np.uint32(copies)) + lane)
                at = np.uint32(counters_at + row)
                counts[2 * i] = np.uint32(0)
                counts[2 * i + 1] = np.uint32(0)
                if lane < np.uint32(copies):
                    counts[2 * i] = words[at]
                    counts[2 * i + 1] = words[np.uint32(at + side_words)]
            for i in unroll(range(_SUMS)):
                expert = np.uint32(first + np.uint32(WARPS * i))
                before = sum_of_lanes(counts[2 * i])
                others = sum_of_lanes(counts[2 * i + 1])
                if lane == np.uint32(0) and expert < num_experts:
                    words[np.uint32(before_at + expert)] = before
                    words[np.uint32(starts_at + expert)] = np.uint32(before + others)
            first = np.uint32(first + np.uint32(WARPS * _SUMS))

    return clear_all, count_all, sum_all
