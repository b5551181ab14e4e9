"""What goes wrong in a kernel is found and says who, where and in what."""

import re

import numpy as np
import pytest
from numba import cuda, uint32

import emulate
from nbmoe_kernels.device import matrix
from tests.emulator import small_ops as ops


def line_of(function, text):
    """The line of a function's source that contains a text."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def half_waits(x):
    if cuda.threadIdx.x < 40:
        cuda.syncthreads()
    else:
        while x[0] == 0:
            cuda.nanosleep(10)


def test_deadlock_lists_who_waits_where(launch):
    with pytest.raises(emulate.Deadlock) as caught:
        launch(half_waits, 2, 64, np.zeros(1, np.uint32))
    message = str(caught.value)
    assert "128 threads of half_waits wait" in message
    barrier, sleep = line_of(half_waits, "syncthreads"), line_of(half_waits, "nanosleep")
    for block in ("(0, 0, 0)", "(1, 0, 0)"):
        assert f"block {block}, threads 0..39: syncthreads (line {barrier}" in message
        assert f"block {block}, threads 40..63: nanosleep (line {sleep}" in message


def lanes_leave(x):
    if cuda.threadIdx.x < 16:
        x[cuda.threadIdx.x] = ops.ballot(uint32(1))


def test_collective_of_half_a_warp_is_a_deadlock(launch):
    with pytest.raises(emulate.Deadlock, match=r"threads 0\.\.15: t_ballot"):
        launch(lanes_leave, 1, 32, np.zeros(32, np.uint32))


def diverges(x):
    t = cuda.threadIdx.x
    if t < 16:
        x[t] = ops.ballot(uint32(1))
    else:
        x[t] = ops.shuffle_down(uint32(t), uint32(1))


def test_different_collectives_in_one_warp(launch):
    with pytest.raises(emulate.CollectiveDivergence, match=r"t_shuffle_down .* in t_ballot"):
        launch(diverges, 1, 32, np.zeros(32, np.uint32))


def exits_early(x):
    if cuda.threadIdx.x == 5:
        return
    cuda.syncthreads()


def test_exit_before_a_barrier(launch):
    with pytest.raises(emulate.EarlyExit, match="exits_early"):
        launch(exits_early, 1, 64, np.zeros(1, np.uint32))


def exits_late(x):
    if cuda.threadIdx.x < 32:
        cuda.syncthreads()


def test_exit_while_others_wait_in_a_barrier(launch):
    with pytest.raises(emulate.EarlyExit, match="thread"):
        launch(exits_late, 1, 64, np.zeros(1, np.uint32))


def out_of_bounds(x):
    i = cuda.grid(1)
    x[i] = uint32(1)


def test_index_out_of_bounds(launch):
    x = np.zeros(100, np.uint32)
    where = rf"test_emulate_failures\.py:{line_of(out_of_bounds, 'x[i]')}"
    with pytest.raises(emulate.KernelError, match=where) as caught:
        launch(out_of_bounds, 2, 64, x)
    assert "IndexError" in str(caught.value)
    launch(out_of_bounds, 2, 50, x)


def out_of_bounds_in_op(x, y):
    first, second = ops.load_pair(x, uint32(cuda.threadIdx.x))
    y[0] = first + second


def test_index_out_of_bounds_in_a_twin(launch):
    with pytest.raises(emulate.KernelError, match=r"IndexError.*thread \(3, 0, 0\)"):
        launch(out_of_bounds_in_op, 1, 8, np.zeros(4, np.uint32), np.zeros(1, np.uint32))


load_matrices = matrix.load_matrices(4)


def out_of_bounds_in_collective(x, first):
    part = cuda.shared.array(128, np.uint32)
    lane = uint32(cuda.threadIdx.x)
    for i in range(4):
        part[uint32(lane + uint32(32 * i))] = lane
    cuda.syncthreads()
    _, _, _, x[lane] = load_matrices(part, uint32(first + uint32(lane * uint32(4))))


def test_index_out_of_bounds_in_a_helper_of_a_twin(launch):
    x = np.zeros(32, np.uint32)
    launch(out_of_bounds_in_collective, 1, 32, x, np.uint32(0))
    for first in (4, 1 << 30):
        with pytest.raises(emulate.KernelError, match="IndexError: matrices"):
            launch(out_of_bounds_in_collective, 1, 32, x, np.uint32(first))


def bounds_off(x):
    x[x.size - 1] = uint32(3)


def test_boundscheck_can_be_switched_off():
    x = np.zeros(4, np.uint32)
    emulate.launch(bounds_off, 1, 1, x, boundscheck=False)
    assert x[3] == 3


def raises(x):
    if cuda.threadIdx.x == 7:
        raise ValueError("seven")


def test_exception_of_the_kernel(launch):
    with pytest.raises(emulate.KernelError, match=r"ValueError: seven.*thread \(7, 0, 0\)"):
        launch(raises, 1, 32, np.zeros(1, np.uint32))


def not_uniform(x):
    t = cuda.threadIdx.x
    x[t] = ops.shuffle_down(uint32(t), uint32(t))


def test_uniform_operand_that_differs(launch):
    line = line_of(not_uniform, "shuffle_down")
    with pytest.raises(emulate.KernelError, match="t_shuffle_down: delta differs") as caught:
        launch(not_uniform, 1, 32, np.zeros(32, np.uint32))
    assert re.search(rf"(line |\.py:){line}\b", str(caught.value))


def two_arrays(x):
    first = cuda.shared.array(64, uint32)
    second = cuda.shared.array(64, uint32)
    t = cuda.threadIdx.x
    x[t] = ops.ldmatrix(first if t < 16 else second, uint32(0))


def test_lanes_that_name_different_arrays(launch):
    with pytest.raises(emulate.KernelError, match="t_ldmatrix: lanes name different row"):
        launch(two_arrays, 1, 32, np.zeros(32, np.uint32))


def uses_warp(x):
    x[cuda.threadIdx.x] = ops.ballot(uint32(1))


def test_collective_of_a_partial_warp(launch):
    with pytest.raises(emulate.KernelError, match=r"needs a whole warp.*48 threads"):
        launch(uses_warp, 1, 48, np.zeros(48, np.uint32))


def short_tile(x):
    acc = cuda.local.array(1, np.int32)
    ops.mma_u8(acc, uint32(0), uint32(0))


def test_register_tile_that_is_too_short(launch):
    with pytest.raises(emulate.KernelError, match=r"acc.*fewer than 2 elements"):
        launch(short_tile, 1, 32, np.zeros(1, np.uint32))


def deep(x):
    local = cuda.local.array(20000, np.uint32)
    local[cuda.threadIdx.x] = uint32(1)
    x[0] = local[0]


def test_more_local_memory_than_a_fiber_has():
    with pytest.raises(emulate.ResourceError, match="local arrays: expected at most"):
        emulate.launch(deep, 1, 1, np.zeros(1, np.uint32))


def works(x):
    x[cuda.threadIdx.x] = uint32(cuda.threadIdx.x)


def test_a_failed_launch_leaves_no_trace(launch):
    for kernel in (half_waits, raises, diverges):
        with pytest.raises(emulate.EmulationError):
            launch(kernel, 1, 64, np.zeros(64, np.uint32))
    x = np.zeros(64, np.uint32)
    launch(works, 1, 64, x)
    assert x.tolist() == list(range(64))
