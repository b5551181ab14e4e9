"""Device ops: every kind gives what its meaning says, on both engines, with the same bytes."""

import numba
import numpy as np
import pytest
from numba import cuda, uint32

import emulate
from nbmoe_kernels.device.op import STUBS, TABLE, Scope, device_op, unroll
from tests.emulator import small_ops as ops

rng = np.random.default_rng(2)


def rotate_all(x, y):
    i = cuda.threadIdx.x
    y[i] = ops.rotate(x[i], uint32(i))


def test_pure_op_through_a_module(both):
    x = rng.integers(0, 2**32, 64).astype(np.uint32)
    _, y = both(rotate_all, 1, 64, x, np.zeros_like(x))
    expected = [((int(v) << (i % 32)) | (int(v) >> (32 - i % 32))) & 0xFFFFFFFF
                for i, v in enumerate(x)]  # fmt: skip
    assert y.tolist() == expected


mix = ops.mix
negate = ops.negate


def mix_and_negate(x, f):
    i = cuda.threadIdx.x
    x[i] = mix(x[i])
    f[i] = negate(f[i])


def test_device_function_and_signalling_nan(both):
    x = rng.integers(0, 2**32, 32).astype(np.uint32)
    bits = np.concatenate([[0x7F800001, 0xFFBFFFFF, 0x80000000], x[3:]]).astype(np.uint32)
    mixed, f = both(mix_and_negate, 1, 32, x, bits.view(np.float32))
    assert mixed.tolist() == [(((int(v) << 7) | (int(v) >> 25)) & 0xFFFFFFFF) ^ int(v) for v in x]
    np.testing.assert_array_equal(f.view(np.uint32), bits ^ 0x80000000)


def swap_pairs(x, y):
    i = uint32(2) * uint32(cuda.grid(1))
    low, high = ops.load_pair(x, i)
    ops.store_pair(y, i, high, low)


def test_thread_ops_with_pointers(both):
    x = rng.integers(0, 2**32, 128).astype(np.uint32)
    _, y = both(swap_pairs, 2, 32, x, np.zeros_like(x))
    np.testing.assert_array_equal(y.reshape(-1, 2), x.reshape(-1, 2)[:, ::-1])


