"""Which expert slot owns a 128-row tile.

Rows are packed without gaps, but every slot's scales start on a fresh 128-row tile: slot s owns the
tiles from `row_offsets[s] // 128 + scales_offsets[s]` on, one for every 128 of its rows.
"""

import numpy as np

from nbmoe_kernels.device.op import device_function

TILE_ROWS = np.uint32(128)


@device_function
def first_tile(row_offsets, scales_offsets, slot):
    """The first tile of a slot."""
    start = np.uint32(row_offsets[np.uint64(slot)] >> np.uint32(7))
    return np.uint32(start + scales_offsets[np.uint64(slot)])


@device_function
def find_slot(row_offsets, scales_offsets, num_active, tile):
    """The last slot whose first tile is not after ``tile``.

    Empty slots share their first tile with the next slot that has rows, so the last one is right;
    a tile past its rows belongs to nobody.
    """
    low = np.uint32(0)
    high = num_active
    while np.uint32(low + np.uint32(1)) < high:
        middle = np.uint32(np.uint32(low + high) >> np.uint32(1))
        if first_tile(row_offsets, scales_offsets, middle) <= tile:
            low = middle
        else:
            high = middle
    return low


@device_function
def locate_rows(row_offsets, scales_offsets, num_active, tile, tile_row):
    """(slot, row, rows): the owner of ``tile``, the row at ``tile_row`` in it, the slot's rows from
    there on; 0 rows if the slot ends before."""
    slot = find_slot(row_offsets, scales_offsets, num_active, tile)
    start = row_offsets[np.uint64(slot)]
    count = np.uint32(row_offsets[np.uint64(slot) + np.uint64(1)] - start)
    tile_in_slot = np.uint32(tile - first_tile(row_offsets, scales_offsets, slot))
    row_in_slot = np.uint32(np.uint32(tile_in_slot * TILE_ROWS) + tile_row)
    rows = np.uint32(0)
    if row_in_slot < count:
        rows = np.uint32(count - row_in_slot)
    return slot, np.uint32(start + row_in_slot), rows
