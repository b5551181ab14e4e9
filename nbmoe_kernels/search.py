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


@device_function
def _first_block(row_offsets, slot, block_rows):
    """The first row block of a slot: floor(start / block_rows) + min(slot, start).

    A slot with rows so has at least as many blocks as it fills, because its start rises by its
    rows and min(slot, start) by 1; and all slots together have no more than
    ceil(rows / block_rows) + min(slots, rows), which is what is launched.
    """
    start = row_offsets[np.uint64(slot)]
    return np.uint32(np.uint32(start // block_rows) + min(np.uint32(slot), np.uint32(start)))


@device_function
def locate_row_block(row_offsets, num_active, block, block_rows):
    """(slot, row, rows): the slot that owns a block of rows, the block's first row in the slot,
    the slot's rows from there on; 0 rows if the slot ends before.

    The last slot whose first block is not after ``block`` is the owner: empty slots before it
    share its first block or leave theirs to nobody.
    """
    low = np.uint32(0)
    high = num_active
    while np.uint32(low + np.uint32(1)) < high:
        middle = np.uint32(np.uint32(low + high) >> np.uint32(1))
        if _first_block(row_offsets, middle, block_rows) <= block:
            low = middle
        else:
            high = middle
    start = row_offsets[np.uint64(low)]
    count = np.uint32(row_offsets[np.uint64(low) + np.uint64(1)] - start)
    row = np.uint32(np.uint32(block - _first_block(row_offsets, low, block_rows)) * block_rows)
    rows = np.uint32(0)
    if row < count:
        rows = np.uint32(count - row)
    return low, row, rows


def row_blocks(num_rows: int, num_active: int, block_rows: int) -> int:
    """Blocks to launch for `num_rows` rows in `num_active` slots, whatever the routing."""
    return -(-num_rows // block_rows) + min(num_active, num_rows)
