"""FP8 quantization: e4m3 codes with a scale a group of a row, a row or a tensor.

    s = min(amax, scale_ub) / 448          the scale that dequantization multiplies by
    r = 1 / s, or 0 where s is 0 or r is not finite
    q = e4m3(clamp(x * r, -448, 448))

every operation rounded once to float32. A NaN makes its scale NaN and all codes under it 0x7F.
"""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nbmoe import codecs
from nbmoe.codecs import F32Array, U8Array
from nbmoe.errors import ConfigError, message
from nbmoe.formats import E4M3
from nbmoe.layouts import ceil_div
from nbmoe.scale_specs import padded_rows

MAX_VALUE: Final = np.float32(E4M3.max_value)
SMALLEST_E8M0: Final = np.float32(1e-10)
SCALE_UB: Final = 1200.0
SCALES_TYPES: Final = ("float32", "bfloat16", "float8_e8m0fnu")

Fp8Array = npt.NDArray[Any]


def multiplier(scale: F32Array | np.float32) -> F32Array:
    """1 / scale, NaN of NaN, and 0 where the scale is so small that 1 / scale is no float32."""
    with np.errstate(all="ignore"):
        inverse: F32Array = np.asarray(np.float32(1) / scale, np.float32)
    inverse[np.isinf(inverse)] = 0
    return inverse


def stored_scale(
    amax: F32Array, scale_ub: float, scales_type: str, amax_floor: float
) -> tuple[npt.NDArray[Any], F32Array]:
    """The scale of values with a largest magnitude, as it is stored and as float32.

    float32 and bfloat16 hold min(amax, scale_ub) / 448; float8_e8m0fnu holds the smallest power
    of two that is not below max(amax, amax_floor) / 448 nor below 1e-10, which scale_ub does not
    bound. Infinity then gives 2**127.
    """
    with np.errstate(all="ignore"):
        if scales_type == "float8_e8m0fnu":
            floored = np.maximum(amax, np.float32(amax_floor)) / MAX_VALUE
            byte = codecs.ceil_e8m0(np.maximum(floored, SMALLEST_E8M0))
            return byte.view(ml_dtypes.float8_e8m0fnu), codecs.decode_e8m0(byte)
        scale: F32Array = np.divide(np.minimum(amax, np.float32(scale_ub)), MAX_VALUE)
    if scales_type == "bfloat16":
        rounded = codecs.encode_bf16(scale)
        return rounded, codecs.decode_bf16(rounded)
    canonical = np.where(np.isnan(scale), np.uint32(0x7FFFFFFF), scale.view(np.uint32))
    return canonical.view(np.float32), scale


def scaled_codes(x: F32Array, scale: F32Array) -> U8Array:
    """Codes of values under a scale of the same shape or one that broadcasts."""
    with np.errstate(all="ignore"):
        return codecs.encode_e4m3(x * multiplier(scale))


def used_rows(x: npt.NDArray[Any], row_offsets: npt.NDArray[np.uint32] | None) -> int:
    """Rows that are quantized: all, or those before row_offsets[-1]."""
    return len(x) if row_offsets is None else int(row_offsets[-1])


