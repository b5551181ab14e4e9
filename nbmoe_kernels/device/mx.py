"""MX blocks in registers: e8m0 scales, e4m3 codes and packing.

A block's scale byte b stands for 2^(b - 127), and an element's code is that of x * 2^(127 - b): a
product by a power of two, so the element is rounded once.
"""

import numpy as np

from nbmoe_kernels.device.convert import permute_bytes
from nbmoe_kernels.device.math import bits_f32, f32_bits, fma_rn, min_abs, mul_rn
from nbmoe_kernels.device.op import device_function

_INF = np.uint32(0x7F800000)
NAN_BYTE = np.uint32(0xFF)


@device_function
def rceil_byte(amax, inverse_max):
    """The byte of the smallest power of two not below amax * inverse_max: 0 to 254, NaN 255.

    Powers below 2^-126 are the bits' subnormals, where 2^-127 is 0x400000.
    """
    bits = f32_bits(mul_rn(amax, inverse_max))
    if bits > _INF:
        return NAN_BYTE
    carry = np.uint32(0x7FFFFF) if bits >= np.uint32(0x800000) else np.uint32(0x3FFFFF)
    byte = np.uint32(np.uint32(bits + carry) >> np.uint32(23))
    return byte if byte < np.uint32(254) else np.uint32(254)


@device_function
def exponent_byte(amax, carry, max_exponent):
    """The exponent of amax's bits plus carry, less the elements' largest exponent; NaN 255.

    A carry of 0 is the rule "floor"; half a unit of the elements' mantissa is "even".
    """
    bits = f32_bits(amax)
    if bits > _INF:
        return NAN_BYTE
    exponent = np.uint32(np.uint32(bits + carry) >> np.uint32(23))
    return np.uint32(exponent - max_exponent) if exponent > max_exponent else np.uint32(0)


@device_function
def inverse_power(byte):
    """2^(127 - byte), exactly; NaN of 255."""
    bits = np.uint32(0x400000) if byte == np.uint32(254) else np.uint32(0x7FFFFFFF)
    if byte < np.uint32(254):
        bits = np.uint32(np.uint32(np.uint32(254) - byte) << np.uint32(23))
    return bits_f32(bits)


_LARGEST, _TWO_20 = np.float32(448.0), np.float32(2.0**20)
_EXPONENT, _SMALLEST_NORMAL = np.uint32(0x7F800000), np.uint32(0x3C800000)


@device_function
def e4m3_low_byte(v):
    """The e4m3 code of |v| in the low byte, other bits open: nearest even, saturating; NaN 0x7E.

    With p the power of two at or below |v|, but at least 2^-6, the sum |v| + 2^20 p is on the grid
    of p / 8, e4m3's: the adder rounds, and the sum's low bits count eighths. The code is that count
    plus 8 a binade from 2^-6 on.
    """
    a = min_abs(v, _LARGEST)
    power = np.uint32(f32_bits(a) & _EXPONENT)
    if power < _SMALLEST_NORMAL:
        power = _SMALLEST_NORMAL
    eighths = f32_bits(fma_rn(bits_f32(power), _TWO_20, a))
    return np.uint32(np.uint32(eighths + np.uint32(power >> np.uint32(20))) - np.uint32(121 * 8))


@device_function
def pack_low_bytes(a, b, c, d):
    """The low bytes of four words in one, the first lowest."""
    front = permute_bytes(a, b, np.uint32(0x0040))
    back = permute_bytes(c, d, np.uint32(0x0040))
    return permute_bytes(front, back, np.uint32(0x5410))


@device_function
def _low_element(word, multiplier):
    return e4m3_low_byte(mul_rn(bits_f32(np.uint32(word << np.uint32(16))), multiplier))


@device_function
def _high_element(word, multiplier):
    return e4m3_low_byte(mul_rn(bits_f32(np.uint32(word & np.uint32(0xFFFF0000))), multiplier))


@device_function
def quantize_4(w0, w1, multiplier):
    """Four bf16 in two words to four e4m3 codes in one, the first in the lowest byte."""
    codes = pack_low_bytes(
        _low_element(w0, multiplier),
        _high_element(w0, multiplier),
        _low_element(w1, multiplier),
        _high_element(w1, multiplier),
    )
    signs = permute_bytes(w0, w1, np.uint32(0x7531))
    return np.uint32(codes | np.uint32(signs & np.uint32(0x80808080)))


@device_function
def e4m3_code_of_f32(v):
    """The e4m3 code of an f32: nearest even, saturating, sign of zero kept; NaN gives 0x7F."""
    magnitude = np.uint32(e4m3_low_byte(v) & np.uint32(0x7F))
    sign = np.uint32(np.uint32(f32_bits(v) >> np.uint32(24)) & np.uint32(0x80))
    return np.uint32(magnitude | sign) if v == v else np.uint32(0x7F)
