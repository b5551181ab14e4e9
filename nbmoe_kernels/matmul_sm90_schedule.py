"""Which tiles there are, for persistent blocks that learn the groups' sizes on the device.

A slot's rows are cut into as few segments as the widest tile allows, equal to 8 rows, so that
little of a tile is padding. A tile is a segment times ``block_rows`` weight rows; tiles of a
segment are neighbours. Block b takes tiles b, b + G, b + 2 G, ... of a grid of G: it needs no
counter in memory, and any grid finishes.

The table in shared memory, u32, made by the first warp of every block:

    segments before slot s   [max_slots + 1]
    first row of slot s      [max_slots + 1]
    expert of slot s         [max_slots]
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.atomics import load
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.warp import shuffle_up
from nbmoe_kernels.prepared_tokens import token_base

_LANES = 32


def make_build_table(max_width: int, max_slots: int, table_at: int) -> Callable[..., Any]:
    """``build_table(words, expert_start, expert_ids, num_slots, num_rows)``, by a whole warp.

    ``words`` is shared memory, the table begins at its word ``table_at``. Without slots
    (``num_slots`` = 0) all rows belong to expert 0. A lane has ``max_slots`` / 32 neighbours, so
    that all loads are in flight together.
    """
    starts_at = table_at + max_slots + 1
    ids_at = starts_at + max_slots + 1
    share = max_slots // _LANES
    bounds = share + 1
    # Through the L2 cache: a line of an SM's own may be from before the routing.
    load_start = load("u32", order="relaxed")
    load_id = load("i32", order="relaxed")

    @device_function
    def build_table(words, expert_start, expert_ids, num_slots, num_rows):
        lane = np.uint32(np.uint32(cuda.threadIdx.x) & np.uint32(_LANES - 1))
        slots = max(num_slots, np.uint32(1))
        first = np.uint32(lane * np.uint32(share))
        start = cuda.local.array(bounds, np.uint32)
        expert = cuda.local.array(share, np.uint32)
        # Past the last slot the last loads are repeated: without branches none waits for another.
        if num_slots > np.uint32(0):
            for i in unroll(range(bounds)):
                slot = min(np.uint32(first + np.uint32(i)), num_slots)
                start[i] = load_start(expert_start, np.uint64(slot))
            for i in unroll(range(share)):
                slot = min(np.uint32(first + np.uint32(i)), np.uint32(num_slots - np.uint32(1)))
                expert[i] = np.uint32(load_id(expert_ids, np.uint64(slot)))
        else:
            for i in unroll(range(bounds)):
                is_first = np.uint32(first + np.uint32(i)) == np.uint32(0)
                start[i] = np.uint32(0) if is_first else num_rows
            for i in unroll(range(share)):
                expert[i] = np.uint32(0)
        total = np.uint32(0)
        for i in unroll(range(share)):
            slot = np.uint32(first + np.uint32(i))
            begin, end = min(start[i], num_rows), min(start[i + 1], num_rows)
            if slot < slots and end > begin:
                rows = np.uint32(end - begin)
                total = np.uint32(
                    total + np.uint32(rows + np.uint32(max_width - 1)) // np.uint32(max_width)
                )
        before = total
        for i in unroll(range(5)):
            lower = shuffle_up(before, np.uint32(1 << i))
            if lane >= np.uint32(1 << i):
                before = np.uint32(before + lower)
        before = np.uint32(before - total)
        for i in unroll(range(share)):
            slot = np.uint32(first + np.uint32(i))
            begin, end = min(start[i], num_rows), min(start[i + 1], num_rows)
            if slot < slots:
                words[np.uint32(np.uint32(table_at) + slot)] = before
                words[np.uint32(np.uint32(starts_at) + slot)] = begin
                words[np.uint32(np.uint32(ids_at) + slot)] = expert[i]
                if end > begin:
                    rows = np.uint32(end - begin)
                    before = np.uint32(
                        before + np.uint32(rows + np.uint32(max_width - 1)) // np.uint32(max_width)
                    )
                if slot == np.uint32(slots - np.uint32(1)):
                    words[np.uint32(np.uint32(table_at + 1) + slot)] = before
                    words[np.uint32(np.uint32(starts_at + 1) + slot)] = end

    return build_table


def make_find_tile(max_slots: int, table_at: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``num_segments(words, num_slots)`` and ``find_tile(words, segment, num_slots)``.

    ``find_tile`` returns the expert (i32, negative: masked), the segment's first row in the output,
    its first row in prepared tokens, and its number of rows.
    """
    starts_at = table_at + max_slots + 1
    ids_at = starts_at + max_slots + 1

    @device_function
    def num_segments(words, num_slots):
        slots = max(num_slots, np.uint32(1))
        return words[np.uint32(np.uint32(table_at) + slots)]

    @device_function
    def find_tile(words, segment, num_slots):
        low = np.uint32(0)
        high = max(num_slots, np.uint32(1))
        # The last slot with no more segments before it: empty ones before it are passed over.
        while np.uint32(high - low) > np.uint32(1):
            middle = np.uint32(np.uint32(low + high) >> np.uint32(1))
            if words[np.uint32(np.uint32(table_at) + middle)] <= segment:
                low = middle
            else:
                high = middle
        at = np.uint32(np.uint32(table_at) + low)
        before = words[at]
        count = np.uint32(words[np.uint32(at + np.uint32(1))] - before)
        start = words[np.uint32(np.uint32(starts_at) + low)]
        slot_rows = np.uint32(words[np.uint32(np.uint32(starts_at + 1) + low)] - start)
        # Eights of rows are dealt out evenly; the first segments take what remains.
        eights = np.uint32(np.uint32(slot_rows + np.uint32(7)) >> np.uint32(3))
        share = np.uint32(eights // count)
        rest = np.uint32(eights - np.uint32(share * count))
        index = np.uint32(segment - before)
        row = np.uint32(np.uint32(8) * np.uint32(np.uint32(index * share) + min(index, rest)))
        width = np.uint32(np.uint32(8) * share)
        if index < rest:
            width = np.uint32(width + np.uint32(8))
        rows = min(width, np.uint32(slot_rows - row))
        expert = np.int32(words[np.uint32(np.uint32(ids_at) + low)])
        token_row = np.uint32(token_base(start, low) + row)
        return expert, np.uint32(start + row), token_row, rows

    return num_segments, find_tile
