"""Encode and decode the element and scale formats in numpy, bit for bit.

Encoding rounds to nearest, ties to even, saturates to the largest finite value, keeps the sign of
zero and turns every NaN into one canonical code: what NVIDIA's `cvt.rn.satfinite` does. Arithmetic
is on the bits of float32, so no result depends on the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nbmoe.errors import ConfigError, DTypeError, RangeError, ShapeError, message
from nbmoe.formats import E2M1, E4M3, E5M2, Element

F32Array = npt.NDArray[np.float32]
U8Array = npt.NDArray[np.uint8]
U16Array = npt.NDArray[np.uint16]

BF16 = np.dtype(ml_dtypes.bfloat16)
BF16_NAN = 0x7FFF
E8M0_NAN = 0xFF
_F32_INF = 0x7F800000


@cache
def decode_table(element: Element) -> F32Array:
    """The value of every code of `element`, float32 of shape (2**bits,), read-only."""
    codes = np.arange(2**element.bits)
    field = (codes >> element.mantissa_bits) & (2**element.exponent_bits - 1)
    fraction = (codes & (2**element.mantissa_bits - 1)) * 2.0**-element.mantissa_bits
    exponent = np.maximum(field, 1) - element.bias
    values = (fraction + (field > 0)) * np.exp2(exponent.astype(np.float64))
    magnitude = codes & (2 ** (element.bits - 1) - 1)
    if element.has_nan:
        values[magnitude > element.max_code] = np.nan
    if element.inf_code is not None:
        values[magnitude == element.inf_code] = np.inf
    table: F32Array = np.where(codes >> (element.bits - 1), -values, values).astype(np.float32)
    table.flags.writeable = False
    return table


def decode(codes: npt.ArrayLike, element: Element) -> F32Array:
    """Decodes codes of any element format.

    Args:
        codes: uint8 codes of any shape, one code a byte.
        element: The encoding.

    Returns:
        float32 values of the same shape, exact.

    Raises:
        DTypeError: `codes` is not uint8.
        RangeError: A byte has bits above the width of the format.
    """
    array = _require_u8("decode", "codes", codes)
    if element.bits < 8 and array.size and int(array.max()) >> element.bits:
        rule = f"codes below {1 << element.bits}"
        hint = "unpack_nibbles() splits bytes that hold two codes"
        raise RangeError(message("decode", "codes", rule, int(array.max()), hint))
    return decode_table(element)[array]


def encode(values: npt.ArrayLike, element: Element) -> U8Array:
    """Encodes float32 values: nearest even, saturating, NaN to `element.nan_code`.

    Args:
        values: float32 values of any shape.
        element: The encoding.

    Returns:
        uint8 codes of the same shape, one code a byte.

    Raises:
        DTypeError: `values` is not float32 (a silent conversion could round twice).
    """
    bits = _f32_bits("encode", values)
    magnitude = bits & np.uint32(0x7FFFFFFF)

    # Normal range: round the float32 mantissa to mantissa_bits, ties to even, then rebias.
    drop = 23 - element.mantissa_bits
    odd = (magnitude >> np.uint32(drop)) & np.uint32(1)
    rounded = (magnitude + odd + np.uint32((1 << (drop - 1)) - 1)) >> np.uint32(drop)
    normal = rounded.astype(np.int32) - ((127 - element.bias) << element.mantissa_bits)

    # Subnormal range: adding a power of two whose last bit weighs the smallest subnormal makes the
    # float32 adder itself round, and leaves the code in the low bits of the sum.
    magic = np.float32(2.0 ** (23 + element.min_exponent - element.mantissa_bits))
    small = magnitude < np.float32(2.0**element.min_exponent).view(np.uint32)
    sums = np.where(small, magnitude, np.uint32(0)).view(np.float32) + magic
    subnormal = sums.view(np.int32) - magic.view(np.int32)

    codes = np.minimum(np.where(small, subnormal, normal), element.max_code).astype(np.uint8)
    sign = (bits >> np.uint32(31)).astype(np.uint8) << np.uint8(element.bits - 1)
    return np.where(magnitude > _F32_INF, np.uint8(element.nan_code), codes | sign)


def decode_e2m1(codes: npt.ArrayLike) -> F32Array:
    """Decodes unpacked e2m1 codes 0..15 (uint8) to float32."""
    return decode(codes, E2M1)


def encode_e2m1(values: npt.ArrayLike) -> U8Array:
    """Encodes float32 to unpacked e2m1 codes 0..15; NaN gives 7, the code of +6."""
    return encode(values, E2M1)


def decode_e4m3(codes: npt.ArrayLike) -> F32Array:
    """Decodes e4m3 bytes to float32; 0x7F and 0xFF are NaN."""
    return decode(codes, E4M3)


def encode_e4m3(values: npt.ArrayLike) -> U8Array:
    """Encodes float32 to e4m3 bytes; above 448 and infinity saturate, NaN gives 0x7F."""
    return encode(values, E4M3)


def decode_e5m2(codes: npt.ArrayLike) -> F32Array:
    """Decodes e5m2 bytes to float32; 0x7C is infinity, above it NaN."""
    return decode(codes, E5M2)


def encode_e5m2(values: npt.ArrayLike) -> U8Array:
    """Encodes float32 to e5m2 bytes; infinity saturates to 57344, NaN gives 0x7F."""
    return encode(values, E5M2)


def decode_e8m0(codes: npt.ArrayLike) -> F32Array:
    """Decodes e8m0 scale bytes: 2**(byte - 127), 0 is 2**-127 (not zero), 0xFF is NaN."""
    array = _require_u8("decode_e8m0", "codes", codes).astype(np.uint32)
    bits = np.where(array == 0, np.uint32(0x00400000), array << np.uint32(23))
    bits = np.where(array == E8M0_NAN, np.uint32(0x7FC00000), bits)
    return bits.astype(np.uint32).view(np.float32)


def ceil_e8m0(values: npt.ArrayLike) -> U8Array:
    """The byte of the smallest power of two that is not below |value|.

    Zero and everything up to 2**-127 give 0, everything above 2**127 and infinity give 254, NaN
    gives 255: NVIDIA's `cvt.rp.satfinite.ue8m0x2`.
    """
    magnitude = _f32_bits("ceil_e8m0", values).astype(np.int64) & 0x7FFFFFFF
    exponent, mantissa = magnitude >> 23, magnitude & 0x7FFFFF
    byte = np.where(exponent == 0, mantissa > 0x400000, exponent + (mantissa > 0))
    byte = np.where(magnitude > _F32_INF, E8M0_NAN, np.minimum(byte, 254))
    return byte.astype(np.uint8)


def _rceil_scale(amax: F32Array, element: Element) -> U8Array:
    with np.errstate(invalid="ignore", under="ignore"):
        return ceil_e8m0(amax * (np.float32(1) / np.float32(element.max_value)))


def _even_scale(amax: F32Array, element: Element) -> U8Array:
    return _exponent_scale(amax, element, 1 << (22 - element.mantissa_bits))


def _floor_scale(amax: F32Array, element: Element) -> U8Array:
    return _exponent_scale(amax, element, 0)


def _exponent_scale(amax: F32Array, element: Element, carry: int) -> U8Array:
    magnitude = amax.view(np.uint32).astype(np.int64) & 0x7FFFFFFF
    exponent = np.where(magnitude >= _F32_INF, 255, (magnitude + carry) >> 23)
    byte = np.clip(exponent - element.max_exponent, 0, 254)
    return np.where(magnitude > _F32_INF, E8M0_NAN, byte).astype(np.uint8)


_SCALE_RULES: dict[str, Callable[[F32Array, Element], U8Array]] = {
    "rceil": _rceil_scale,
    "even": _even_scale,
    "floor": _floor_scale,
}


def encode_e8m0(amax: npt.ArrayLike, element: Element, rule: str = "rceil") -> U8Array:
    """Chooses the e8m0 scale byte of MX blocks from their largest magnitude.

    Args:
        amax: float32 largest magnitude of each block, any shape.
        element: Encoding of the block's elements.
        rule: How the exponent is chosen:
            "rceil": smallest power of two that is not below `amax * f32(1 / max_value)`;
            "even": exponent of amax, rounded up where amax would round up to the next power of
            two at the element's precision, minus the element's largest exponent;
            "floor": exponent of amax minus the element's largest exponent (OCP's text).

    Returns:
        uint8 bytes of the same shape. Zero blocks give 0, NaN gives 255. Infinity gives 254 by
        "rceil", where it saturates, and 255 less the element's largest exponent by the others.

    Raises:
        ConfigError: `rule` is not one of the three.
        DTypeError: `amax` is not float32.
    """
    if rule not in _SCALE_RULES:
        expected = " | ".join(_SCALE_RULES)
        raise ConfigError(message("encode_e8m0", "rule", expected, repr(rule)))
    return _SCALE_RULES[rule](_require_f32("encode_e8m0", "amax", amax), element)


def bf16_bits(array: npt.ArrayLike, api: str = "bf16_bits", arg: str = "array") -> U16Array:
    """The uint16 bit patterns of a bf16 array, given as ml_dtypes.bfloat16 or as uint16.

    Raises:
        DTypeError: The array has any other dtype.
    """
    source: npt.NDArray[Any] = np.asarray(array)
    if source.dtype == BF16:
        return source.view(np.uint16)
    if source.dtype == np.uint16:
        return source
    hint = "round to bfloat16 first, with ml_dtypes or nbmoe.codecs.encode_bf16"
    raise DTypeError(message(api, arg, "bfloat16 (or uint16 bit patterns)", source.dtype, hint))


def decode_bf16(array: npt.ArrayLike) -> F32Array:
    """The float32 values of a bf16 array (ml_dtypes.bfloat16 or uint16 bits), exact."""
    bits = bf16_bits(array, "decode_bf16").astype(np.uint32)
    return (bits << np.uint32(16)).view(np.float32)


def encode_bf16(values: npt.ArrayLike) -> npt.NDArray[Any]:
    """Rounds float32 to bf16, nearest even; NaN becomes 0x7FFF.

    Returns:
        An ml_dtypes.bfloat16 array of the same shape.

    Raises:
        DTypeError: `values` is not float32.
    """
    bits = _f32_bits("encode_bf16", values)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + odd + np.uint32(0x7FFF)) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > _F32_INF
    return np.where(is_nan, BF16_NAN, rounded).astype(np.uint16).view(BF16)


def pack_nibbles(codes: npt.ArrayLike) -> U8Array:
    """Packs 4-bit codes two a byte along the last axis, the even element in the low nibble.

    Args:
        codes: uint8 codes 0..15, shape (..., K) with K even.

    Returns:
        uint8 of shape (..., K / 2).

    Raises:
        DTypeError: `codes` is not uint8.
        ShapeError: `codes` is a scalar or K is odd.
        RangeError: A code is above 15.
    """
    array = _require_u8("pack_nibbles", "codes", codes)
    if array.ndim == 0 or array.shape[-1] % 2:
        raise ShapeError(message("pack_nibbles", "codes", "an even last axis", array.shape))
    if array.size and int(array.max()) > 15:
        raise RangeError(message("pack_nibbles", "codes", "codes 0..15", int(array.max())))
    return array[..., 0::2] | (array[..., 1::2] << np.uint8(4))


def unpack_nibbles(packed: npt.ArrayLike) -> U8Array:
    """Splits bytes into 4-bit codes along the last axis, low nibble first.

    Args:
        packed: uint8 of shape (..., K / 2).

    Returns:
        uint8 codes 0..15 of shape (..., K).

    Raises:
        DTypeError: `packed` is not uint8.
        ShapeError: `packed` is a scalar.
    """
    array = _require_u8("unpack_nibbles", "packed", packed)
    if array.ndim == 0:
        raise ShapeError(message("unpack_nibbles", "packed", "at least one axis", array.shape))
    pairs = np.stack([array & np.uint8(15), array >> np.uint8(4)], axis=-1)
    return pairs.reshape(*array.shape[:-1], 2 * array.shape[-1])


def _require_u8(api: str, arg: str, array: npt.ArrayLike) -> U8Array:
    source: npt.NDArray[Any] = np.asarray(array)
    if source.dtype != np.uint8:
        hint = "view low-precision arrays with .view(numpy.uint8)"
        raise DTypeError(message(api, arg, "uint8", source.dtype, hint))
    return source


def _require_f32(api: str, arg: str, array: npt.ArrayLike) -> F32Array:
    source: npt.NDArray[Any] = np.asarray(array)
    if source.dtype != np.float32:
        hint = "convert explicitly with .astype(numpy.float32)"
        raise DTypeError(message(api, arg, "float32", source.dtype, hint))
    return source


def _f32_bits(api: str, values: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    return _require_f32(api, "values", values).view(np.uint32)
