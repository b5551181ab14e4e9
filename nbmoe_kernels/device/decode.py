"""Codes to tensor-core operands, in registers: packed pairs of f16 or bf16, times a block scale.

A function decodes the codes of two words at most: out[at + j * stride] gets elements j (low half)
and j + 4 (high half) for j = 0..3, the pairs that step j of a matmul sums. Moving a code's fields
into those of a wider format gives its value times a fixed power of two, subnormals included, so a
multiplication by that power makes the value.
"""

import numpy as np

from nbmoe_kernels.device.convert import mul_bf16x2, mul_f16x2, permute_bytes
from nbmoe_kernels.device.op import device_function

_SIGNS = np.uint32(0x80008000)
_E2M1_IN_F16, _E2M1_IN_BF16 = np.uint32(0x0E000E00), np.uint32(0x01C001C0)
_E4M3_IN_F16, _E4M3_IN_BF16 = np.uint32(0x3F803F80), np.uint32(0x07F007F0)
_F16_LSB, _BF16_LSB = np.uint32(0x00800080), np.uint32(0x00100010)
"""Last bit of e4m3 in the fields of f16 and bf16: a carry out of the magnitude means NaN."""
_F16_CARRY, _BF16_CARRY = np.uint32(0x40004000), np.uint32(0x08000800)
_F16_2_8 = np.uint32(0x5C005C00)
_BF16_2_120, _BF16_2_126 = np.uint32(0x7B807B80), np.uint32(0x7E807E80)


@device_function
def bf16x2_of_e8m0(byte):
    """An e8m0 scale 2^(byte - 127) as bf16 in both halves, exactly; NaN (255) gives 0x7FFF."""
    half = np.uint32(byte << np.uint32(7))
    if byte == np.uint32(0):
        half = np.uint32(0x0040)
    if byte == np.uint32(255):
        half = np.uint32(0x7FFF)
    return np.uint32(half | np.uint32(half << np.uint32(16)))


@device_function
def e2m1_to_f16(word, scale, out, at, stride):
    """Eight e2m1 codes times a block scale (f16 in both halves), exactly, times 2^-14.

    A nibble's sign moves to bit 15 and its three magnitude bits to 11..9: read as f16 that is the
    code's value times 2^-14. An e4m3 scale's product has at most 6 significant bits and no bit
    below 2^-24.
    """
    w, mask = word, _E2M1_IN_F16
    p0 = (np.uint32(w << np.uint32(12)) & _SIGNS) | (np.uint32(w << np.uint32(9)) & mask)
    p1 = (np.uint32(w << np.uint32(8)) & _SIGNS) | (np.uint32(w << np.uint32(5)) & mask)
    p2 = (np.uint32(w << np.uint32(4)) & _SIGNS) | (np.uint32(w << np.uint32(1)) & mask)
    p3 = (w & _SIGNS) | (np.uint32(w >> np.uint32(3)) & mask)
    out[at] = mul_f16x2(np.uint32(p0), scale)
    out[at + stride] = mul_f16x2(np.uint32(p1), scale)
    out[at + 2 * stride] = mul_f16x2(np.uint32(p2), scale)
    out[at + 3 * stride] = mul_f16x2(np.uint32(p3), scale)


@device_function
def _scaled_e2m1(fields, scale):
    return mul_bf16x2(mul_bf16x2(np.uint32(fields), _BF16_2_126), scale)


@device_function
def e2m1_to_bf16(word, scale, out, at, stride):
    """Eight e2m1 codes times a block scale (bf16 in both halves), rounded once."""
    w, mask = word, _E2M1_IN_BF16
    p0 = (np.uint32(w << np.uint32(12)) & _SIGNS) | (np.uint32(w << np.uint32(6)) & mask)
    p1 = (np.uint32(w << np.uint32(8)) & _SIGNS) | (np.uint32(w << np.uint32(2)) & mask)
    p2 = (np.uint32(w << np.uint32(4)) & _SIGNS) | (np.uint32(w >> np.uint32(2)) & mask)
    p3 = (w & _SIGNS) | (np.uint32(w >> np.uint32(6)) & mask)
    out[at] = _scaled_e2m1(p0, scale)
    out[at + stride] = _scaled_e2m1(p1, scale)
    out[at + 2 * stride] = _scaled_e2m1(p2, scale)
    out[at + 3 * stride] = _scaled_e2m1(p3, scale)


@device_function
def _f16_of_codes(codes):
    """The e4m3 codes in the high bytes of both halves as f16."""
    fields = np.uint32(np.uint32(codes >> np.uint32(1)) & _E4M3_IN_F16)
    nan = np.uint32(np.uint32(fields + _F16_LSB) & _F16_CARRY)
    return mul_f16x2(np.uint32(np.uint32(codes & _SIGNS) | fields | nan), _F16_2_8)


@device_function
def e4m3_to_f16(w0, w1, out, at, stride):
    """Four e4m3 codes of each word, exactly; a NaN code gives 0x7FFF."""
    out[at] = _f16_of_codes(permute_bytes(w0, w1, np.uint32(0x4000)))
    out[at + stride] = _f16_of_codes(permute_bytes(w0, w1, np.uint32(0x5010)))
    out[at + 2 * stride] = _f16_of_codes(permute_bytes(w0, w1, np.uint32(0x6020)))
    out[at + 3 * stride] = _f16_of_codes(permute_bytes(w0, w1, np.uint32(0x7030)))


@device_function
def _bf16_of_codes(codes, scale):
    """The e4m3 codes in the high bytes of both halves times a scale as bf16."""
    fields = np.uint32(np.uint32(codes >> np.uint32(4)) & _E4M3_IN_BF16)
    carry = np.uint32(np.uint32(fields + _BF16_LSB) & _BF16_CARRY)
    # Bit 11 of a half, if set, becomes bits 14..7, an exponent of ones.
    nan = np.uint32(np.uint32(carry << np.uint32(4)) - np.uint32(carry >> np.uint32(4)))
    value = mul_bf16x2(np.uint32(np.uint32(codes & _SIGNS) | fields | nan), _BF16_2_120)
    return mul_bf16x2(value, scale)


@device_function
def e4m3_to_bf16(w0, w1, scale, out, at, stride):
    """Four e4m3 codes of each word times a block scale (bf16 in both halves), rounded once.

    A NaN code gives 0x7FFF.
    """
    out[at] = _bf16_of_codes(permute_bytes(w0, w1, np.uint32(0x4000)), scale)
    out[at + stride] = _bf16_of_codes(permute_bytes(w0, w1, np.uint32(0x5010)), scale)
    out[at + 2 * stride] = _bf16_of_codes(permute_bytes(w0, w1, np.uint32(0x6020)), scale)
    out[at + 3 * stride] = _bf16_of_codes(permute_bytes(w0, w1, np.uint32(0x7030)), scale)


@device_function
def pair_halves(w0, w1, w2, w3, out, at, stride):
    """Eight 16-bit elements, two a word, in the order of their pairs."""
    low, high = np.uint32(0x5410), np.uint32(0x7632)
    out[at] = permute_bytes(w0, w2, low)
    out[at + stride] = permute_bytes(w0, w2, high)
    out[at + 2 * stride] = permute_bytes(w1, w3, low)
    out[at + 3 * stride] = permute_bytes(w1, w3, high)
