"""Kernels that use only what stock numba.cuda has run unchanged, with the same bytes."""

import numba
import numpy as np
from numba import cuda, float32, int32, uint32

rng = np.random.default_rng(1)


def add(x, y, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i] + y[i]


def test_vector_add(both):
    x, y = rng.standard_normal((2, 1000)).astype(np.float32)
    *_, out = both(add, 8, 128, x, y, np.zeros(1000, np.float32))
    np.testing.assert_array_equal(out, x + y)


@cuda.jit(device=True)
def larger(a, b):
    return a if a > b else b


@cuda.jit
def block_max(x, out):
    part = cuda.shared.array(128, int32)
    t = cuda.threadIdx.x
    part[t] = x[cuda.blockIdx.x * cuda.blockDim.x + t]
    cuda.syncthreads()
    step = 64
    while step > 0:
        if t < step:
            part[t] = larger(part[t], part[t + step])
        cuda.syncthreads()
        step //= 2
    if t == 0:
        out[cuda.blockIdx.x] = part[0]


def test_jitted_block_reduction_with_device_function(both):
    x = rng.integers(-1000, 1000, 128 * 5).astype(np.int32)
    _, out = both(block_max, 5, 128, x, np.zeros(5, np.int32))
    np.testing.assert_array_equal(out, x.reshape(5, 128).max(axis=1))


TILE = 8


