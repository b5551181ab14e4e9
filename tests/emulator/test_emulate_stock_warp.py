"""Warp functions, bit functions and grid barriers of stock numba.cuda."""

import math

import numpy as np
import pytest
from numba import cuda, float32, int32

import emulate
from emulate import stock

FULL = 0xFFFFFFFF
rng = np.random.default_rng(11)
LANES = np.arange(32)


def shuffles(x, k, out):
    i = cuda.grid(1)
    lane = cuda.laneid
    out[0, i] = cuda.shfl_sync(FULL, x[i], k[lane])
    out[1, i] = cuda.shfl_up_sync(FULL, x[i], 3)
    out[2, i] = cuda.shfl_down_sync(FULL, x[i], 5)
    out[3, i] = cuda.shfl_xor_sync(FULL, x[i], 9)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.float64])
def test_shuffles(launch, dtype):
    bits = rng.integers(-(2**62), 2**62, 64)
    bits[3] = -1  # a NaN with a payload
    x = bits.astype(f"i{np.dtype(dtype).itemsize}").view(dtype)
    k = rng.integers(0, 64, 32).astype(np.int32)
    out = np.zeros((4, 64), dtype)
    launch(shuffles, 2, 32, x, k, out)
    for warp in range(2):
        here = x[32 * warp : 32 * warp + 32]
        sources = [k % 32, np.maximum(LANES - 3, 0), np.minimum(LANES + 5, 31), LANES ^ 9]
        sources[1][:3] = LANES[:3]
        sources[2][27:] = LANES[27:]
        for row, source in zip(out[:, 32 * warp : 32 * warp + 32], sources, strict=True):
            assert row.tobytes() == here[source].tobytes()


def votes(x, out):
    i = cuda.threadIdx.x
    out[0, i] = cuda.all_sync(FULL, x[i] > 0)
    out[1, i] = cuda.any_sync(FULL, x[i] > 0)
    out[2, i] = cuda.eq_sync(FULL, x[i] > 0)
    out[3, i] = cuda.ballot_sync(FULL, x[i])
    out[4, i] = cuda.match_any_sync(FULL, x[i])
    mask, same = cuda.match_all_sync(FULL, x[i])
    out[5, i] = mask
    out[6, i] = same
    out[7, i] = cuda.lanemask_lt()
    out[8, i] = cuda.activemask()
    out[9, i] = cuda.warpsize
    cuda.syncwarp()
    cuda.syncwarp(FULL)


@pytest.mark.parametrize("low", [0, 1, 2])
def test_votes_and_matches(launch, low):
    x = rng.integers(low, 3, 32).astype(np.int32)
    out = np.zeros((10, 32), np.int64)
    launch(votes, 1, 32, x, out)
    holds = x > 0
    assert (out[0] == holds.all()).all()
    assert (out[1] == holds.any()).all()
    assert (out[2] == (holds.all() or not holds.any())).all()
    assert (out[3].astype(np.uint32) == sum(1 << i for i in range(32) if x[i])).all()
    for lane in range(32):
        mask = sum(1 << i for i in range(32) if x[i] == x[lane])
        assert out[4, lane].astype(np.uint32) == mask
    assert (out[6] == (x == x[0]).all()).all()
    assert (out[5] == np.where(out[6], -1, 0)).all()
    assert out[7].tolist() == [(1 << i) - 1 for i in range(32)]
    assert (out[8] == FULL).all()
    assert (out[9] == 32).all()


def partial(x):
    i = cuda.threadIdx.x
    if i < 16:
        x[i] = cuda.shfl_sync(0xFFFF, x[i], 0)


def test_a_partial_mask_is_refused_with_the_line(launch, engine):
    line = partial.__code__.co_firstlineno + 3
    where = f".*line {line} of {__file__}" if engine == "fast" else ""
    with pytest.raises(emulate.UnsupportedOp, match=rf"cuda.shfl_sync: mask 0x0000ffff {where}"):
        launch(partial, 1, 32, np.zeros(32, np.int32))


def unsigned_value(x):
    x[0] = cuda.shfl_sync(FULL, x[0], 0)


def test_a_type_that_the_gpu_target_refuses():
    with pytest.raises(emulate.CompileError, match=r"cuda.shfl_sync: expected a signed integer"):
        emulate.launch(unsigned_value, 1, 32, np.zeros(1, np.uint32))


def bits(x, y, out):
    out[0] = cuda.popc(x[0])
    out[1] = cuda.clz(x[0])
    out[2] = cuda.ffs(x[0])
    out[3] = cuda.brev(x[0])
    out[4] = cuda.popc(y[0])
    out[5] = cuda.clz(y[0])
    out[6] = cuda.ffs(y[0])
    out[7] = cuda.brev(y[0])


@pytest.mark.parametrize("value", [0, 1, 0x80000000, 0x00012340, FULL, 6 << 40, 2**64 - 1])
def test_bit_functions(launch, value):
    low = value & FULL
    x, y = np.array([low], np.uint32), np.array([value], np.uint64)
    out = np.zeros(8, np.uint64)
    launch(bits, 1, 1, x, y, out)
    expected = []
    for number, width in ((low, 32), (value, 64)):
        text = f"{number:0{width}b}"
        lowest = len(text) - text.rindex("1") if number else 0
        expected += [text.count("1"), width - number.bit_length(), lowest, int(text[::-1], 2)]
    assert out.tolist() == expected
    functions = stock.functions(lambda op, args: None, lambda: 0, lambda: 32)
    names = ("popc", "clz", "ffs", "brev")
    assert [int(functions[n](v)) for v in (x[0], y[0]) for n in names] == expected


