"""Blocks of rows find their slots."""

import numpy as np
import pytest

from nbmoe_kernels.search import locate_row_block, row_blocks


@pytest.mark.parametrize("block_rows", [16, 128])
@pytest.mark.parametrize("seed", range(6))
def test_every_row_of_a_slot_has_one_block(block_rows, seed):
    """Whatever the routing: with empty slots, more slots than rows, rows that nobody owns."""
    rng = np.random.default_rng(seed)
    slots = int(rng.integers(1, 12))
    counts = rng.integers(0, (3, 3 * block_rows)[seed % 2], slots) * rng.integers(0, 2, slots)
    starts = np.cumsum([0, *counts]).astype(np.uint32)
    num_rows = int(starts[-1]) + seed
    owners = np.full(num_rows, -1)
    for block in range(row_blocks(num_rows, slots, block_rows)):
        slot, row, rows = locate_row_block(
            starts, np.uint32(slots), np.uint32(block), np.uint32(block_rows)
        )
        assert row % block_rows == 0 or not rows
        first = int(starts[slot]) + int(row)
        own = slice(first, first + min(int(rows), block_rows)) if rows else slice(0, 0)
        assert (owners[own] == -1).all()
        owners[own] = slot
        assert not rows or first + int(rows) == starts[slot + 1]
    assert (owners[: starts[-1]] == np.repeat(np.arange(slots), counts)).all()
    assert (owners[starts[-1] :] == -1).all()
