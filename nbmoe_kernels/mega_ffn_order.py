"""In which order the tiles of a MegaFFN are done.

Segments are parts of a slot's rows, those of `matmul_sm90_schedule` on Hopper and else those of
`nbmoe_kernels.search.locate_row_block`; U and D are the tiles of a segment in the gate/up and in
the down matmul. C segments make a chunk, and the order is

    up(0)  up(1) down(0)  up(2) down(1)  ...  up(last) down(last - 1)  down(last)

chunk by chunk, segments and then tiles ascending. Blocks draw tiles in this order
(`mega_ffn_counters`). A down tile waits for the gate/up tiles of its segment, all of which come
before it. Between them lies a chunk, two tiles a block or more, so that waiting is rare, and what
is between the matmuls is read soon after it was written. With few segments there is one chunk.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from nbmoe_kernels.device.op import device_function

TILE_BITS, SEGMENT_BITS = 12, 19
"""Of a tile's number in its segment, and of a segment's, in the word that tells both."""
DOWN = 1 << 31
"""Set in that word where the tile is one of the down matmul."""
_PLENTY = 2
"""Of a block, tiles that are left."""
_TILES_BETWEEN = 2
"""Of a block, from a segment's gate/up tiles to its down tiles."""


@device_function
def tile_of(word):
    """The tile's number in its segment."""
    return np.uint32(word & np.uint32((1 << TILE_BITS) - 1))


@device_function
def segment_of(word):
    """The tile's segment."""
    return np.uint32(np.uint32(word >> np.uint32(TILE_BITS)) & np.uint32((1 << SEGMENT_BITS) - 1))


@device_function
def is_down_tile(word):
    """Whether the tile is one of the down matmul."""
    return np.uint32(word & np.uint32(DOWN)) != np.uint32(0)


@device_function
def _word(segment, tile):
    return np.uint32(np.uint32(segment << np.uint32(TILE_BITS)) | tile)


@device_function
def chunk_segments(grid, up_tiles):
    """C, for a grid of so many blocks."""
    between = np.uint32(np.uint32(_TILES_BETWEEN) * grid)
    return np.uint32(np.uint32(between + np.uint32(up_tiles - np.uint32(1))) // up_tiles)


@device_function
def are_plenty(index, items, grid):
    """Whether so many tiles are left that a block may draw its next one before it needs it.

    Of the last tiles it would take one that another block could do at once.
    """
    return np.uint32(items - index) > np.uint32(np.uint32(_PLENTY) * grid)


def make_find_item() -> Callable[..., Any]:
    """``find_item(index, segments, chunk, up_tiles, down_tiles) -> word``.

    ``index`` is less than segments * (U + D).
    """

    @device_function
    def find_item(index, segments, chunk, up_tiles, down_tiles):
        first = np.uint32(min(chunk, segments) * up_tiles)
        if index < first:
            segment = np.uint32(index // up_tiles)
            return _word(segment, np.uint32(index - np.uint32(segment * up_tiles)))
        index = np.uint32(index - first)
        chunks = np.uint32(np.uint32(segments + np.uint32(chunk - np.uint32(1))) // chunk)
        period = np.uint32(chunk * np.uint32(up_tiles + down_tiles))
        # The last period has the down tiles of two chunks, which follow each other.
        last = np.uint32(max(chunks, np.uint32(2)) - np.uint32(2))
        done = min(np.uint32(index // period), last)
        index = np.uint32(index - np.uint32(done * period))
        start = np.uint32(done * chunk)
        ahead = np.uint32(start + chunk)
        count = min(chunk, np.uint32(segments - ahead)) if segments > ahead else np.uint32(0)
        up_count = np.uint32(count * up_tiles)
        if index < up_count:
            segment = np.uint32(index // up_tiles)
            tile = np.uint32(index - np.uint32(segment * up_tiles))
            return _word(np.uint32(ahead + segment), tile)
        index = np.uint32(index - up_count)
        segment = np.uint32(index // down_tiles)
        tile = np.uint32(index - np.uint32(segment * down_tiles))
        return np.uint32(_word(np.uint32(start + segment), tile) | np.uint32(DOWN))

    return find_item