def quantize_dynamic_scaled_float8(
    input: npt.NDArray[Any],
    *,
    group_size_or_per_token: int = -1,
    scale_ub: float = SCALE_UB,
    scales_type: str = "float32",
    amax_floor: float = 0.0,
    row_offsets: npt.NDArray[np.uint32] | None = None,
) -> tuple[Fp8Array, npt.NDArray[Any]]:
    """Quantizes each row in groups of consecutive values with a scale each.

    Args:
        input: (M, K) bf16.
        group_size_or_per_token: Values that share a scale, -1 for a whole row; the last group of
            a row may be shorter [elements].
        scale_ub: Largest magnitude that a float32 or bfloat16 scale takes into account.
        scales_type: Element type of the scales.
        amax_floor: Smallest magnitude that an e8m0 scale takes into account.
        row_offsets: (S + 1,) prefix sums; only rows below row_offsets[-1] are quantized.

    Returns:
        Codes (M, K) float8_e4m3fn and scales (G, Mpad), transposed, with G groups a row and Mpad
        as `nbmoe.scale_specs.padded_rows`. Rows that are not quantized and padding are 0 bytes.

    Raises:
        ConfigError: `scales_type` is unknown, or `amax_floor` is given without e8m0 scales or
            with `row_offsets`.
    """
    api = "quantize_dynamic_scaled_float8"
    if scales_type not in SCALES_TYPES:
        raise ConfigError(message(api, "scales_type", f"one of {SCALES_TYPES}", repr(scales_type)))
    if amax_floor and (scales_type != "float8_e8m0fnu" or row_offsets is not None):
        rule = "0 unless scales are float8_e8m0fnu and row_offsets is None"
        raise ConfigError(message(api, "amax_floor", rule, amax_floor))
    m, k = input.shape
    group = k if group_size_or_per_token == -1 else group_size_or_per_token
    groups, rows = ceil_div(k, group), used_rows(input, row_offsets)
    codes = np.zeros((m, k), np.uint8)
    scales = np.zeros((groups, padded_rows(m, scales_type)), numpy_dtype(scales_type))
    x = codecs.decode_bf16(input[:rows])
    for g in range(groups):
        columns = slice(g * group, (g + 1) * group)
        amax = np.abs(x[:, columns]).max(axis=1, initial=0)
        stored, scale = stored_scale(amax, scale_ub, scales_type, amax_floor)
        scales[g, :rows] = stored
        codes[:rows, columns] = scaled_codes(x[:, columns], scale[:, np.newaxis])
    return codes.view(ml_dtypes.float8_e4m3fn), scales


def numpy_dtype(name: str) -> npt.DTypeLike:
    """The numpy type of a scales type."""
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def quantize_static_scaled_float8(
    x: npt.NDArray[Any],
    scale: float,
    *,
    scale_is_inverted: bool = True,
    row_offsets: npt.NDArray[np.uint32] | None = None,
) -> Fp8Array:
    """Quantizes a matrix with a scale that is known beforehand.

    Args:
        x: (M, K) bf16, float16 or float32.
        scale: What dequantization multiplies by, or its inverse.
        scale_is_inverted: True for the former, as checkpoints store it: values are multiplied by
            1 / scale. False: values are multiplied by `scale`.
        row_offsets: (S + 1,) prefix sums; only rows below row_offsets[-1] are quantized.

    Returns:
        Codes (M, K) float8_e4m3fn; rows that are not quantized are 0.
    """
    rows = used_rows(x, row_offsets)
    values = x[:rows]
    is_bf16 = values.dtype == codecs.BF16 or values.dtype == np.uint16
    values = codecs.decode_bf16(values) if is_bf16 else values.astype(np.float32)
    factor = np.float32(scale)
    codes = np.zeros(x.shape, np.uint8)
    with np.errstate(all="ignore"):
        codes[:rows] = codecs.encode_e4m3(
            values * (multiplier(factor) if scale_is_inverted else factor)
        )
    return codes.view(ml_dtypes.float8_e4m3fn)


def quantize_tensor_dynamic_scaled_float8(
    x: npt.NDArray[Any],
    *,
    scale_ub: float = SCALE_UB,
    row_offsets: npt.NDArray[np.uint32] | None = None,
) -> tuple[Fp8Array, F32Array]:
    """Quantizes a matrix with one scale, of its largest magnitude.

    Args:
        x: (M, K) bf16.
        scale_ub: Largest magnitude that the scale takes into account.
        row_offsets: (S + 1,) prefix sums; only rows below row_offsets[-1] are looked at.

    Returns:
        Codes (M, K) float8_e4m3fn, and the scale (1,) float32. Rows that are not quantized are 0.
    """
    rows = used_rows(x, row_offsets)
    values = codecs.decode_bf16(x[:rows])
    amax = np.abs(values).max(initial=0).reshape(1)
    stored, scale = stored_scale(amax, scale_ub, "float32", 0.0)
    codes = np.zeros(x.shape, np.uint8)
    codes[:rows] = scaled_codes(values, scale)
    return codes.view(ml_dtypes.float8_e4m3fn), stored
