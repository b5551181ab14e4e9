"""Checks that the FP8 quantizers share: element types, numbers, and the bound of the rows."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from nbmoe.arrays import Array
from nbmoe.errors import ArgTypeError, RangeError, ScaleError, ShapeError
from nbmoe.validate.call import Call
from nbmoe.validate.elements import F32, U32, Elements
from nbmoe.validate.routing import check_starts

SCALES = {
    "float32": F32,
    "bfloat16": Elements(("bfloat16", "uint16"), "or its bit patterns in uint16", 4),
    "float8_e8m0fnu": Elements(("float8_e8m0fnu", "uint8"), "e8m0 scale bytes", 4),
}
"""What holds FP8 scales, by their type."""
MIN_SCALE_UB = 2.0**-100
"""Below, the scale of an infinite value would have no float32 inverse."""
FLT_MAX = float(np.finfo(np.float32).max)


def take_scale(call: Call, arg: str, scale: Any) -> tuple[float | None, Array | None]:
    """Takes a factor: a number, or an array (1,) float32.

    Returns:
        The number, rounded to float32, or else the array.

    Raises:
        ScaleError: it is None, or a number that is not finite and positive in float32.
        ArgTypeError, DTypeError, ShapeError: it is neither.
    """
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        array = call.array(arg, scale, F32, "(1,)", missing=ScaleError)
        call.shape(arg, (1,), "a number or (1,)")
        return None, array
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.float32(scale)
    if not 0 < rounded < np.inf:
        hint = "is it missing from the checkpoint?"
        raise ScaleError(call.message(arg, "a finite float32 above 0", scale, hint))
    return float(rounded), None


def number(call: Call, arg: str, value: Any, low: float) -> float:
    """Takes a finite number of at least `low`."""
    rule = f"a finite number >= {low:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgTypeError(call.message(arg, rule, f"{type(value).__name__} {value!r}"))
    number = float(value)
    if not low <= number <= FLT_MAX:
        raise RangeError(call.message(arg, rule, number))
    return number


def take_offsets(call: Call, row_offsets: Any) -> Array | None:
    """Takes the row offsets of a call that is bounded by them."""
    offsets = call.optional("row_offsets", row_offsets, U32, "(S + 1,)")
    if offsets is not None and offsets.shape[0] < 2:
        rule = "(S + 1,) with S >= 1"
        raise ShapeError(call.message("row_offsets", rule, f"shape {offsets.shape}"))
    return offsets


def check_offsets(call: Call, offsets: Array | None, rows: int) -> None:
    """Checks what the row offsets say ("metadata")."""
    if offsets is not None and call.checks("metadata"):
        check_starts(call, "row_offsets", call.data(offsets), rows, next(iter(call.inputs)))


def num_slots(offsets: Array | None) -> int:
    """Slots as the kernels are told them: 0 says that there are no offsets."""
    return 0 if offsets is None else offsets.shape[0] - 1
