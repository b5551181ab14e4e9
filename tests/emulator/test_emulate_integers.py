"""Integers of declared width are the same in both engines and as in CUDA."""

import numpy as np
from numba import cuda, int32, uint8, uint32, uint64

rng = np.random.default_rng(3)


def mixed(x, y, out, wide):
    i = cuda.threadIdx.x
    a, b = x[i], y[i]
    out[i, 0] = uint32(a + b)
    out[i, 1] = uint32(a - b)
    out[i, 2] = uint32(a * b)
    out[i, 3] = uint32(uint32(a << uint32(7)) ^ uint32(b >> uint32(3)))
    out[i, 4] = uint32(int32(a) >> int32(4))
    out[i, 5] = uint32(uint8(a)) + uint32(0)
    out[i, 6] = uint32(~a & b)
    out[i, 7] = uint32(a // (b | uint32(1))) + uint32(a % (b | uint32(1)))
    out[i, 8] = uint32(-1)
    out[i, 9] = np.uint32(np.int32(-5) + np.int32(i))
    wide[i] = uint64(a) * uint64(b) + uint64(i)


def test_uint32_arithmetic_wraps(both):
    n = 64
    x, y = rng.integers(0, 2**32, (2, n)).astype(np.uint32)
    *_, out, wide = both(mixed, 1, n, x, y, np.zeros((n, 10), np.uint32), np.zeros(n, np.uint64))
    for i in range(n):
        a, b = int(x[i]), int(y[i])
        signed = a - 2**32 if a >= 2**31 else a
        expected = [
            a + b,
            a - b,
            a * b,
            (a << 7) % 2**32 ^ b >> 3,
            signed >> 4,
            a % 256,
            ~a & b,
            a // (b | 1) + a % (b | 1),
            -1,
            -5 + i,
        ]
        assert out[i].tolist() == [v % 2**32 for v in expected]
        assert int(wide[i]) == (a * b + i) % 2**64


def signed_index(x, out):
    i = int32(cuda.threadIdx.x)
    out[i] = x[int32(i - int32(1))]


def test_negative_index_wraps_as_in_numba_cuda(both):
    x = np.arange(4, dtype=np.uint32)
    _, out = both(signed_index, 1, 4, x, np.zeros(4, np.uint32))
    assert out.tolist() == [3, 0, 1, 2]


def floats(x, out):
    i = cuda.threadIdx.x
    out[0, i] = np.float32(1) / x[i]
    out[1, i] = x[i] * x[i] + x[i]
    out[2, i] = np.float32(np.float64(x[i]) * np.float64(3))


def test_float_arithmetic_is_ieee_without_contraction(both):
    bits = rng.integers(0, 2**32, 256).astype(np.uint32)
    bits[:4] = [0, 0x80000000, 0x7F800000, 1]
    x = bits.view(np.float32)
    x = np.where(np.isnan(x), np.float32(2), x)
    _, out = both(floats, 1, 256, x, np.zeros((3, 256), np.float32))
    with np.errstate(all="ignore"):
        expected = [np.float32(1) / x, x * x + x, (x.astype(np.float64) * 3).astype(np.float32)]
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(out.view(np.uint32)[finite],
                                  np.array(expected).view(np.uint32)[finite])  # fmt: skip
    assert np.isnan(out[~finite]).all()
