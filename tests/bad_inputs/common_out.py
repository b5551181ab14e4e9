"""The common table for the output buffers of any operation, and their sizes."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from nbmoe.errors import (
    AliasError,
    ArgTypeError,
    DeviceError,
    DTypeError,
    LayoutError,
    ShapeError,
    UnsupportedError,
)
from tests.bad_inputs.case import Case, FakeDeviceArray, remake
from tests.bad_inputs.common import (
    BAD_STRIDES,
    out_names,
    put_out,
    type_name,
    unaligned,
)
from tests.bad_inputs.valid import VALID, Arguments, op_name

NARROW = {("quantize_dynamic_scaled_float8", 1)}
"""Outputs of several axes that kernels do not write 16 bytes at a time."""


def out_cases(entry: str) -> Iterator[Case]:
    """The common table for each output buffer of an operation, and its size."""
    names = out_names(entry)
    for i, arg in enumerate(names):
        yield from _cases(entry, i, arg)
    if len(names) == 1:
        return
    yield Case("C17", _overlapping, AliasError, names[1], "overlap", re.escape(names[0]))
    for got, bad in (
        ("list", list),
        ("tuple of", lambda out: tuple(out)[:-1]),
        ("ndarray", lambda out: out[0]),
    ):
        yield Case(f"C2-out-{got}", remake("out", bad), ArgTypeError, "out", got, "a tuple")


def _cases(entry: str, i: int, arg: str) -> Iterator[Case]:
    out = VALID[entry]()["out"]
    buffer = out[i] if isinstance(out, tuple) else out

    def case(row: str, make: Any, error: type[Exception], got: str, says: str = "") -> Case:
        def change(arguments: Arguments) -> None:
            out = arguments["out"]
            put_out(arguments, i, make(out[i] if isinstance(out, tuple) else out))

        return Case(f"{row}-{arg}", change, error, arg, got, says)

    if isinstance(out, tuple):
        yield case("C1", lambda b: None, ArgTypeError, "None")
    yield case("C2", lambda b: b.tolist(), ArgTypeError, "list", "numpy.asarray")
    yield case("C3", lambda b: b.astype(object), DTypeError, "object", type_name(buffer))
    # M20: results in float16 are what one may ask for, bytes of row scales are not.
    is_result = arg == "out" and buffer.dtype.name == "bfloat16"
    half_error = UnsupportedError if is_result else DTypeError
    half = np.zeros(buffer.shape, np.float16)
    yield case("C4", lambda b: half, half_error, "float16", type_name(buffer))
    yield case("C9", lambda b: np.zeros((), b.dtype), ShapeError, r"shape \(\)")
    for row, make, got in BAD_STRIDES:
        if not make(buffer).flags.c_contiguous:
            yield case(row, make, LayoutError, got, "ascontiguousarray")
    is_narrow = buffer.ndim == 1 or (op_name(entry), i) in NARROW or buffer.dtype.itemsize == 4
    by = 1 if is_narrow else 8
    yield case("C14", lambda b: unaligned(b, by), LayoutError, "address 0x", "aligned to")
    yield case("C15", _read_only, LayoutError, "not writeable")
    yield case("C18", FakeDeviceArray.of, DeviceError, "one of the GPU")
    yield case("Q20-short", lambda b: b[:-1].copy(), ShapeError, r"\(")
    if buffer.ndim > 1:
        yield case("Q20-wide", _wider, ShapeError, r"\(")
        yield case("C7", lambda b: b[0].copy(), ShapeError, r"\(")
    yield case("C8", lambda b: b[..., None], ShapeError, r"shape \(.*1\)")


def _wider(b: Any) -> Any:
    return np.zeros((*b.shape[:-1], b.shape[-1] + 1), b.dtype)


def _read_only(b: Any) -> Any:
    b.flags.writeable = False
    return b


def _overlapping(arguments: Arguments) -> None:
    first, second, *rest = arguments["out"]
    room = np.zeros(first.nbytes + second.nbytes + 32, np.uint8)
    room = room[-room.ctypes.data % 16 :]
    start = (first.nbytes - 1) // 16 * 16
    arguments["out"] = (
        room[: first.nbytes].view(first.dtype).reshape(first.shape),
        room[start : start + second.nbytes].view(second.dtype).reshape(second.shape),
        *rest,
    )


def replace_out(index: int, buffer: Any) -> Any:
    """A change that replaces one of the output buffers."""
    return lambda arguments: put_out(arguments, index, buffer)
