"""Ops that wait: parked until what they wait for has happened, or named in a deadlock."""

import numpy as np
import pytest
from numba import cuda, uint32, uint64

import emulate
from nbmoe_kernels.device import atomics
from nbmoe_kernels.device.mbarrier import (
    mbarrier_arrive,
    mbarrier_init,
    mbarrier_wait,
)

arrive_release = atomics.reduction("add", "u32", order="release")
wait_for = atomics.wait_ge("u32")


def ping_pong(x, out):
    """Warp 0 writes, warp 1 reads, four times through one buffer and two mbarriers."""
    buffer = cuda.shared.array(32, uint32)
    bars = cuda.shared.array(2, uint64)
    t = cuda.threadIdx.x
    lane = t % 32
    if t == 0:
        mbarrier_init(bars, uint32(0), uint32(32))
        mbarrier_init(bars, uint32(1), uint32(32))
    cuda.syncthreads()
    for step in range(4):
        parity = uint32(step & 1)
        if t < 32:
            mbarrier_wait(bars, uint32(1), uint32(parity ^ uint32(1)))
            buffer[lane] = x[step, lane]
            mbarrier_arrive(bars, uint32(0))
        else:
            mbarrier_wait(bars, uint32(0), parity)
            out[step, lane] = buffer[lane]
            mbarrier_arrive(bars, uint32(1))


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_mbarriers_hand_a_buffer_over(launch, seed):
    x = np.arange(128, dtype=np.uint32).reshape(4, 32)
    out = np.zeros_like(x)
    launch(ping_pong, 1, 64, x, out, seed=seed)
    np.testing.assert_array_equal(out, x)


def chain(counter, out):
    """Every CTA waits for all CTAs after it."""
    block = uint32(cuda.blockIdx.x)
    after = uint32(uint32(cuda.gridDim.x) - uint32(1) - block)
    if cuda.threadIdx.x == 0:
        wait_for(counter, uint32(0), after)
        out[block] = counter[0]
        arrive_release(counter, uint32(0), uint32(1))


def test_ctas_wait_for_ones_that_start_later(both):
    counter, out = both(chain, 100, 32, np.zeros(1, np.uint32), np.zeros(100, np.uint32))
    assert counter[0] == 100
    assert out.tolist() == list(range(99, -1, -1))


def waits_for_nothing(x):
    bars = cuda.shared.array(4, uint64)
    if cuda.threadIdx.x == 0:
        mbarrier_init(bars, uint32(3), uint32(1))
    cuda.syncthreads()
    mbarrier_wait(bars, uint32(3), uint32(0))


def test_deadlock_names_the_op_its_operands_and_the_line():
    line = waits_for_nothing.__code__.co_firstlineno + 5
    with pytest.raises(emulate.Deadlock) as caught:
        emulate.launch(waits_for_nothing, 1, 64, np.zeros(1, np.uint32))
    message = str(caught.value)
    assert "64 threads of waits_for_nothing" in message
    assert "threads 0..63: mbarrier_wait(bar_index=3, parity=0)" in message
    assert f"line {line} of {__file__}" in message


def test_deadlock_of_a_waiting_op(engine):
    with pytest.raises(emulate.Deadlock, match="mbarrier_wait"):
        emulate.launch(waits_for_nothing, 1, 32, np.zeros(1, np.uint32), engine=engine)


def two_ctas(counter):
    wait_for(counter, uint32(0), uint32(2))


def test_deadlock_across_ctas_shows_the_awaited_value():
    with pytest.raises(emulate.Deadlock, match=r"counter_index=0, value=2\)"):
        emulate.launch(two_ctas, 2, 1, np.ones(1, np.uint32))


def out_of_bounds(x):
    wait_for(x, uint32(5), uint32(0))


def test_a_wait_outside_its_array_is_found(engine):
    with pytest.raises(emulate.KernelError, match="IndexError"):
        emulate.launch(out_of_bounds, 1, 1, np.zeros(2, np.uint32), engine=engine)
