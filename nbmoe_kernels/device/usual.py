"""Short forms of f32 functions, for arguments far from the ends of f32.

There they have the bits of the long forms in `nbmoe_kernels.device.math`.
"""

import numpy as np

from nbmoe_kernels.device.math import add_rn, bits_f32, f32_bits, fma_rn, sub_rn
from nbmoe_kernels.device.op import device_function, device_op

_NAN_BITS = np.uint32(0x7FFFFFFF)

LARGEST_EXPONENT = np.float32(80.0)
"""`exp_negative` takes arguments up to here."""
_MINUS_LOG2_E = np.float32(-1.4426950408889634)
_ROUNDER = np.float32(12582912.0)
_LN2_HIGH = np.float32(-0.693359375)
_LN2_LOW = np.float32(2.12194440e-4)
_ONE = np.float32(1.0)
_C7, _C6, _C5, _C4, _C3, _C2 = (np.float32(1.0 / d) for d in (5040.0, 720.0, 120.0, 24.0, 6.0, 2.0))


@device_op(
    "f32(f32 x)",
    ptx="{ .reg .f32 y, e, m; rcp.approx.ftz.f32 y, <x>; neg.f32 m, <x>; "
    "fma.rn.f32 e, m, y, 0f3F800000; fma.rn.f32 <ret>, y, e, y; }",
)
def reciprocal_usual(x):
    """1 / x, one rounding to nearest even, of a positive x in 2^-100..2^100; NaN of 0.

    Newton's step after the hardware's estimate: what the full instruction does for such x.
    """
    if x == np.float32(0.0):
        return np.uint32(_NAN_BITS).view(np.float32)
    return np.float32(np.float32(1.0) / np.float32(x))


@device_op(
    "f32(f32 a, f32 b)",
    ptx="{ .reg .f32 s, t; abs.f32 s, <a>; abs.f32 t, <b>; max.NaN.f32 <ret>, s, t; }",
)
def max_abs(a, b):
    """The larger of |a| and |b|; NaN wins."""
    # Magnitudes order as their bits do, and NaN are above infinity.
    x = np.uint32(np.float32(a).view(np.uint32) & np.uint32(0x7FFFFFFF))
    y = np.uint32(np.float32(b).view(np.uint32) & np.uint32(0x7FFFFFFF))
    larger = x if x > y else y
    if larger > np.uint32(0x7F800000):
        larger = np.uint32(_NAN_BITS)
    return np.uint32(larger).view(np.float32)


@device_function
def exp_negative(x):
    """exp(-x) for |x| <= LARGEST_EXPONENT: the steps of `exp_f32`, less its clamps.

    The result is normal and so is the polynomial's value, near 1: its exponent may be added to.
    """
    t = fma_rn(x, _MINUS_LOG2_E, _ROUNDER)
    n = sub_rn(t, _ROUNDER)
    r = fma_rn(n, _LN2_LOW, fma_rn(n, _LN2_HIGH, np.float32(-x)))
    p = fma_rn(_C7, r, _C6)
    p = fma_rn(p, r, _C5)
    p = fma_rn(p, r, _C4)
    p = fma_rn(p, r, _C3)
    p = fma_rn(p, r, _C2)
    p = fma_rn(p, r, _ONE)
    p = fma_rn(p, r, _ONE)
    # t's low bits are n, and the rest of it leaves the word.
    return bits_f32(np.uint32(f32_bits(p) + np.uint32(f32_bits(t) << np.uint32(23))))


@device_function
def sigmoid_of(x):
    """1 / (1 + exp(-x)) for |x| <= LARGEST_EXPONENT."""
    return reciprocal_usual(add_rn(_ONE, exp_negative(x)))


@device_op("u32(u32 x)", ptx="mov.b32 <ret>, <x>;", effects=())
def hidden(x):
    """x, but the compiler cannot know it: a loop to it stays one copy of its body."""
    return np.uint32(x)
