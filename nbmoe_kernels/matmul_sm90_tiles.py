"""How the producer tells the other warps which tile is next.

Finding a tile takes a bisection and two divisions. The producer does it, tiles ahead of the others,
and writes the result into a ring of two places in shared memory, 4 words each: expert (i32,
negative: masked), first row in the output, rows, and which ``block_rows`` weight rows. A tile
without rows is the end.

Synchronisation (mbarriers of a place)

    told    1 arrival, by the producer, once the tile is written; readers wait for it
    read    1 arrival a reading warp, once its lanes have the tile in registers;
            the producer waits before it writes the next tile there
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from nbmoe_kernels.device.mbarrier import mbarrier_arrive, mbarrier_init, mbarrier_wait
from nbmoe_kernels.device.memory import load_shared_v4
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.device.sync import elect
from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig
from nbmoe_kernels.warp_arrival import ARRIVALS, arrive_for_warp

PLACES = 2


def make_init_tiles(config: HopperMatmulConfig) -> Callable[..., Any]:
    """``init_tiles(bars)``, by one thread."""
    first, readers = config.tiles_at // 8, ARRIVALS * config.tile_readers

    @device_function
    def init_tiles(bars):
        for i in range(PLACES):
            mbarrier_init(bars, np.uint32(first + i), np.uint32(1))
            mbarrier_init(bars, np.uint32(first + PLACES + i), np.uint32(readers))

    return init_tiles


@device_function
def _next_place(place, parity):
    if place == np.uint32(PLACES - 1):
        return np.uint32(0), np.uint32(parity ^ np.uint32(1))
    return np.uint32(place + np.uint32(1)), parity


def make_tell_tile(config: HopperMatmulConfig) -> Callable[..., Any]:
    """``tell_tile(words, bars, place, parity, expert, row, rows, m_tile)``, by the producer's warp.

    Begins with place 0 and parity 1; returns the next place and parity.
    """
    first, words_at = config.tiles_at // 8, (config.tiles_at + 16 * PLACES) // 4

    @device_function
    def tell_tile(words, bars, place, parity, expert, row, rows, m_tile):
        told = np.uint32(np.uint32(first) + place)
        mbarrier_wait(bars, np.uint32(told + np.uint32(PLACES)), parity)
        if elect() == np.uint32(1):
            at = np.uint32(np.uint32(words_at) + np.uint32(place << np.uint32(2)))
            words[at] = np.uint32(expert)
            words[np.uint32(at + np.uint32(1))] = row
            words[np.uint32(at + np.uint32(2))] = rows
            words[np.uint32(at + np.uint32(3))] = m_tile
            mbarrier_arrive(bars, told)
        return _next_place(place, parity)

    return tell_tile


def make_next_tile(config: HopperMatmulConfig) -> Callable[..., Any]:
    """``next_tile(words, bars, place, parity)``, by each reading warp.

    Begins with place 0 and parity 0; returns the next place and parity, and the tile.
    """
    first, words_at = config.tiles_at // 8, (config.tiles_at + 16 * PLACES) // 4

    @device_function
    def next_tile(words, bars, place, parity):
        told = np.uint32(np.uint32(first) + place)
        mbarrier_wait(bars, told, parity)
        at = np.uint32(np.uint32(words_at) + np.uint32(place << np.uint32(2)))
        expert, row, rows, m_tile = load_shared_v4(words, at)
        arrive_for_warp(bars, np.uint32(told + np.uint32(PLACES)))
        place, parity = _next_place(place, parity)
        return place, parity, np.int32(expert), row, rows, m_tile

    return next_tile
