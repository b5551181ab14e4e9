"""Warp-level tensor-core products and the bit-exact model of their accumulation.

The model is Hopper's (named `hopper`): one step sums 16 exact products and the accumulator; every
addend is cut toward zero to a multiple of 2^(emax - 25), where emax is the largest exponent of a
non-zero addend and a product's exponent is the sum of its operands' (not normalised); the exact
sum is cut toward zero to 24 bits. NaN results are 0x7FFFFFFF, a zero result is +0.
"""

import numpy as np
from numba import njit

from nbmoe_kernels.device.op import Scope, device_op

_FRACTION_BITS = 25
_MIN_EXPONENT = -133
"""No grid is finer than 2^(-133 - 25); seen on the card with bf16, out of reach for f16."""
_NAN_BITS = 0x7FFFFFFF


@njit
def _decode_f16(bits):
    """(signed significand, exponent) with value = significand * 2^(exponent - 10)."""
    field = np.int32((bits >> np.uint32(10)) & np.uint32(31))
    significand = np.int32(bits & np.uint32(0x3FF))
    if field > 0:
        significand += np.int32(1024)
    exponent = np.int32(max(field, np.int32(1)) - np.int32(15))
    return (-significand if bits & np.uint32(0x8000) else significand), exponent


@njit
def _special_sum(a, b, c):
    """The result where an operand is Inf or NaN. a, b: 16 f16 bit patterns, c: an f32."""
    positive = c == np.inf
    negative = c == -np.inf
    nan = c != c
    for k in range(16):
        x, y = a[k], b[k]
        mx, my = x & np.uint32(0x7FFF), y & np.uint32(0x7FFF)
        if mx > np.uint32(0x7C00) or my > np.uint32(0x7C00):
            nan = True
        elif mx == np.uint32(0x7C00) or my == np.uint32(0x7C00):
            if mx == 0 or my == 0:
                nan = True
            elif (x ^ y) & np.uint32(0x8000):
                negative = True
            else:
                positive = True
    if nan or (positive and negative):
        return np.uint32(_NAN_BITS).view(np.float32), True
    if positive:
        return np.float32(np.inf), True
    if negative:
        return np.float32(-np.inf), True
    return np.float32(0), False


@njit
def _cut_to_f32(total, exponent):
    """total * 2^exponent cut toward zero to f32; exact in f64 because |total| < 2^53."""
    value = np.float64(total) * np.int64((exponent + 1023) << 52).view(np.float64)
    if abs(value) < 2.0**-126:
        return np.float32(np.trunc(value * 2.0**149) * 2.0**-149) + np.float32(0)
    kept = np.float64(value).view(np.int64) & np.int64(~((1 << 29) - 1))
    return np.float32(np.int64(kept).view(np.float64))


@njit
def _fused_dot(sa, ea, sb, eb, c):
    """One step for finite operands: significands and exponents of 16 pairs, and the f32 c."""
    bits = np.float32(c).view(np.uint32)
    field = np.int32((bits >> np.uint32(23)) & np.uint32(255))
    c_significand = np.int64(bits & np.uint32(0x7FFFFF))
    if field > 0:
        c_significand += np.int64(1 << 23)
    c_exponent = np.int32(max(field, np.int32(1)) - np.int32(127))
    largest = np.int32(_MIN_EXPONENT)
    if c_significand != 0:
        largest = max(largest, c_exponent)
    for k in range(16):
        if sa[k] != 0 and sb[k] != 0:
            largest = max(largest, ea[k] + eb[k])
    total = np.int64(0)
    for k in range(16):
        product = np.int64(sa[k]) * np.int64(sb[k])
        shift = ea[k] + eb[k] - 20 + _FRACTION_BITS - largest
        magnitude = abs(product)
        if shift >= 0:
            magnitude <<= np.int64(shift)
        else:
            magnitude >>= np.int64(min(-shift, 63))
        total += magnitude if product > 0 else -magnitude
    shift = c_exponent - 23 + _FRACTION_BITS - largest
    if shift >= 0:
        c_significand <<= np.int64(shift)
    else:
        c_significand >>= np.int64(min(-shift, 63))
    total += -c_significand if bits >> np.uint32(31) else c_significand
    if total == 0:
        return np.float32(0)
    return _cut_to_f32(total, np.int64(largest) - _FRACTION_BITS)


@njit
def _unpack_operand(words, rows, halves):
    """Fragment words, one (rows, 8) matrix of pairs along k, to f16 bits (rows, 16)."""
    for r in range(rows):
        for pair in range(8):
            halves[r, 2 * pair] = words[r, pair] & np.uint32(0xFFFF)
            halves[r, 2 * pair + 1] = words[r, pair] >> np.uint32(16)


@device_op(
    "void(f32[4] acc, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1)",
    scope=Scope.WARP,
    ptx="mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 <acc>, "
    "{<a0>, <a1>, <a2>, <a3>}, {<b0>, <b1>}, <acc>;",
    effects=(),
)
def mma_m16n8k16_f16(acc, a0, a1, a2, a3, b0, b1):
    """acc (16 x 8, f32) += a (16 x 16, f16) @ b (16 x 8, f16).

    With g = lane // 4 and t = lane % 4: a0 holds row g, k 2t and 2t+1; a1 row g+8; a2 row g,
    k 2t+8 and 2t+9; a3 row g+8, the same k; b0 holds column g, k 2t and 2t+1; b1 k 2t+8 and 2t+9;
    acc[0], acc[1] are row g, columns 2t and 2t+1, acc[2], acc[3] row g+8.
    """
    a_words = np.empty((16, 8), np.uint32)
    b_words = np.empty((8, 8), np.uint32)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        a_words[g, t], a_words[g + 8, t] = a0[lane], a1[lane]
        a_words[g, t + 4], a_words[g + 8, t + 4] = a2[lane], a3[lane]
        b_words[g, t], b_words[g, t + 4] = b0[lane], b1[lane]
    a = np.empty((16, 16), np.uint32)
    b = np.empty((8, 16), np.uint32)
    _unpack_operand(a_words, 16, a)
    _unpack_operand(b_words, 8, b)
    sa, ea = np.empty((16, 16), np.int32), np.empty((16, 16), np.int32)
    sb, eb = np.empty((8, 16), np.int32), np.empty((8, 16), np.int32)
    special = False
    for k in range(16):
        for row in range(16):
            sa[row, k], ea[row, k] = _decode_f16(a[row, k])
            special |= (a[row, k] & np.uint32(0x7C00)) == np.uint32(0x7C00)
        for column in range(8):
            sb[column, k], eb[column, k] = _decode_f16(b[column, k])
            special |= (b[column, k] & np.uint32(0x7C00)) == np.uint32(0x7C00)
    for lane in range(32):
        for j in range(4):
            row, column = lane // 4 + 8 * (j // 2), 2 * (lane % 4) + j % 2
            c = acc[lane, j]
            if special or not abs(c) < np.inf:
                value, decided = _special_sum(a[row], b[column], c)
                if decided:
                    acc[lane, j] = value
                    continue
            acc[lane, j] = _fused_dot(sa[row], ea[row], sb[column], eb[column], c)
