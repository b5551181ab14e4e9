"""Bit-exact model of Hopper's tensor cores, for the twins of mma and wgmma.

One step (named `hopper`) sums K exact products and the accumulator. Every addend is cut toward
zero to a multiple of 2^(emax - F), where emax is the largest exponent of an addend that is not
zero and a product's exponent is the sum of its operands' (not normalised). The sum of the cut
addends is exact and is cut toward zero to P bits. A NaN result is 0x7FFFFFFF, a zero result +0.
f16 and bf16 steps have F = 25 and P = 24, e4m3 steps of wgmma F = 13 and P = 14.

`_make_fused_step` computes a tile of outputs at once. A product has at most 22 bits, so f32 holds
it exactly while its exponent is in range; times 2^(F - emax), a power of two, it is an integer with
a fraction, and the conversion to an integer is the cut. The integers' sum fits 32 bits: 16 products
below 4 * 2^25, or 32 below 4 * 2^13. Nothing in it depends on the order of the sum.
"""

import numpy as np
from numba import njit

from nbmoe_kernels.device.fragments import transposed

_WIDE_F, _WIDE_P = 25, 24
_E4M3_F, _E4M3_P = 13, 14
_MIN_EXPONENT = -133
"""No grid is finer than 2^(-133 - F); seen on the card with bf16, out of reach for the others."""
_NAN_BITS = 0x7FFFFFFF
_NO_EXPONENT = -1000
"""Exponent of a zero operand: its products never count in emax."""
_LOWEST, _HIGHEST = -50, 63
"""Operand exponents whose products f32 holds exactly and scales without overflow."""


@njit
def _scaled(significand, exponent):
    """significand * 2^exponent as an f32, where that is a normal number or zero."""
    # Without subnormal f32, on which CPUs are slow.
    power = np.int32((exponent + 127) << 23).view(np.float32)
    return np.float32(significand) * power


@njit
def _decode_f16(bits):
    """Values (f32), exponents and whether any is Inf or NaN, of a matrix of f16 bits."""
    values, exponents = np.empty(bits.shape, np.float32), np.empty(bits.shape, np.int32)
    flat, flat_values, flat_exponents = bits.ravel(), values.ravel(), exponents.ravel()
    special = False
    for i in range(flat.size):
        magnitude = np.int32(flat[i] & 0x7FFF)
        field = np.int32(magnitude >> 10)
        special |= field == 31
        exponent = np.int32(max(field, 1) - 15)
        value = _scaled(np.int32((magnitude & 0x3FF) | ((field > 0) << 10)), exponent - 10)
        if field == 31:
            value = np.int32((magnitude << 13) | 0x7F800000).view(np.float32)
        flat_values[i] = -value if flat[i] & 0x8000 else value
        flat_exponents[i] = exponent if magnitude != 0 else _NO_EXPONENT
    return values, exponents, special


@njit
def _decode_bf16(bits):
    """As `_decode_f16` for bf16 bits."""
    values, exponents = np.empty(bits.shape, np.float32), np.empty(bits.shape, np.int32)
    flat, flat_values, flat_exponents = bits.ravel(), values.ravel(), exponents.ravel()
    special = False
    for i in range(flat.size):
        magnitude = np.int32(flat[i] & 0x7FFF)
        field = np.int32(magnitude >> 7)
        special |= field == 255
        flat_values[i] = np.uint32(np.uint32(flat[i]) << np.uint32(16)).view(np.float32)
        flat_exponents[i] = max(field, 1) - 127 if magnitude != 0 else _NO_EXPONENT
    return values, exponents, special


@njit
def _decode_e4m3(codes):
    """As `_decode_f16` for e4m3 codes, which have no Inf."""
    values, exponents = np.empty(codes.shape, np.float32), np.empty(codes.shape, np.int32)
    flat, flat_values, flat_exponents = codes.ravel(), values.ravel(), exponents.ravel()
    special = False
    for i in range(flat.size):
        magnitude = np.int32(flat[i] & 0x7F)
        special |= magnitude == 0x7F
        field = np.int32(magnitude >> 3)
        exponent = np.int32(max(field, 1) - 7)
        value = _scaled(np.int32((magnitude & 7) | ((field > 0) << 3)), exponent - 3)
        if magnitude == 0x7F:
            value = np.float32(np.nan)
        flat_values[i] = -value if flat[i] & 0x80 else value
        flat_exponents[i] = exponent if magnitude != 0 else _NO_EXPONENT
    return values, exponents, special


@njit
def _special_sum(a, b, c):
    """(result, True) where an operand is Inf or NaN, else (0, False). a, b: K values each."""
    positive = c == np.inf
    negative = c == -np.inf
    nan = c != c
    for k in range(a.size):
        x, y = a[k], b[k]
        if not (abs(x) < np.inf and abs(y) < np.inf):
            # Inf times 0 is NaN; a finite factor only gives the sign.
            product = x * y
            nan |= product != product
            positive |= product == np.inf
            negative |= product == -np.inf
    if nan or (positive and negative):
        return np.uint32(_NAN_BITS).view(np.float32), True
    if positive:
        return np.float32(np.inf), True
    if negative:
        return np.float32(-np.inf), True
    return np.float32(0), False


@njit
def _cut(value, precision):
    """An f64 cut toward zero to f32 with ``precision`` bits; a zero is +0."""
    if abs(value) < 2.0**-126:
        # Subnormals: a multiple of 2^(-125 - precision).
        step = np.int64((1023 - 125 - precision) << 52).view(np.float64)
        return np.float32(np.trunc(value / step) * step) + np.float32(0)
    kept = np.float64(value).view(np.int64) & ~((np.int64(1) << (53 - precision)) - 1)
    return np.float32(np.int64(kept).view(np.float64))


