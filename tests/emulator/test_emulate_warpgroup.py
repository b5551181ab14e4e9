"""Ops of 128 lanes, and named barriers of a part of a block."""

import numpy as np
import pytest
from numba import cuda, uint32

import emulate
from nbmoe_kernels.device.sync import named_barrier_arrive, named_barrier_sync
from tests.emulator import async_ops as ops

rng = np.random.default_rng(5)


def sums(x, out):
    i = cuda.grid(1)
    for step in range(3):
        total, other = ops.group_sum(uint32(x[i] + uint32(step)), uint32(65))
        out[step, 0, i] = total
        out[step, 1, i] = other


def test_warpgroups_meet_on_their_own(both):
    x = rng.integers(0, 2**32, 512).astype(np.uint32)
    _, out = both(sums, 2, 256, x, np.zeros((3, 2, 512), np.uint32))
    for step in range(3):
        shifted = (x + np.uint32(step)).reshape(4, 128)
        total = shifted.sum(axis=1, dtype=np.uint32)
        np.testing.assert_array_equal(out[step, 0].reshape(4, 128), total[:, None].repeat(128, 1))
        np.testing.assert_array_equal(out[step, 1].reshape(4, 128), shifted[:, np.arange(128) ^ 65])


def test_a_partial_warpgroup_is_refused(engine):
    x, out = np.zeros(192, np.uint32), np.zeros((3, 2, 192), np.uint32)
    with pytest.raises(emulate.KernelError, match=r"t_group_sum needs a whole warpgroup.*192"):
        emulate.launch(sums, 1, 192, x, out, engine=engine)


def half_only(x, out):
    if cuda.threadIdx.x < 64:
        ops.group_sum(x[0], uint32(1))


def test_half_a_warpgroup_waits_for_the_other(engine):
    x = np.zeros(1, np.uint32)
    with pytest.raises(emulate.EmulationError, match=r"t_group_sum"):
        emulate.launch(half_only, 1, 128, x, x.copy(), engine=engine)


def differing(x, out):
    ops.group_sum(x[0], uint32(cuda.threadIdx.x))


def test_uniform_operands_are_checked_on_all_lanes(engine):
    x = np.zeros(1, np.uint32)
    with pytest.raises(emulate.KernelError, match="k differs between lanes"):
        emulate.launch(differing, 1, 128, x, x.copy(), engine=engine)


def producer_and_consumers(x, out):
    """Warp 0 fills a buffer, warps 1 and 2 read it; two named barriers hand it over."""
    buffer = cuda.shared.array(32, uint32)
    t = cuda.threadIdx.x
    lane = t % 32
    for step in range(4):
        if t < 32:
            buffer[lane] = x[step * 32 + lane]
            named_barrier_arrive(uint32(1), uint32(96))
            named_barrier_sync(uint32(2), uint32(96))
        else:
            named_barrier_sync(uint32(1), uint32(96))
            out[t // 32 - 1, step * 32 + lane] = buffer[31 - lane]
            named_barrier_arrive(uint32(2), uint32(96))


def test_named_barriers(both):
    x = rng.integers(0, 2**32, 128).astype(np.uint32)
    _, out = both(producer_and_consumers, 1, 96, x, np.zeros((2, 128), np.uint32))
    for row in out:
        np.testing.assert_array_equal(row.reshape(4, 32), x.reshape(4, 32)[:, ::-1])


def barrier(x):
    named_barrier_sync(x[0], x[1])


def test_a_named_barrier_that_never_fills(engine):
    with pytest.raises(emulate.Deadlock, match=r"named_barrier_sync\(.*3.*96.*line"):
        emulate.launch(barrier, 1, 64, np.array([3, 96], np.uint32), engine=engine)


@pytest.mark.parametrize("operands", [(16, 64), (1, 48), (1, 0)])
def test_named_barriers_that_no_gpu_has(engine, operands):
    with pytest.raises(emulate.KernelError, match="barrier"):
        emulate.launch(barrier, 1, 64, np.array(operands, np.uint32), engine=engine)


def two_counts(x):
    named_barrier_sync(uint32(1), uint32(64) if cuda.threadIdx.x < 32 else uint32(32))


def test_named_barrier_with_two_counts():
    with pytest.raises(emulate.KernelError, match=r"named barrier 1: .*another count"):
        emulate.launch(two_counts, 1, 64, np.zeros(1, np.uint32))
