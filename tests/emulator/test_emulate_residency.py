"""Which CTAs are alive together: all that somebody waits for."""

import numpy as np
import pytest
from numba import cuda, uint32

import emulate


def count_arrivals(arrived, seen):
    """Every block arrives; then each looks how many have."""
    if cuda.threadIdx.x == 0:
        cuda.atomic.add(arrived, 0, uint32(1))
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        seen[cuda.blockIdx.x] = arrived[0]


def test_all_blocks_run_side_by_side(launch):
    arrived, seen = np.zeros(1, np.uint32), np.zeros(50, np.uint32)
    report = launch(count_arrivals, 50, 32, arrived, seen, resident="all")
    assert report.resident == 50
    assert (seen == 50).all(), "every block's barrier comes after every other block's arrival"


def test_window_bounds_the_blocks_alive(launch):
    arrived, seen = np.zeros(1, np.uint32), np.zeros(50, np.uint32)
    report = launch(count_arrivals, 50, 32, arrived, seen, resident=4)
    assert report.resident == 4
    assert seen[0] == 4 and seen[49] == 50


def reverse_chain(flags, order):
    """Block b waits for block b + 1."""
    b = cuda.blockIdx.x
    if cuda.threadIdx.x == 0:
        if b + 1 < cuda.gridDim.x:
            while flags[b + 1] == 0:
                cuda.nanosleep(100)
        order[b] = cuda.atomic.add(order, cuda.gridDim.x, uint32(1))
        flags[b] = uint32(1)


@pytest.mark.parametrize("seed", [None, 1])
def test_a_block_may_wait_for_any_later_one(launch, seed):
    blocks = 300
    flags, order = np.zeros(blocks, np.uint32), np.zeros(blocks + 1, np.uint32)
    launch(reverse_chain, blocks, 32, flags, order, seed=seed)
    assert order[:blocks].tolist() == list(range(blocks))[::-1]


def test_waiting_for_a_block_that_has_no_room_is_a_deadlock(launch):
    flags, order = np.zeros(8, np.uint32), np.zeros(9, np.uint32)
    with pytest.raises(emulate.Deadlock, match="nanosleep"):
        launch(reverse_chain, 8, 32, flags, order, resident=3)


def turns(log, count):
    """Threads note the order in which they run."""
    for _ in range(4):
        at = cuda.atomic.add(count, 0, uint32(1))
        log[at] = cuda.threadIdx.x
        cuda.syncthreads()


def order_of(engine, seed):
    log, count = np.zeros(4 * 64, np.uint32), np.zeros(1, np.uint32)
    emulate.launch(turns, 1, 64, log, count, engine=engine, seed=seed)
    return log.tolist()


def test_order_of_threads(engine):
    assert order_of(engine, None)[:64] == list(range(64))
    assert order_of(engine, None) == order_of(engine, None)
    assert order_of(engine, 1) == order_of(engine, 1)
    assert len({tuple(order_of(engine, seed)) for seed in (None, 0, 1, 2, 3)}) == 5


def test_grid_of_many_blocks(launch, engine):
    blocks = 20000 if engine == "fast" else 300
    arrived, seen = np.zeros(1, np.uint32), np.zeros(blocks, np.uint32)
    report = launch(count_arrivals, blocks, 32, arrived, seen)
    assert arrived[0] == blocks
    assert report.resident <= 1024 // 32