def fused(x, out, wide):
    i = cuda.threadIdx.x
    out[i] = cuda.fma(x[0, i], x[1, i], x[2, i])
    wide[i] = cuda.fma(float(x[0, i]) * 1.1, float(x[1, i]), float(x[2, i]))
    x[3, i] = cuda.selp(x[0, i] > x[1, i], x[0, i], x[1, i])


def test_fma_has_one_rounding(launch):
    x = rng.standard_normal((4, 256)).astype(np.float32)
    x[2] = -(x[0] * x[1])  # what is left is the product's rounding error
    x[:3, 0] = np.float32(1 + 2**-12), np.float32(1 + 2**-12), np.float32(-1)
    x[:3, 1] = np.inf, 0, 1
    x[:3, 2] = 3e38, 3e38, -1
    out, wide = np.zeros(256, np.float32), np.zeros(256)
    launch(fused, 1, 256, x, out, wide)
    assert out[0] == np.float32(2**-11 + 2**-24)
    assert math.isnan(out[1]) and out[2] == np.inf
    error = x[0].astype(np.float64) * x[1] + x[2]  # exact in float64
    np.testing.assert_array_equal(out[3:], error[3:].astype(np.float32))
    np.testing.assert_array_equal(x[3], np.where(x[0] > x[1], x[0], x[1]))
    for i in range(256):
        assert np.float32(stock.fma(*x[:3, i])).tobytes() == out[i].tobytes() or i == 1
        b, c = float(x[1, i]), float(x[2, i])
        plain = stock.fma(np.float64(float(x[0, i]) * 1.1), np.float64(b), np.float64(c))
        assert plain == wide[i] or i == 1


def grid_sum(x, part, out):
    """Every CTA reads what all the others wrote before the grid's barrier."""
    grid = cuda.cg.this_grid()
    i = cuda.grid(1)
    part[i] = x[i] * 2
    grid.sync()
    if cuda.threadIdx.x == 0:
        total = 0
        for j in range(part.size):
            total += part[j]
        out[cuda.blockIdx.x] = total
    cuda.cg.this_grid().sync()
    part[i] = out[cuda.gridDim.x - 1 - cuda.blockIdx.x]


@pytest.mark.parametrize("resident", [None, "all"])
def test_grid_barrier(launch, resident):
    x = np.arange(80 * 32)
    part, out = np.zeros_like(x), np.zeros(80, np.int64)
    launch(grid_sum, 80, 32, x, part, out, resident=resident)
    assert (out == 2 * x.sum()).all() and (part == 2 * x.sum()).all()


def test_a_grid_barrier_needs_room_for_all(launch):
    x = np.arange(80 * 32)
    with pytest.raises(emulate.ResourceError, match=r"needs all 80 blocks .* only 3 can"):
        launch(grid_sum, 80, 32, x, x.copy(), np.zeros(80, np.int64), resident=3)


TABLE = np.array([3.5, -1.0, 2.25], np.float32)


def constants(out):
    table = cuda.const.array_like(TABLE)
    i = cuda.threadIdx.x
    out[i] = table[i % 3]


def test_constant_arrays(launch):
    out = np.zeros(32, np.float32)
    launch(constants, 1, 32, out)
    np.testing.assert_array_equal(out, np.resize(TABLE, 32))


def float_extremes(x, out):
    i = cuda.threadIdx.x
    cuda.atomic.max(out, 0, x[i])
    cuda.atomic.min(out, 1, x[i])
    cuda.atomic.nanmax(out, 2, x[i])
    cuda.atomic.nanmin(out, 3, x[i])


def test_atomic_extremes_of_floats():
    x = rng.standard_normal(64).astype(np.float32)
    x[5] = np.nan
    out = np.array([-9, 9, np.nan, np.nan], np.float32)
    emulate.launch(float_extremes, 1, 64, x, out)
    assert out.tolist() == [np.nanmax(x), np.nanmin(x)] * 2


def compare_and_swap(x, out):
    out[0] = cuda.atomic.compare_and_swap(x, int32(7), int32(9))
    out[1] = cuda.atomic.compare_and_swap(x, int32(7), int32(1))


def test_compare_and_swap():
    x, out = np.array([7, 7], np.int32), np.zeros(2, np.int32)
    emulate.launch(compare_and_swap, 1, 1, x, out)
    assert x.tolist() == [9, 7] and out.tolist() == [7, 9]


def user_reduction(x, out):
    """A sum as users of numba.cuda write it."""
    warps = cuda.shared.array(8, float32)
    t = cuda.threadIdx.x
    value = x[cuda.grid(1)]
    step = 16
    while step > 0:
        value += cuda.shfl_down_sync(FULL, value, step)
        step //= 2
    if cuda.laneid == 0:
        warps[t // cuda.warpsize] = value
    cuda.syncthreads()
    if t == 0:
        for i in range(8):
            cuda.atomic.add(out, 0, warps[i])


def test_a_users_reduction(launch):
    x = rng.integers(0, 100, 1024).astype(np.float32)
    out = np.zeros(1, np.float32)
    launch(user_reduction, 4, 256, x, out)
    assert out[0] == x.sum()
