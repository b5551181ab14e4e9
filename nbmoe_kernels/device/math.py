"""f32 arithmetic with one stated rounding an op, and the bit casts around it.

NVVM contracts ``a * b + c`` to one rounding and the CPU does not, and the GPU's min, max and exp
differ from the CPU's. So kernels use only these ops on floats. A NaN result is canonical,
0x7FFFFFFF, as on the GPU.
"""

import numpy as np
from numba import njit

from nbmoe_kernels.device.op import device_function, device_op

_NAN_BITS = 0x7FFFFFFF


@njit(inline="always")
def _canonical(x):
    # On bits: LLVM may replace `NaN if x != x else x` by x, since to it all NaNs are one.
    bits = np.float32(x).view(np.uint32)
    if np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        bits = np.uint32(_NAN_BITS)
    return np.uint32(bits).view(np.float32)


@device_op("u32(f32 x)", ptx="mov.b32 <ret>, <x>;")
def f32_bits(x):
    """Bits of an f32."""
    return np.float32(x).view(np.uint32)


@device_op("f32(u32 x)", ptx="mov.b32 <ret>, <x>;")
def bits_f32(x):
    """The f32 with these bits."""
    return np.uint32(x).view(np.float32)


@device_op("f32(f32 a, f32 b)", ptx="add.rn.f32 <ret>, <a>, <b>;")
def add_rn(a, b):
    """a + b, one rounding to nearest even."""
    return _canonical(np.float32(a) + np.float32(b))


@device_op("f32(f32 a, f32 b)", ptx="sub.rn.f32 <ret>, <a>, <b>;")
def sub_rn(a, b):
    """a - b, one rounding to nearest even."""
    return _canonical(np.float32(a) - np.float32(b))


@device_op("f32(f32 a, f32 b)", ptx="mul.rn.f32 <ret>, <a>, <b>;")
def mul_rn(a, b):
    """a * b, one rounding to nearest even."""
    return _canonical(np.float32(a) * np.float32(b))


@device_op(
    "f32(f32 a, f32 b)",
    ptx="{ .reg .f32 t; abs.f32 t, <a>; mul.rn.sat.f32 <ret>, t, <b>; }",
)
def mul_abs_sat(a, b):
    """|a| * b for a number b >= 0: one rounding to nearest even, then at most 1; +0 of a NaN."""
    magnitude = np.uint32(np.float32(a).view(np.uint32) & np.uint32(0x7FFFFFFF)).view(np.float32)
    product = magnitude * np.float32(b)
    if product >= np.float32(1.0):
        return np.float32(1.0)
    return product if product > np.float32(0.0) else np.float32(0.0)


@device_op("f32(f32 a, f32 b)", ptx="div.rn.f32 <ret>, <a>, <b>;")
def div_rn(a, b):
    """a / b, one rounding to nearest even."""
    return _canonical(np.float32(a) / np.float32(b))


@device_op("f32(f32 a, f32 b, f32 c)", ptx="fma.rn.f32 <ret>, <a>, <b>, <c>;")
def fma_rn(a, b, c):
    """a * b + c, one rounding to nearest even.

    The f64 product is exact. Its f64 sum with c is made round-to-odd, so the rounding to f32 is
    the only one that can change the value (f64 has more than twice f32's bits plus two).
    """
    product = np.float64(a) * np.float64(b)
    addend = np.float64(c)
    total = product + addend
    if total - total == 0.0:
        high = total - product
        error = (product - (total - high)) + (addend - high)
        if error != 0.0:
            bits = np.float64(total).view(np.int64)
            if bits & 1 == 0:
                bits += 1 if (error > 0.0) == (total > 0.0) else -1
                total = np.int64(bits).view(np.float64)
    return _canonical(np.float32(total))


@device_op("f32(f32 a, f32 b)", ptx="min.f32 <ret>, <a>, <b>;")
def min_num(a, b):
    """The smaller; a NaN operand loses against a number; -0 < +0."""
    if a != a:
        return _canonical(np.float32(b))
    if b != b:
        return np.float32(a)
    if a == b:
        return np.uint32(np.float32(a).view(np.uint32) | np.float32(b).view(np.uint32)).view(
            np.float32
        )
    return np.float32(a) if a < b else np.float32(b)


@device_op(
    "f32(f32 a, f32 b)",
    ptx="{ .reg .f32 t; abs.f32 t, <a>; min.f32 <ret>, t, <b>; }",
)
def min_abs(a, b):
    """The smaller of |a| and a number b >= 0; b where a is NaN."""
    magnitude = np.uint32(np.float32(a).view(np.uint32) & np.uint32(0x7FFFFFFF)).view(np.float32)
    return magnitude if magnitude < b else np.float32(b)


