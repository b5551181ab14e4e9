"""Wrong bits. No detector knows what was meant: the output is compared with the expected bytes."""

import ml_dtypes
import numpy as np
from numba import cuda, float32, uint32

from nbmoe_kernels.device.convert import bf16x2_of_f32, e4m3_of_f32, f32_of_e4m3
from nbmoe_kernels.device.math import add_rn, bits_f32, div_rn, fma_rn, mul_rn
from tests.emulator.planted.case import BYTES, case, ramp, zeros

_random = np.random.default_rng(7)
_FLOATS = _random.standard_normal(64).astype(np.float32)


def _sum_in_order(x, out):
    total = np.float32(0)
    for value in x:
        total = np.float32(total + value)
    return {1: [total]}


@case(BYTES, block=1, args=lambda: (_FLOATS, np.zeros(1, np.float32)), want=_sum_in_order)
def order_of_a_sum(bug):
    """The specification adds in ascending order; two halves added later round elsewhere."""

    def kernel(x, out):
        total = float32(0)
        if bug:
            upper = float32(0)
            for i in range(32):
                total = add_rn(total, x[i])
                upper = add_rn(upper, x[32 + i])
            total = add_rn(total, upper)
        else:
            for i in range(64):
                total = add_rn(total, x[i])
        out[0] = total

    return kernel


def _fused(x, out):
    exact = x.astype(np.longdouble) ** 2 + np.longdouble(x[::-1])
    return {1: exact.astype(np.float32)}


@case(BYTES, args=lambda: (_FLOATS, np.zeros(64, np.float32)), want=_fused)
def two_roundings_for_one(bug):
    """x * x + y is one rounding with an fma, two with a product and a sum."""

    def kernel(x, out):
        t = cuda.threadIdx.x
        if bug:
            out[t] = add_rn(mul_rn(x[t], x[t]), x[63 - t])
        else:
            out[t] = fma_rn(x[t], x[t], x[63 - t])

    return kernel


@case(
    BYTES,
    args=lambda: (ramp(64, dtype=np.float32), np.zeros(64, np.float32)),
    want=lambda x, out: {1: x / np.float32(7)},
)
def product_with_reciprocal(bug):
    """x * (1 / 7) is x / 7 for most x only."""

    def kernel(x, out):
        t = cuda.threadIdx.x
        seven = float32(7)
        if bug:
            out[t] = mul_rn(x[t], div_rn(float32(1), seven))
        else:
            out[t] = div_rn(x[t], seven)

    return kernel


_NEAR_TIES = (np.float32(1) + np.arange(64, dtype=np.float32) * np.float32(2**-7)) * np.float32(
    1 + 2**-12
)


@case(
    BYTES,
    args=lambda: (_NEAR_TIES, zeros(64, dtype=np.uint8)),
    want=lambda x, out: {1: x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)},
)
def rounded_twice(bug):
    """f32 to bf16 to e4m3: bf16 rounds to a tie, and the tie then rounds the other way."""

    def kernel(x, out):
        t = cuda.threadIdx.x
        value = x[t]
        if bug:
            value = bits_f32(uint32(bf16x2_of_f32(value, value) << uint32(16)))
        out[t] = e4m3_of_f32(value)

    return kernel


_CODES = np.arange(127, dtype=np.uint32)


@case(
    BYTES,
    block=127,
    args=lambda: (_CODES, np.zeros(127, np.float32)),
    want=lambda codes, out: {
        1: codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    },
)
def subnormals_lost(bug):
    """A decoder that rebuilds the exponent by hand takes subnormals for normal numbers."""

    def kernel(codes, out):
        t = cuda.threadIdx.x
        code = codes[t]
        if bug:
            out[t] = bits_f32(uint32(uint32(code << uint32(20)) + uint32(120 << 23)))
        else:
            out[t] = f32_of_e4m3(code)

    return kernel


@case(
    BYTES,
    block=32,
    args=lambda: (ramp(32, dtype=np.uint8), zeros(64, dtype=np.uint8)),
    want=lambda packed, out: {1: np.stack([packed & 15, packed >> 4], 1).ravel()},
)
def nibbles_swapped(bug):
    """The even element is in the low half of the byte."""

    def kernel(packed, out):
        t = cuda.threadIdx.x
        low, high = packed[t] & 15, packed[t] >> 4
        if bug:
            low, high = high, low
        out[2 * t] = low
        out[2 * t + 1] = high

    return kernel


_WIDE = np.array([3e38, -3e38, 1.5, -2.0, 1e-30, 7.0, 0.0, 448.0], np.float32)


@case(
    BYTES,
    block=8,
    args=lambda: (_WIDE, np.zeros(8, np.float32)),
    want=lambda x, out: {1: x / np.float32(2)},
)
def scaled_in_the_wrong_order(bug):
    """(x * 2) / 4 overflows where x * (2 / 4) does not."""

    def kernel(x, out):
        t = cuda.threadIdx.x
        two, four = float32(2), float32(4)
        if bug:
            out[t] = div_rn(mul_rn(x[t], two), four)
        else:
            out[t] = mul_rn(x[t], div_rn(two, four))

    return kernel
