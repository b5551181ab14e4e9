"""Codes of prepared weights to tensor-core operands, in registers.

Prepared words hold the bits of a half's four codes where a mask, or a shift and a mask, puts them
into the fields of a 16-bit float; a multiplication stands for two shifts at once, because IMAD and
the logic unit issue side by side. Pairs go to out[at + j * stride] for j = 0..3, as
`nbmoe_kernels.device.decode` orders them, with the same values. Weights' scales are hardly ever 2
or more: for those below there are functions that multiply once.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from nbmoe_kernels.device.convert import f16x2_of_e4m3x2, mul_bf16x2, mul_f16x2, permute_bytes
from nbmoe_kernels.device.decode import bf16x2_of_e8m0
from nbmoe_kernels.device.op import device_function

_F16_FIELDS, _BF16_FIELDS = np.uint32(0x8E008E00), np.uint32(0x81C081C0)
_F16_2, _F16_3 = np.uint32(0x40384038), np.uint32(0x20072007)
_BF16_2, _BF16_3 = np.uint32(0x40074007), np.uint32(0x01C001C0)
_SIGNS, _E4M3_FIELDS = np.uint32(0x80008000), np.uint32(0x07F007F0)
_TWO_126, _TWO_120 = np.uint32(0x7E807E80), np.uint32(0x7B807B80)


@device_function
def f16x2_scales(pair):
    """Two e4m3 scales, the bytes of ``pair``, each as f16 in both halves of a word."""
    both = f16x2_of_e4m3x2(pair)
    return (
        permute_bytes(both, both, np.uint32(0x1010)),
        permute_bytes(both, both, np.uint32(0x3232)),
    )


@device_function
def are_below_two(pair):
    """Whether both e8m0 scales, the bytes of ``pair``, are less than 2."""
    return np.uint32(pair & np.uint32(0x8080)) == np.uint32(0)


@device_function
def bf16x2_scales(pair):
    """Two e8m0 scales, the bytes of ``pair``, each as bf16 in both halves of a word."""
    first = bf16x2_of_e8m0(np.uint32(pair & np.uint32(0xFF)))
    return first, bf16x2_of_e8m0(np.uint32(pair >> np.uint32(8)))


def _make_scales_below_two(power: int) -> Callable[..., Any]:
    """``scales_below_two(pair)``: as `bf16x2_scales` of scales below 2, times 2^power, 1 to 126."""

    @device_function
    def scales_below_two(pair):
        # The exponent 2^(byte - 127 + power) of a bf16 is byte + power.
        added = np.uint32(0x10001 * (power << 7))
        first = permute_bytes(pair, np.uint32(0), np.uint32(0x4040))
        second = permute_bytes(pair, np.uint32(0), np.uint32(0x4141))
        return (
            np.uint32(np.uint32(first << np.uint32(7)) + added),
            np.uint32(np.uint32(second << np.uint32(7)) + added),
        )

    return scales_below_two


@device_function
def prepared_e2m1_to_f16(word, scale, out, at, stride):
    """Eight e2m1 codes times an e4m3 block scale, exactly, times 2^-14.

    In a half code 0 has its magnitude at bits 11..9 and its sign at 15, code 1 at 8..6 and 12,
    code 2 at 5..3 and 14, code 3 at 2..0 and 13.
    """
    c1 = np.uint32(word << np.uint32(3))
    c2 = np.uint32(np.uint32(word & _F16_2) * np.uint32(66))
    c3 = np.uint32(np.uint32(word & _F16_3) * np.uint32(516))
    out[at] = mul_f16x2(np.uint32(word & _F16_FIELDS), scale)
    out[at + stride] = mul_f16x2(np.uint32(c1 & _F16_FIELDS), scale)
    out[at + 2 * stride] = mul_f16x2(np.uint32(c2 & _F16_FIELDS), scale)
    out[at + 3 * stride] = mul_f16x2(np.uint32(c3 & _F16_FIELDS), scale)


def _make_e2m1_to_bf16(scaled: Callable[..., Any]) -> Callable[..., Any]:
    """``scaled(fields, scale)``: fields read as bf16 are values times 2^-126."""

    @device_function
    def e2m1_to_bf16(word, scale, out, at, stride):
        """Eight e2m1 codes times a block scale (bf16 in both halves), rounded once.

        In a half code 0 has its magnitude at bits 8..6 and its sign at 15, code 1 at 5..3 and 12,
        code 2 at 2..0 and 14, code 3 at 11..9 and 13.
        """
        c1 = np.uint32(word << np.uint32(3))
        c2 = np.uint32(np.uint32(word & _BF16_2) * np.uint32(66))
        c3 = np.uint32(
            np.uint32(np.uint32(word >> np.uint32(3)) & _BF16_3)
            | np.uint32(np.uint32(word << np.uint32(2)) & _SIGNS)
        )
        out[at] = scaled(np.uint32(word & _BF16_FIELDS), scale)
        out[at + stride] = scaled(np.uint32(c1 & _BF16_FIELDS), scale)
        out[at + 2 * stride] = scaled(np.uint32(c2 & _BF16_FIELDS), scale)
        out[at + 3 * stride] = scaled(c3, scale)

    return e2m1_to_bf16


def _make_e4m3_to_bf16(scaled: Callable[..., Any]) -> Callable[..., Any]:
    """``scaled(fields, scale)``: fields read as bf16 are values times 2^-120."""

    @device_function
    def scaled_codes(codes, scale):
        # There is no NaN code among prepared ones.
        fields = np.uint32(np.uint32(codes >> np.uint32(4)) & _E4M3_FIELDS)
        return scaled(np.uint32(fields | np.uint32(codes & _SIGNS)), scale)

    @device_function
    def e4m3_to_bf16(word, scale, out, at, stride):
        """Two pairs of e4m3 codes times a block scale (bf16 in both halves), rounded once.

        The halves' high bytes go to out[at], their low bytes to out[at + stride].
        """
        out[at] = scaled_codes(word, scale)
        out[at + stride] = scaled_codes(np.uint32(word << np.uint32(8)), scale)

    return e4m3_to_bf16


@device_function
def _scaled_e2m1(fields, scale):
    return mul_bf16x2(mul_bf16x2(fields, _TWO_126), scale)


@device_function
def _scaled_e4m3(fields, scale):
    return mul_bf16x2(mul_bf16x2(fields, _TWO_120), scale)


prepared_e2m1_to_bf16 = _make_e2m1_to_bf16(_scaled_e2m1)
prepared_e4m3_to_bf16 = _make_e4m3_to_bf16(_scaled_e4m3)
# Scales below 2 may be multiplied by what the fields lack, so that one product does both.
e2m1_scales_below_two = _make_scales_below_two(126)
prepared_e2m1_below_two = _make_e2m1_to_bf16(mul_bf16x2)
e4m3_scales_below_two = _make_scales_below_two(120)
prepared_e4m3_below_two = _make_e4m3_to_bf16(mul_bf16x2)
