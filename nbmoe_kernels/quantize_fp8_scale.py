"""FP8 scales in registers: from a largest magnitude to the stored scale and the multiplier.

    float32, bfloat16: s = min(amax, scale_ub) / 448, rounded to the stored type
    e8m0:              s = 2^n >= max(max(amax, amax_floor) / 448, 1e-10), n smallest
    r = 1 / s, 0 where that is infinite

A NaN stays one: its scale is NaN and so is r, which makes all codes 0x7F.
"""

import numpy as np

from nbmoe_kernels.device.convert import bf16x2_of_f32, max_nan_bf16x2
from nbmoe_kernels.device.math import bits_f32, div_rn, f32_bits, max_nan, min_nan
from nbmoe_kernels.device.mx import inverse_power, quantize_4, rceil_byte
from nbmoe_kernels.device.op import device_function

FLOAT32, BFLOAT16, E8M0 = np.uint32(4), np.uint32(2), np.uint32(1)
"""Types of scales as kernels are told them: their size in bytes."""

_ZERO, _ONE, _LARGEST = np.float32(0.0), np.float32(1.0), np.float32(448.0)
_SMALLEST_E8M0 = np.float32(1e-10)
_INFINITY = np.uint32(0x7F800000)
_MAGNITUDES = np.uint32(0x7FFF7FFF)
NAN_CODES = np.uint32(0x7F7F7F7F)


@device_function
def multiplier_of(scale):
    """1 / scale; 0 where that is infinite, NaN of NaN."""
    inverse = div_rn(_ONE, scale)
    return _ZERO if f32_bits(inverse) == _INFINITY else inverse


@device_function
def bounded_scale(amax, scale_ub):
    """min(amax, scale_ub) / 448."""
    return div_rn(min_nan(amax, scale_ub), _LARGEST)


@device_function
def stored_scale(amax, scale_bytes, scale_ub, amax_floor):
    """(bits of the stored scale in its own type, multiplier of the values)."""
    if scale_bytes == E8M0:
        floored = div_rn(max_nan(amax, amax_floor), _LARGEST)
        byte = rceil_byte(max_nan(floored, _SMALLEST_E8M0), _ONE)
        return byte, inverse_power(byte)
    scale = bounded_scale(amax, scale_ub)
    bits = f32_bits(scale)
    if scale_bytes == BFLOAT16:
        bits = bf16x2_of_f32(_ZERO, scale)
        scale = bits_f32(np.uint32(bits << np.uint32(16)))
    return bits, multiplier_of(scale)


@device_function
def store_scale(scales_4, scales_2, scales_1, scale_bytes, at, bits):
    """Store a scale's bits at an index of the array that is in use."""
    if scale_bytes == FLOAT32:
        scales_4[at] = bits
    if scale_bytes == BFLOAT16:
        scales_2[at] = np.uint16(bits)
    if scale_bytes == E8M0:
        scales_1[at] = np.uint8(bits)


@device_function
def magnitudes(w0, w1, w2, w3):
    """The largest of 8 bf16 magnitudes, as bits in the order of integers; NaN is the largest."""
    low = max_nan_bf16x2(np.uint32(w0 & _MAGNITUDES), np.uint32(w1 & _MAGNITUDES))
    high = max_nan_bf16x2(np.uint32(w2 & _MAGNITUDES), np.uint32(w3 & _MAGNITUDES))
    both = max_nan_bf16x2(low, high)
    return max(np.uint32(both & np.uint32(0xFFFF)), np.uint32(both >> np.uint32(16)))


@device_function
def codes_4(w0, w1, multiplier):
    """Codes of four bf16; all 0x7F where the multiplier is NaN.

    No infinite value meets a multiplier of 0 here: an infinite amax gives a scale that has an
    inverse.
    """
    return quantize_4(w0, w1, multiplier) if multiplier == multiplier else NAN_CODES
