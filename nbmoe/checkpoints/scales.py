"""Checks of scales, and the one exact way to give gate and up a common second-level scale."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe.codecs import decode_e4m3, encode_e4m3
from nbmoe.errors import ScaleError, message

U8Array = npt.NDArray[np.uint8]

_MAGNITUDES = np.uint8(0x77)  # both nibbles without their signs: the code of -0 is 8
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
    empty = np.flatnonzero(~scales.any(axis=1))
    used = empty[(codes[empty] & _MAGNITUDES).any(axis=1)]
    if used.size:
        rule = "a non-zero block scale in every row with non-zero codes"
        raise ScaleError(message(api, where, rule, f"only zeros in row {used[0]}", _HINT))


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