def matmul(a, b, c):
    """C = A B with tiles in shared memory, 2-D arrays and a 2-D grid."""
    tile_a = cuda.shared.array((TILE, TILE), float32)
    tile_b = cuda.shared.array((TILE, TILE), dtype=numba.float32)
    x, y = cuda.grid(2)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    total = np.float32(0)
    for k in range(a.shape[1] // TILE):
        tile_a[ty, tx] = a[y, k * TILE + tx]
        tile_b[ty, tx] = b[k * TILE + ty, x]
        cuda.syncthreads()
        for i in range(TILE):
            total += tile_a[ty, i] * tile_b[i, tx]
        cuda.syncthreads()
    c[y, x] = total


def test_tiled_matmul(both):
    a = rng.integers(-8, 8, (16, 24)).astype(np.float32)
    b = rng.integers(-8, 8, (24, 32)).astype(np.float32)
    *_, c = both(matmul, (4, 2), (TILE, TILE), a, b, np.zeros((16, 32), np.float32))
    np.testing.assert_array_equal(c, a @ b)


def where(out):
    x, y, z = cuda.grid(3)
    nx, ny, nz = cuda.gridsize(3)
    block = (
        cuda.blockIdx.x
        + cuda.gridDim.x * cuda.blockIdx.y
        + cuda.gridDim.x * cuda.gridDim.y * cuda.blockIdx.z
    )
    at = (z * ny + y) * nx + x
    out[at, 0] = block
    out[at, 1] = cuda.threadIdx.x + 10 * cuda.threadIdx.y + 100 * cuda.threadIdx.z
    out[at, 2] = nx * ny * nz


def test_indices_in_three_dimensions(both):
    grid, block = (2, 3, 2), (4, 2, 3)
    (out,) = both(where, grid, block, np.full((8 * 6 * 6, 3), -1, np.int64))
    z, y, x = np.indices((6, 6, 8)).reshape(3, -1)
    blocks = x // 4 + 2 * (y // 2) + 6 * (z // 3)
    np.testing.assert_array_equal(out[:, 0], blocks)
    np.testing.assert_array_equal(out[:, 1], x % 4 + 10 * (y % 2) + 100 * (z % 3))
    assert (out[:, 2] == 8 * 6 * 6).all()


def reverse(x, words):
    buffer = cuda.shared.array(0, uint32, alignment=16)
    same = cuda.shared.array(shape=0, dtype=np.uint8)
    fixed = cuda.shared.array(4, uint32)
    t = cuda.threadIdx.x
    buffer[t] = x[t]
    fixed[t % 4] = uint32(7)
    cuda.syncthreads()
    words[t] = buffer[cuda.blockDim.x - 1 - t]
    if t == 0:
        words[cuda.blockDim.x] = buffer.size
        words[cuda.blockDim.x + 1] = same.size
        words[cuda.blockDim.x + 2] = same[4 * 5]


def test_dynamic_shared_memory(both):
    x = rng.integers(0, 2**32, 64).astype(np.uint32)
    _, words = both(reverse, 1, 64, x, np.zeros(67, np.uint32), shared_bytes=4 * 64 + 3)
    np.testing.assert_array_equal(words[:64], x[::-1])
    assert words[64:66].tolist() == [64, 259]
    assert words[66] == x[5] & 255, "dynamic arrays share one window, apart from static ones"


def unwritten(out):
    static = cuda.shared.array(8, uint32)
    dynamic = cuda.shared.array(0, uint32)
    if cuda.blockIdx.x == 0:
        static[3] = uint32(1)
        dynamic[3] = uint32(1)
    out[2 * cuda.blockIdx.x] = static[3]
    out[2 * cuda.blockIdx.x + 1] = dynamic[3]


def test_shared_memory_of_each_block_starts_as_ones(both):
    (out,) = both(unwritten, 2, 1, np.zeros(4, np.uint32), shared_bytes=32, resident=1)
    assert out.tolist() == [1, 1, 0xFFFFFFFF, 0xFFFFFFFF]


def histogram(x, counts, extremes, log):
    i = cuda.grid(1)
    old = cuda.atomic.add(counts, x[i] % 8, 1)
    cuda.atomic.max(extremes, 0, x[i])
    cuda.atomic.min(extremes, 1, x[i])
    cuda.atomic.xor(extremes, 2, x[i])
    if old == 0:
        cuda.atomic.exch(log, (0, x[i] % 8), 5)
    cuda.atomic.cas(log, (1, 0), 0, 3)
    cuda.atomic.inc(log, (1, 1), 2)


def test_atomics(both):
    x = rng.integers(0, 2**31, 256).astype(np.uint32)
    extremes = np.array([0, 2**32 - 1, 0], np.uint32)
    _, counts, extremes, log = both(
        histogram, 2, 128, x, np.zeros(8, np.uint32), extremes, np.zeros((2, 8), np.uint32)
    )
    np.testing.assert_array_equal(counts, np.bincount(x % 8, minlength=8))
    assert extremes.tolist() == [x.max(), x.min(), np.bitwise_xor.reduce(x)]
    assert log[0].tolist() == [5] * 8
    assert log[1, :2].tolist() == [3, 256 % 3]


def votes(x, out):
    t = cuda.threadIdx.x
    out[0, t] = cuda.syncthreads_count(x[t] > 0)
    out[1, t] = cuda.syncthreads_and(x[t] > 0)
    out[2, t] = cuda.syncthreads_or(x[t] > 0)
    out[3, t] = cuda.syncthreads_or(x[t] > 100)


def test_barriers_that_vote(both):
    x = np.arange(-20, 28, dtype=np.int32)
    _, out = both(votes, 1, 48, x, np.full((4, 48), -1, np.int32))
    assert (out == np.array([[27], [0], [1], [0]])).all()


def squares(x):
    local = cuda.local.array(5, dtype=np.int64)
    grid = cuda.local.array((2, 3), np.float32)
    for i in range(5):
        local[i] = i * i
    for i in range(2):
        for j in range(3):
            grid[i, j] = np.float32(10 * i + j)
    row = grid[1]
    x[cuda.threadIdx.x] = local[cuda.threadIdx.x % 5] + np.int64(row[2])


def test_local_arrays(both):
    (x,) = both(squares, 1, 10, np.zeros(10, np.int64))
    assert x.tolist() == [i * i + 12 for i in (0, 1, 2, 3, 4)] * 2


def make_scaled(factor, offsets):
    def scaled(x):
        i = cuda.threadIdx.x
        x[i] = x[i] * factor + offsets[i % 2]

    return scaled


def test_closure_values(both):
    offsets = np.array([1, 100])
    (x,) = both(make_scaled(3, offsets), 1, 4, np.arange(4))
    assert x.tolist() == [1, 103, 7, 109]
    (x,) = both(make_scaled(4, offsets), 1, 4, np.arange(4))
    assert x.tolist() == [1, 104, 9, 112]


def strided(x, out):
    i = cuda.threadIdx.x
    out[i] = x[i, 1]


def test_strided_array_and_scalar_arguments(both):
    x = np.arange(24).reshape(4, 6)[:, ::2]
    (_, out) = both(strided, 1, 4, x, np.zeros(4, np.int64))
    assert out.tolist() == [2, 8, 14, 20]


def scalars(out, a, b, c, d, e):
    out[0] = a
    out[1] = b
    out[2] = c
    out[3] = d
    out[4] = 1.0 if e else 0.0


def test_scalar_arguments(both):
    (out,) = both(scalars, 1, 1, np.zeros(5), 7, np.float32(0.1), np.uint8(200), np.int64(-5), True)
    assert out.tolist() == [7.0, float(np.float32(0.1)), 200.0, -5.0, 1.0]
