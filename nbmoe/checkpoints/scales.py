"""Checks of scales, and the one exact way to give gate and up a common second-level scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nbmoe.codecs import decode_e4m3, encode_e4m3
from nbmoe.errors import ScaleError, message

F32Array = npt.NDArray[np.float32]
U8Array = npt.NDArray[np.uint8]

# Codes without their signs, packed and one a byte: the codes of -0 are 8 and 0x80.
_PACKED_MAGNITUDES, _BYTE_MAGNITUDES = np.uint8(0x77), np.uint8(0x7F)
_FP8_BLOCK = 128
_TINY = float(np.finfo(np.float32).tiny)
_HINT = "the exporter wrote a broken scale; export the checkpoint again"


def check_scale(value: float, api: str, where: str) -> None:
    """Requires a second-level scale that multiplies and divides without loss of range.

    Zero is what loaders put where a scale is missing, and a denormal's reciprocal overflows: both
    would turn into infinities in some rows only.

    Args:
        value: The scale as stored, a float32 value.
        api: Name of the public function, for messages.
        where: Layer, expert and tensor.

    Raises:
        ScaleError: The value or its reciprocal is zero, negative, denormal or not finite.
    """
    if not (_TINY <= value <= 1 / _TINY):
        rule = "a positive float32, normal like its reciprocal"
        raise ScaleError(message(api, where, rule, value, _HINT))


def check_block_scales(scales: U8Array, codes: U8Array, api: str, where: str) -> None:
    """Requires e4m3 block scales that a quantizer can have written.

    Args:
        scales: u8 [rows, K / 16], e4m3 bit patterns.
        codes: u8 [rows, K / 2], the packed codes that they scale.
        api: Name of the public function, for messages.
        where: Layer, expert and tensor.

    Raises:
        ScaleError: A byte is NaN or has its sign bit set, or a whole row of scales is zero while
            its codes are not (what a missing tensor filled with zeros looks like).
    """
    # Bytes 0x00..0x7E are the finite scales without a sign.
    bad = scales > 0x7E
    if bad.any():
        row, block = (int(i) for i in np.argwhere(bad)[0])
        byte = int(scales[row, block])
        kind = "NaN" if byte & 0x7F == 0x7F else "negative"
        rule = "finite e4m3 block scales without a sign"
        found = f"{kind} byte 0x{byte:02X} in row {row}, block {block}"
        raise ScaleError(message(api, where, rule, found, _HINT))
    _refuse_empty_rows(scales, codes & _PACKED_MAGNITUDES, api, where)


def check_e8m0_scales(scales: U8Array, codes: U8Array, api: str, where: str) -> None:
    """Requires e8m0 block scales that a quantizer can have written.

    Args:
        scales: u8 [rows, K / 32], e8m0 bit patterns.
        codes: u8 [rows, K / 2] packed e2m1 or [rows, K] e4m3 codes that they scale.
        api: Name of the public function, for messages.
        where: Layer, expert and tensor.

    Raises:
        ScaleError: A byte is NaN, or a whole row is byte 0 (2^-127) while its codes are not zero.
    """
    bad = scales == 0xFF
    if bad.any():
        row, block = (int(i) for i in np.argwhere(bad)[0])
        rule = "e8m0 block scales that are numbers"
        raise ScaleError(
            message(api, where, rule, f"NaN byte 0xFF in row {row}, block {block}", _HINT)
        )
    is_packed = codes.shape[-1] < 32 * scales.shape[-1]
    magnitudes = _PACKED_MAGNITUDES if is_packed else _BYTE_MAGNITUDES
    _refuse_empty_rows(scales, codes & magnitudes, api, where)


def _refuse_empty_rows(scales: U8Array, magnitudes: U8Array, api: str, where: str) -> None:
    empty = np.flatnonzero(~scales.any(axis=1))
    used = empty[magnitudes[empty].any(axis=1)]
    if used.size:
        rule = "a non-zero block scale in every row with non-zero codes"
        raise ScaleError(message(api, where, rule, f"only zeros in row {used[0]}", _HINT))


def check_float_scales(scales: F32Array, codes: U8Array, api: str, where: str) -> None:
    """Requires float32 scales of e4m3 codes that a quantizer can have written.

    Args:
        scales: f32 [N, 1], or [blocks of N, blocks of K] of 128 x 128 with partial ones at the
            ends; two projections on top of each other keep blocks of their own.
        codes: u8 [N, K], e4m3 codes.
        api: Name of the public function, for messages.
        where: Layer, expert and tensor.

    Raises:
        ScaleError: A scale is negative or not finite, or zero or denormal for codes of which one
            is not zero.
    """
    rule = "positive, normal float32 scales"
    bad = ~(scales >= _TINY) | ~np.isfinite(scales)
    for row, column in np.argwhere(bad):
        value = float(scales[row, column])
        if value == 0 and not (_scaled_codes(codes, scales.shape, row, column) & 0x7F).any():
            continue
        found = f"{value} at [{row}, {column}]"
        raise ScaleError(message(api, where, rule, found, _HINT))


def _scaled_codes(codes: U8Array, shape: tuple[int, ...], row: int, column: int) -> U8Array:
    if shape[0] == codes.shape[0]:
        return codes[row : row + 1]
    columns = slice(_FP8_BLOCK * column, _FP8_BLOCK * (column + 1))
    if shape[0] == -(-codes.shape[0] // _FP8_BLOCK):
        return codes[_FP8_BLOCK * row : _FP8_BLOCK * (row + 1), columns]
    half, blocks = codes.shape[0] // 2, shape[0] // 2
    begin = half * (row // blocks)
    first = begin + _FP8_BLOCK * (row % blocks)
    return codes[first : min(first + _FP8_BLOCK, begin + half), columns]


def share_weight_scale(
    gate: U8Array, up: U8Array, gate_scale: np.float32, up_scale: np.float32, api: str, where: str
) -> tuple[U8Array, U8Array, np.float32]:
    """Gives the gate and up blocks of an expert one second-level scale, without rounding.

    The fused matmul has one factor per expert. Where the two differ by a power of two and the
    block scales have room, one side's bytes are multiplied by it exactly; everything else would
    round the weights, so it is refused.

    Args:
        gate: u8 [D, H / 16], e4m3 block scales of the gate rows.
        up: u8 [D, H / 16], e4m3 block scales of the up rows.
        gate_scale: Second-level multiplier of the gate rows.
        up_scale: Second-level multiplier of the up rows.
        api: Name of the public function, for messages.
        where: Layer and expert.

    Returns:
        gate, up, scale: the block scales and their common multiplier.

    Raises:
        ScaleError: No exact common scale exists.
    """
    if gate_scale == up_scale:
        return gate, up, gate_scale
    ratio = float(up_scale) / float(gate_scale)
    if np.frexp(ratio)[0] == 0.5:
        scaled_up = _multiply_exactly(up, ratio)
        if scaled_up is not None:
            return gate, scaled_up, gate_scale
        scaled_gate = _multiply_exactly(gate, 1 / ratio)
        if scaled_gate is not None:
            return scaled_gate, up, up_scale
    rule = "gate and up with one weight scale, or two that a power of two folds into block scales"
    hint = "folding these would round the weights; export with a shared gate/up scale"
    raise ScaleError(message(api, where, rule, f"{gate_scale} and {up_scale}", hint))


def _multiply_exactly(scales: U8Array, factor: float) -> U8Array | None:
    values: npt.NDArray[Any] = decode_e4m3(scales).astype(np.float64) * factor
    folded = encode_e4m3(values.astype(np.float32))
    exact = np.array_equal(decode_e4m3(folded).astype(np.float64), values)
    return folded if exact else None


SCALE_CHECKS: Final[dict[str, Callable[[npt.NDArray[Any], U8Array, str, str], None]]] = {
    "e4m3": check_block_scales,
    "e8m0": check_e8m0_scales,
    "f32": check_float_scales,
}
"""Check of a projection's scales by their encoding: (scales, codes, api, where)."""
