"""Conversions between f32, bf16, f16, e4m3 and e2m1 bit patterns.

Numbers narrower than f32 travel as bits in u32 registers. e2m1 and, before sm_89, e4m3 have no
conversion instruction, so those are integer code, the same on every architecture.
"""

import numpy as np
from numba import njit

from nbmoe_kernels.device.math import bits_f32, f32_bits, fma_rn, min_num, mul_rn
from nbmoe_kernels.device.op import device_function, device_op


@njit(inline="always")
def bf16_of_f32(x):
    """bf16 bits nearest to an f32, ties to even; a NaN becomes 0x7FFF. For twins."""
    u = np.float32(x).view(np.uint32)
    if (u & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint32(0x7FFF)
    odd = np.uint32((u >> np.uint32(16)) & np.uint32(1))
    return np.uint32(np.uint32(u + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@device_op("u32(f32 high, f32 low)", ptx="cvt.rn.bf16x2.f32 <ret>, <high>, <low>;")
def bf16x2_of_f32(high, low):
    """Two f32 to packed bf16, nearest even; a NaN becomes 0x7FFF."""
    return np.uint32((bf16_of_f32(high) << np.uint32(16)) | bf16_of_f32(low))


@device_function
def f32_of_bf16(bits):
    """The value of the bf16 in the low half of a word."""
    return bits_f32(np.uint32(np.uint32(bits) << np.uint32(16)))


@device_op("f32(u32 word)", ptx="{ .reg .b32 t; shl.b32 t, <word>, 16; mov.b32 <ret>, t; }")
def f32_of_low_bf16(word):
    """The value of the bf16 in the low half of a word; one instruction, whatever made the word."""
    return np.uint32(np.uint32(word) << np.uint32(16)).view(np.float32)


@njit(inline="always")
def _max_bf16(a, b):
    if (a & np.uint32(0x7FFF)) > np.uint32(0x7F80) or (b & np.uint32(0x7FFF)) > np.uint32(0x7F80):
        return np.uint32(0x7FFF)
    # Sign-magnitude bits become ordered integers.
    x = np.int32(0x7FFF) - np.int32(a) if a & np.uint32(0x8000) else np.int32(a)
    y = np.int32(0x7FFF) - np.int32(b) if b & np.uint32(0x8000) else np.int32(b)
    return a if x >= y else b


@device_op("u32(u32 a, u32 b)", ptx="max.NaN.bf16x2 <ret>, <a>, <b>;")
def max_nan_bf16x2(a, b):
    """Larger of each half; a NaN operand gives 0x7FFF."""
    low = _max_bf16(np.uint32(a & np.uint32(0xFFFF)), np.uint32(b & np.uint32(0xFFFF)))
    high = _max_bf16(np.uint32(a >> np.uint32(16)), np.uint32(b >> np.uint32(16)))
    return np.uint32((high << np.uint32(16)) | low)


@device_op("u32(u32 a)", ptx="abs.bf16x2 <ret>, <a>;")
def abs_bf16x2(a):
    """The magnitude of each bf16 half; a NaN becomes 0x7FFF."""
    result = np.uint32(a & np.uint32(0x7FFF7FFF))
    if (result & np.uint32(0x7FFF)) > np.uint32(0x7F80):
        result = np.uint32(result | np.uint32(0x7FFF))
    if (result >> np.uint32(16)) > np.uint32(0x7F80):
        result = np.uint32(result | np.uint32(0x7FFF0000))
    return result


@njit
def f32_of_f16(h):
    """Exact f32 value of f16 bits, for twins."""
    sign = np.uint32((h & np.uint32(0x8000)) << np.uint32(16))
    magnitude = np.uint32(h & np.uint32(0x7FFF))
    if magnitude >= np.uint32(0x7C00):
        bits = np.uint32(0x7F800000 | (magnitude & np.uint32(0x3FF)) << np.uint32(13))
    else:
        # The f16 fields read as an f32 are the value times 2^-112, subnormals included.
        scaled = np.uint32(magnitude << np.uint32(13)).view(np.float32)
        bits = np.float32(scaled * np.float32(2.0**112)).view(np.uint32)
    return np.uint32(bits | sign).view(np.float32)


@njit
def f16_of_f32(x):
    """f16 bits nearest to an f32, ties to even; a NaN becomes 0x7FFF. For twins."""
    u = np.float32(x).view(np.uint32)
    sign = np.uint32((u >> np.uint32(16)) & np.uint32(0x8000))
    a = np.uint32(u & np.uint32(0x7FFFFFFF))
    if a > np.uint32(0x7F800000):
        return np.uint32(0x7FFF)
    if a >= np.uint32(0x477FF000):
        return np.uint32(sign | np.uint32(0x7C00))
    if a < np.uint32(0x38800000):
        # Adding 0.5 makes the f32 grid 2^-24, f16's subnormal step.
        shifted = np.float32(np.uint32(a).view(np.float32) + np.float32(0.5))
        return np.uint32(
            sign | np.uint32(np.float32(shifted).view(np.uint32) - np.uint32(0x3F000000))
        )
    odd = np.uint32((a >> np.uint32(13)) & np.uint32(1))
    rounded = np.uint32(a + np.uint32(0xFFF) + odd)
    return np.uint32(sign | np.uint32(np.uint32(rounded - np.uint32(0x38000000)) >> np.uint32(13)))


@device_op("u32(f32 high, f32 low)", ptx="cvt.rn.f16x2.f32 <ret>, <high>, <low>;")
def f16x2_of_f32(high, low):
    """Two f32 to packed f16, nearest even; a NaN becomes 0x7FFF."""
    return np.uint32(np.uint32(f16_of_f32(high) << np.uint32(16)) | f16_of_f32(low))


@njit
def _e4m3_of_f32(x):
    u = np.float32(x).view(np.uint32)
    sign = np.uint32((u >> np.uint32(24)) & np.uint32(0x80))
    a = np.uint32(u & np.uint32(0x7FFFFFFF))
    if a > np.uint32(0x7F800000):
        return np.uint32(0x7F)
    if a < np.uint32(0x3C800000):
        # Below 2^-6 the code counts multiples of 2^-9, the grid of f32 at 2^14.
        shifted = np.float32(np.uint32(a).view(np.float32) + np.float32(16384.0))
        return np.uint32(sign | np.uint32(shifted.view(np.uint32) - np.uint32(0x46800000)))
    if a >= np.uint32(0x43E00000):
        return np.uint32(sign | np.uint32(0x7E))
    odd = np.uint32((a >> np.uint32(20)) & np.uint32(1))
    rounded = np.uint32(np.uint32(a + np.uint32(0x7FFFF) + odd) >> np.uint32(20))
    return np.uint32(sign | np.uint32(rounded - np.uint32(960)))


@device_op(
    "u32(f32 high, f32 low)",
    ptx="{ .reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, <high>, <low>; cvt.u32.u16 <ret>, t; }",
    min_cc=(8, 9),
)
def e4m3x2_of_f32(high, low):
    """Two f32 to packed e4m3: nearest even, saturating at 448; a NaN becomes 0x7F."""
    return np.uint32(np.uint32(_e4m3_of_f32(high) << np.uint32(8)) | _e4m3_of_f32(low))


@njit
def _f16_of_e4m3(code):
    if code & np.uint32(0x7F) == np.uint32(0x7F):
        return np.uint32(0x7FFF)
    magnitude = np.uint32(np.uint32(code & np.uint32(0x7F)) << np.uint32(20)).view(np.float32)
    half = f16_of_f32(np.float32(magnitude * np.float32(2.0**120)))
    return np.uint32(half | np.uint32(np.uint32(code & np.uint32(0x80)) << np.uint32(8)))


@device_op(
    "u32(u32 codes)",
    ptx="{ .reg .b16 t; cvt.u16.u32 t, <codes>; cvt.rn.f16x2.e4m3x2 <ret>, t; }",
    min_cc=(8, 9),
)
def f16x2_of_e4m3x2(codes):
    """Two packed e4m3 to packed f16, exactly; a NaN becomes 0x7FFF."""
    low = _f16_of_e4m3(np.uint32(codes & np.uint32(0xFF)))
    high = _f16_of_e4m3(np.uint32((codes >> np.uint32(8)) & np.uint32(0xFF)))
    return np.uint32(np.uint32(high << np.uint32(16)) | low)


@njit(inline="always")
def _mul_f16(a, b):
    return f16_of_f32(f32_of_f16(a) * f32_of_f16(b))


@device_op("u32(u32 a, u32 b)", ptx="mul.rn.f16x2 <ret>, <a>, <b>;")
def mul_f16x2(a, b):
    """Products of each f16 half, nearest even; a NaN is 0x7FFF.

    The twin's f32 product of two 11-bit significands is exact, so it rounds once.
    """
    low = _mul_f16(np.uint32(a & np.uint32(0xFFFF)), np.uint32(b & np.uint32(0xFFFF)))
    high = _mul_f16(np.uint32(a >> np.uint32(16)), np.uint32(b >> np.uint32(16)))
    return np.uint32((high << np.uint32(16)) | low)


@njit(inline="always")
def _mul_bf16(a, b):
    x = np.uint32(a << np.uint32(16)).view(np.float32)
    y = np.uint32(b << np.uint32(16)).view(np.float32)
    return bf16_of_f32(np.float32(x * y))


@device_op(
    "u32(u32 a, u32 b)",
    ptx="{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 <ret>, <a>, <b>, z; }",
)
def mul_bf16x2(a, b):
    """Products of each bf16 half, nearest even, subnormals kept; a NaN is 0x7FFF.

    Adding -0 changes no product, and sm_80 has only the fused instruction. The twin's f32 product
    of two 8-bit significands is exact, but below 2^-134, where bf16's is 0 however it rounds.
    """
    low = _mul_bf16(np.uint32(a & np.uint32(0xFFFF)), np.uint32(b & np.uint32(0xFFFF)))
    high = _mul_bf16(np.uint32(a >> np.uint32(16)), np.uint32(b >> np.uint32(16)))
    return np.uint32((high << np.uint32(16)) | low)


@device_op("u32(u32 a, u32 b, u32 selector)", ptx="prmt.b32 <ret>, <a>, <b>, <selector>;")
def permute_bytes(a, b, selector):
    """Four bytes chosen from b:a; selector nibble i (0 to 7) names result byte i's source."""
    result = np.uint32(0)
    for i in range(4):
        source = np.uint32((selector >> np.uint32(4 * i)) & np.uint32(7))
        word = a if source < np.uint32(4) else b
        byte = np.uint32(
            (word >> np.uint32(np.uint32(8) * (source & np.uint32(3)))) & np.uint32(0xFF)
        )
        result = np.uint32(result | (byte << np.uint32(8 * i)))
    return result


@device_op(
    "u32(u32 a, u32 b, u32 selector)",
    ptx="{ .reg .b32 s; or.b32 s, <selector>, 0x8888; prmt.b32 <ret>, <a>, <b>, s; }",
)
def permute_signs(a, b, selector):
    """As `permute_bytes`, but each byte becomes eight copies of its highest bit."""
    chosen = np.uint32(0)
    for i in range(4):
        source = np.uint32((selector >> np.uint32(4 * i)) & np.uint32(7))
        word = a if source < np.uint32(4) else b
        byte = np.uint32(word >> np.uint32(np.uint32(8) * (source & np.uint32(3))))
        if byte & np.uint32(0x80):
            chosen = np.uint32(chosen | np.uint32(np.uint32(0xFF) << np.uint32(8 * i)))
    return chosen


_LARGEST, _TWO_20, _TWO_120 = np.float32(448.0), np.float32(2.0**20), np.float32(2.0**120)
_EXPONENT, _SMALLEST_NORMAL = np.uint32(0x7F800000), np.uint32(0x3C800000)
_NAN = np.uint32(0x7FFFFFFF)


@device_function
def e4m3_of_f32(x):
    """e4m3 code of x >= 0 or NaN: nearest even, saturating at 448; a NaN gives 0x7F.

    With p the power of two at or below x, but at least 2^-6, the sum x + 2^20 p is on the grid of
    p / 8, e4m3's: the adder rounds, and the sum's low bits count eighths. The code is that count
    plus 8 a binade from 2^-6 on.
    """
    a = min_num(x, _LARGEST)
    power = max(np.uint32(f32_bits(a) & _EXPONENT), _SMALLEST_NORMAL)
    eighths = f32_bits(fma_rn(bits_f32(power), _TWO_20, a))
    code = np.uint32(np.uint32(eighths + np.uint32(power >> np.uint32(20))) - np.uint32(121 * 8))
    return np.uint32(code & np.uint32(0x7F)) if x == x else np.uint32(0x7F)


@device_function
def f32_of_e4m3(code):
    """Value of a non-negative e4m3 code (0 to 0x7F)."""
    if code == np.uint32(0x7F):
        return bits_f32(_NAN)
    # The fields read as an f32 are the value times 2^-120, subnormals included.
    return mul_rn(bits_f32(np.uint32(code << np.uint32(20))), _TWO_120)


_F16_256 = np.uint32(0x5C005C00)


@device_function
def f16x2_of_e4m3(code):
    """An e4m3 code's value as f16, in both halves; exact."""
    magnitude = np.uint32(code & np.uint32(0x7F))
    sign = np.uint32((code & np.uint32(0x80)) << np.uint32(8))
    half = np.uint32(magnitude << np.uint32(7))
    if magnitude == np.uint32(0x7F):
        half = np.uint32(0x7FFF)
    # The fields read as an f16 are the value times 2^-8, subnormals included.
    half = np.uint32(half | sign)
    return mul_f16x2(np.uint32(half | np.uint32(half << np.uint32(16))), _F16_256)
