"""What an FP8 quantizer's thread takes at a time: 8 bf16 in one load, or a single value."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbmoe_kernels.device.convert import f32_of_bf16
from nbmoe_kernels.device.math import bits_f32, f32_bits, mul_rn
from nbmoe_kernels.device.memory import load_v4, store_v2
from nbmoe_kernels.device.mx import e4m3_code_of_f32, pack_low_bytes
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.quantize_fp8_scale import codes_4, magnitudes

DeviceFunction = Callable[..., Any]


@dataclass(frozen=True)
class Items:
    """How a thread reads, measures and quantizes an item.

    Attributes:
        name: the kind, for kernels' names.
        width: values of an item.
        codes: element type of the kernels' ``codes`` parameter.
        input: element type of the kernels' ``input`` parameter.
        magnitude: ``(input, item) -> bits`` of the largest bf16 magnitude; None for other types.
        quantize: ``(codes, input, item, multiplier)`` stores the codes of an item.
    """

    name: str
    width: int
    codes: str
    input: str
    magnitude: DeviceFunction | None
    quantize: DeviceFunction


_INFINITE = np.uint32(0x7F80)
_TWO_112 = np.float32(2.0**112)
_F16_EXPONENT = np.uint32(0x7C00)


@device_function
def _magnitude_8(input, item):
    w0, w1, w2, w3 = load_v4(input, item * np.uint64(4))
    return magnitudes(w0, w1, w2, w3)


@device_function
def _code_low(word, multiplier):
    return e4m3_code_of_f32(mul_rn(bits_f32(np.uint32(word << np.uint32(16))), multiplier))


@device_function
def _code_high(word, multiplier):
    return e4m3_code_of_f32(mul_rn(bits_f32(np.uint32(word & np.uint32(0xFFFF0000))), multiplier))


@device_function
def _any_codes_4(w0, w1, multiplier):
    return pack_low_bytes(
        _code_low(w0, multiplier),
        _code_high(w0, multiplier),
        _code_low(w1, multiplier),
        _code_high(w1, multiplier),
    )


@device_function
def _quantize_8(codes, input, item, multiplier):
    w0, w1, w2, w3 = load_v4(input, item * np.uint64(4))
    at = item * np.uint64(2)
    # A NaN, or an infinity times 0, is a NaN of its own; otherwise only the multiplier can be one.
    if magnitudes(w0, w1, w2, w3) >= _INFINITE:
        store_v2(codes, at, _any_codes_4(w0, w1, multiplier), _any_codes_4(w2, w3, multiplier))
    else:
        store_v2(codes, at, codes_4(w0, w1, multiplier), codes_4(w2, w3, multiplier))


@device_function
def _magnitude_bf16(input, item):
    return np.uint32(np.uint32(input[item]) & np.uint32(0x7FFF))


@device_function
def _f32_of_f16(value):
    bits = np.uint32(value)
    sign = np.uint32(np.uint32(bits & np.uint32(0x8000)) << np.uint32(16))
    magnitude = np.uint32(np.uint32(bits & np.uint32(0x7FFF)) << np.uint32(13))
    # The fields read as an f32 are the value times 2^-112, subnormals included.
    finite = f32_bits(mul_rn(bits_f32(magnitude), _TWO_112))
    if np.uint32(bits & _F16_EXPONENT) == _F16_EXPONENT:
        finite = np.uint32(magnitude | np.uint32(0x7F800000))
    return bits_f32(np.uint32(finite | sign))


@device_function
def _f32_of_f32(value):
    return value


def _make_quantize(f32_of: DeviceFunction) -> DeviceFunction:
    @device_function
    def quantize(codes, input, item, multiplier):
        codes[item] = np.uint8(e4m3_code_of_f32(mul_rn(f32_of(input[item]), multiplier)))

    return quantize


@functools.cache
def make_items(kind: str) -> Items:
    """The items of a kind.

    Args:
        kind: "bf16x8", for buffers of whole items that are aligned to 16 bytes; "bf16", "f16" or
            "f32".
    """
    if kind == "bf16x8":
        return Items(kind, 8, "u32", "u32", _magnitude_8, _quantize_8)
    if kind == "bf16":
        return Items(kind, 1, "u8", "u16", _magnitude_bf16, _make_quantize(f32_of_bf16))
    if kind == "f16":
        return Items(kind, 1, "u8", "u16", None, _make_quantize(_f32_of_f16))
    if kind == "f32":
        return Items(kind, 1, "u8", "f32", None, _make_quantize(_f32_of_f32))
    raise ValueError(f"make_items: there is no kind {kind!r}")
