"""`search.find_slot` by a whole warp: one round trip to memory for 128 slots instead of seven."""

import numpy as np

from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.warp import ballot, count_bits
from nbmoe_kernels.search import TILE_ROWS, first_tile

_ZERO, _ONE = np.uint32(0), np.uint32(1)
_GROUPS = 4
"""Groups of 32 slots whose offsets are loaded together."""


@device_function
def count_slots(row_offsets, scales_offsets, num_active, tile, lane):
    """Slots whose first tile is not after ``tile``; 0 of no slots.

    All lanes of a warp call it. First tiles ascend, so once a slot's is after ``tile`` all are.
    """
    count = _ZERO
    group = _ZERO
    is_open = True
    while is_open:
        for i in unroll(range(_GROUPS)):
            slot = np.uint32(np.uint32(group + np.uint32(32 * i)) + lane)
            is_before = _ZERO
            if slot < num_active and first_tile(row_offsets, scales_offsets, slot) <= tile:
                is_before = _ONE
            count = np.uint32(count + count_bits(ballot(is_before)))
        group = np.uint32(group + np.uint32(32 * _GROUPS))
        is_open = count == group and group < num_active
    return count


@device_function
def locate_tile(row_offsets, scales_offsets, num_active, tile, lane):
    """(slot, first row, rows): the owner of a tile, the tile's first row, the slot's rows from
    there on; 0 rows if the slot ends before. As `search.locate_rows`."""
    before = count_slots(row_offsets, scales_offsets, num_active, tile, lane)
    slot = np.uint32(before - _ONE)
    start = row_offsets[np.uint64(slot)]
    count = np.uint32(row_offsets[np.uint64(slot) + np.uint64(1)] - start)
    row = np.uint32(np.uint32(tile - first_tile(row_offsets, scales_offsets, slot)) * TILE_ROWS)
    rows = _ZERO
    if row < count:
        rows = np.uint32(count - row)
    return slot, np.uint32(start + row), rows