def _make_fused_step(float_type, int_type, bias, mantissa_bits, lowest):
    """A function that does one step for a tile of outputs, in place.

    Its arguments: values a (M, K) and exponents ea, b (K, N) and eb, accumulators c (M, N) f32,
    whether a or b holds an Inf or a NaN, F and P. K is a multiple of 4.

    Args:
        float_type: type of the products; f32 is exact for operand exponents in [_LOWEST, _HIGHEST].
        int_type: the integer of its size.
        bias: its exponent bias.
        mantissa_bits: bits of its mantissa field.
        lowest: no product that is not zero has a smaller exponent.
    """

    @njit
    def step(a, ea, b, eb, c, special, fraction, precision):
        rows, depth = a.shape
        columns = b.shape[1]
        top = np.empty(columns, np.int32)
        scale_bits = np.empty(columns, int_type)
        scale = scale_bits.view(float_type)
        total = np.empty(columns, np.int32)
        for i in range(rows):
            c_row = c[i]
            c_bits = c_row.view(np.int32)
            checked = special
            for j in range(columns):
                magnitude = np.int32(c_bits[j] & 0x7FFFFFFF)
                field = np.int32(magnitude >> 23)
                exponent = np.int32(max(field, np.int32(1)) - np.int32(127))
                checked |= field == 255
                top[j] = exponent if magnitude != 0 else np.int32(_MIN_EXPONENT)
            for j in range(columns):
                top[j] = max(top[j], np.int32(_MIN_EXPONENT))
            for k in range(0, depth, 4):
                e0, e1, e2, e3 = ea[i, k], ea[i, k + 1], ea[i, k + 2], ea[i, k + 3]
                for j in range(columns):
                    t0 = np.int32(e0 + eb[k, j])
                    t1 = np.int32(e1 + eb[k + 1, j])
                    t2 = np.int32(e2 + eb[k + 2, j])
                    t3 = np.int32(e3 + eb[k + 3, j])
                    top[j] = max(max(max(t0, t1), max(t2, t3)), top[j])
            for j in range(columns):
                # Below `lowest` all products are zero and any scale will do.
                exponent = max(top[j], np.int32(lowest))
                scale_bits[j] = int_type(int_type(bias + fraction - exponent) << mantissa_bits)
                total[j] = 0
            for k in range(0, depth, 4):
                a0, a1, a2, a3 = a[i, k], a[i, k + 1], a[i, k + 2], a[i, k + 3]
                for j in range(columns):
                    s = scale[j]
                    p0 = np.int32(a0 * b[k, j] * s)
                    p1 = np.int32(a1 * b[k + 1, j] * s)
                    p2 = np.int32(a2 * b[k + 2, j] * s)
                    p3 = np.int32(a3 * b[k + 3, j] * s)
                    total[j] = np.int32(total[j] + np.int32(np.int32(p0 + p1) + np.int32(p2 + p3)))
            for j in range(columns):
                old = c_row[j]
                if checked:
                    value, decided = _special_sum(a[i], b[:, j], old)
                    if decided:
                        c_row[j] = value
                        continue
                to_grid = np.int64((1023 + fraction - np.int64(top[j])) << 52).view(np.float64)
                of_grid = np.int64((1023 - fraction + np.int64(top[j])) << 52).view(np.float64)
                addend = np.int64(np.float64(old) * to_grid)
                c_row[j] = _cut((np.float64(total[j]) + np.float64(addend)) * of_grid, precision)

    return step


_narrow_step = _make_fused_step(np.float32, np.int32, 127, 23, 2 * _LOWEST)
_wide_step = _make_fused_step(np.float64, np.int64, 1023, 52, _MIN_EXPONENT)


@njit
def _in_range(exponents):
    inside = True
    for e in exponents.flat:
        inside &= e == _NO_EXPONENT or (_LOWEST <= e <= _HIGHEST)
    return inside


@njit
def step_f16(a_bits, b_bits, c):
    """c (M, N) f32 += a (M, K) @ b (N, K).T of f16 bits, K a multiple of 4: one step, in place."""
    a, ea, special_a = _decode_f16(a_bits)
    b, eb, special_b = _decode_f16(b_bits)
    special = special_a or special_b
    _narrow_step(a, ea, transposed(b), transposed(eb), c, special, _WIDE_F, _WIDE_P)


@njit
def step_bf16(a_bits, b_bits, c):
    """`step_f16` for bf16 bits; extreme exponents take the slower step."""
    a, ea, special_a = _decode_bf16(a_bits)
    b, eb, special_b = _decode_bf16(b_bits)
    special = special_a or special_b
    b, eb = transposed(b), transposed(eb)
    if _in_range(ea) and _in_range(eb):
        _narrow_step(a, ea, b, eb, c, special, _WIDE_F, _WIDE_P)
    else:
        wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
        _wide_step(wide_a, ea, wide_b, eb, c, special, _WIDE_F, _WIDE_P)


@njit
def step_e4m3(a_codes, b_codes, c):
    """`step_f16` for e4m3 codes with the short accumulator of wgmma."""
    a, ea, special_a = _decode_e4m3(a_codes)
    b, eb, special_b = _decode_e4m3(b_codes)
    special = special_a or special_b
    _narrow_step(a, ea, transposed(b), transposed(eb), c, special, _E4M3_F, _E4M3_P)


@njit
def step_e4m3_as_f16(a_codes, b_codes, c):
    """`step_f16` for e4m3 codes that were widened to f16."""
    a, ea, special_a = _decode_e4m3(a_codes)
    b, eb, special_b = _decode_e4m3(b_codes)
    special = special_a or special_b
    _narrow_step(a, ea, transposed(b), transposed(eb), c, special, _WIDE_F, _WIDE_P)