def warp_sums(x, out):
    total = x[cuda.grid(1)]
    for step in unroll(range(5)):
        total = uint32(total + ops.shuffle_down(total, uint32(16 >> step)))
    if cuda.threadIdx.x % 32 == 0:
        out[cuda.grid(1) // 32] = total


def test_warp_shuffle(both):
    x = rng.integers(0, 1000, 3 * 96).astype(np.uint32)
    _, out = both(warp_sums, 3, 96, x, np.zeros(9, np.uint32))
    np.testing.assert_array_equal(out, x.reshape(9, 32).sum(axis=1))


def vote(x, out):
    i = cuda.grid(1)
    out[i] = ops.ballot(uint32(x[i] > uint32(5)))


def test_ballot(both):
    x = rng.integers(0, 11, 64).astype(np.uint32)
    _, out = both(vote, 1, 64, x, np.zeros(64, np.uint32))
    for warp in range(2):
        mask = sum(1 << lane for lane in range(32) if x[32 * warp + lane] > 5)
        assert (out[32 * warp : 32 * warp + 32] == mask).all()


def multiply(a, b, c):
    lane = cuda.threadIdx.x
    acc = cuda.local.array(2, np.int32)
    acc[0] = np.int32(lane)
    acc[1] = np.int32(-1)
    for step in range(3):
        ops.mma_u8(acc, a[step, lane], b[step, lane])
    row, column = lane // 4, 2 * (lane % 4)
    c[row, column] = acc[0]
    c[row, column + 1] = acc[1]


def test_register_tile_is_updated_in_place(both):
    a = rng.integers(0, 256, (3, 8, 16)).astype(np.uint8)
    b = rng.integers(0, 256, (3, 8, 16)).astype(np.uint8)
    words_a, words_b = (m.view(np.uint32).reshape(3, 32) for m in (a, b))
    *_, c = both(multiply, 1, 32, words_a, words_b, np.zeros((8, 8), np.int32))
    start = np.empty((8, 8), np.int64)
    start[:, 0::2] = np.arange(32).reshape(8, 4)
    start[:, 1::2] = -1
    expected = start + sum(a[s].astype(np.int64) @ b[s].astype(np.int64).T for s in range(3))
    np.testing.assert_array_equal(c, expected)


def load_matrices(x, out):
    buffer = cuda.shared.array(160, uint32)
    lane = cuda.threadIdx.x
    for i in range(5):
        buffer[32 * i + lane] = x[32 * i + lane]
    cuda.syncthreads()
    row = uint32(uint32(8) * uint32(lane % 16))
    out[0, lane] = ops.ldmatrix(buffer, row)
    first, second = ops.ldmatrix_x2(buffer, row)
    out[1, lane] = first
    out[2, lane] = second


def test_warp_ops_with_pointers_and_tuple_results(both):
    x = rng.integers(0, 2**32, 160).astype(np.uint32)
    _, out = both(load_matrices, 1, 32, x, np.zeros((3, 32), np.uint32))
    matrix = x[:128].reshape(16, 8)[:, :4]
    np.testing.assert_array_equal(out[0].reshape(8, 4), matrix[:8])
    np.testing.assert_array_equal(out[1].reshape(8, 4), matrix[:8])
    np.testing.assert_array_equal(out[2].reshape(8, 4), matrix[8:])


def index_of_other_kind(x, y):
    # A negative literal and a 64-bit index reach the op as its own types.
    y[0] = ops.rotate(-1, np.int64(4))
    a, b = ops.load_pair(x, np.int64(2))
    y[1] = a + b


def test_operands_are_converted(both):
    _, y = both(index_of_other_kind, 1, 1, np.arange(5, dtype=np.uint32), np.zeros(2, np.uint32))
    assert y.tolist() == [0xFFFFFFFF, 2 + 3]


def wrong_array(x):
    ops.load_pair(x, uint32(0))


def test_array_of_another_type_is_refused(engine):
    error = {"fast": emulate.CompileError, "interpreted": emulate.KernelError}[engine]
    with pytest.raises(error, match="t_load_pair: src: expected a flat array of u"):
        emulate.launch(wrong_array, 1, 1, np.zeros(4, np.float32), engine=engine)


def test_ops_need_a_kernel_unless_pure():
    assert ops.rotate(np.uint32(1), np.uint32(4)) == 16
    with pytest.raises(RuntimeError, match="needs a running kernel"):
        ops.load_pair(np.zeros(2, np.uint32), 0)


def test_ops_declared_twice_under_one_name_are_two_ops(engine):
    def declare(value):
        @device_op("u32(u32 x)", scope=Scope.WARP, ptx="// never compiled", name="t_again")
        def again(x):
            result = np.empty(32, np.uint32)
            result[:] = np.uint32(value)
            return result

        return again

    def make_kernel(op):
        def kernel(x):
            x[cuda.threadIdx.x] = op(x[cuda.threadIdx.x])

        return kernel

    for value in (3, 5):
        kernel = make_kernel(declare(value))
        x = np.zeros(32, np.uint32)
        try:
            emulate.launch(kernel, 1, 32, x, engine=engine)
        finally:
            del TABLE["t_again"], STUBS["t_again"]
        assert (x == value).all()


def through_numba(x):
    x[numba.cuda.threadIdx.x] = numba.uint32(numba.cuda.blockDim.x)


def test_cuda_reached_through_numba(both):
    (x,) = both(through_numba, 1, 3, np.zeros(3, np.uint32))
    assert x.tolist() == [3, 3, 3]