@device_op("f32(f32 a, f32 b)", ptx="max.NaN.f32 <ret>, <a>, <b>;")
def max_nan(a, b):
    """The larger; a NaN operand wins; +0 > -0."""
    if a != a or b != b:
        return np.uint32(_NAN_BITS).view(np.float32)
    if a == b:
        return np.uint32(np.float32(a).view(np.uint32) & np.float32(b).view(np.uint32)).view(
            np.float32
        )
    return np.float32(a) if a > b else np.float32(b)


@device_op("f32(f32 a, f32 b)", ptx="max.f32 <ret>, <a>, <b>;")
def max_num(a, b):
    """The larger; a NaN operand loses against a number; +0 > -0."""
    if a != a:
        return _canonical(np.float32(b))
    if b != b:
        return np.float32(a)
    if a == b:
        return np.uint32(np.float32(a).view(np.uint32) & np.float32(b).view(np.uint32)).view(
            np.float32
        )
    return np.float32(a) if a > b else np.float32(b)


@device_op("f32(f32 a, f32 b)", ptx="min.NaN.f32 <ret>, <a>, <b>;")
def min_nan(a, b):
    """The smaller; a NaN operand wins; -0 < +0."""
    if a != a or b != b:
        return np.uint32(_NAN_BITS).view(np.float32)
    if a == b:
        return np.uint32(np.float32(a).view(np.uint32) | np.float32(b).view(np.uint32)).view(
            np.float32
        )
    return np.float32(a) if a < b else np.float32(b)


@device_op("f32(f32 x)", ptx="sqrt.rn.f32 <ret>, <x>;")
def sqrt_rn(x):
    """Square root, one rounding to nearest even; of -0 it is -0."""
    return _canonical(np.float32(np.sqrt(np.float32(x))))


@device_op("i32(f32 x)", ptx="cvt.rzi.s32.f32 <ret>, <x>;")
def i32_of_f32(x):
    """The integer part, saturating; 0 of a NaN. NumPy and Numba leave these cases open."""
    if x != x:
        return np.int32(0)
    if x >= np.float32(2147483648.0):
        return np.int32(2147483647)
    if x <= np.float32(-2147483648.0):
        return np.int32(-2147483648)
    return np.int32(x)


_LOG2_E = np.float32(1.4426950408889634)
_ROUNDER = np.float32(12582912.0)
_ROUNDER_BITS = np.uint32(0x4B400000)
_LN2_HIGH = np.float32(-0.693359375)
_LN2_LOW = np.float32(2.12194440e-4)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_COEFFICIENTS = tuple(np.float32(1.0 / d) for d in (5040.0, 720.0, 120.0, 24.0, 6.0, 2.0))
_C7, _C6, _C5, _C4, _C3, _C2 = _COEFFICIENTS
_LOW, _HIGH = np.float32(-88.0), np.float32(89.0)


@device_function
def exp_f32(x):
    """exp(x) of the specification: Cody-Waite reduction and a degree-7 Taylor polynomial.

    Every step is one stated rounding, so the bits are the same everywhere. x is clamped to
    [-88, 89]; a NaN stays NaN.
    """
    x = min_nan(max_nan(x, _LOW), _HIGH)
    t = fma_rn(x, _LOG2_E, _ROUNDER)
    n = sub_rn(t, _ROUNDER)
    r = fma_rn(n, _LN2_LOW, fma_rn(n, _LN2_HIGH, x))
    p = fma_rn(_C7, r, _C6)
    p = fma_rn(p, r, _C5)
    p = fma_rn(p, r, _C4)
    p = fma_rn(p, r, _C3)
    p = fma_rn(p, r, _C2)
    p = fma_rn(p, r, _ONE)
    p = fma_rn(p, r, _ONE)
    # 2^n as two factors: n reaches 128, which no single f32 exponent holds.
    power = np.int32(np.int32(f32_bits(t)) - np.int32(_ROUNDER_BITS))
    half = np.int32(power >> np.int32(1))
    low = bits_f32(np.uint32(np.int32(half + np.int32(127)) << np.int32(23)))
    high = bits_f32(np.uint32(np.int32(np.int32(power - half) + np.int32(127)) << np.int32(23)))
    return mul_rn(mul_rn(p, low), high)


@device_function
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return div_rn(_ONE, add_rn(_ONE, exp_f32(sub_rn(_ZERO, x))))
