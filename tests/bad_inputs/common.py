"""The common table C1-C21, spoiling any array argument of any operation."""

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
    RangeError,
    ScaleError,
    ShapeError,
    UnsupportedError,
)
from nbmoe.reference import RoutingIndices
from tests.bad_inputs.case import Case, FakeDeviceArray, remake
from tests.bad_inputs.valid import VALID, Arguments

OPTIONAL = {"indices", "a_row_scales"}
SCALES = {"scales_offsets", "a_scale_offsets", "sf_tensor"} | {
    "a_scales",
    "b_scales",
    "expert_scales",
    "c_input_scales",
}
PAYLOAD = {"input", "hidden", "weight", "a_scales", "b_scales", "down"}


def unaligned(x: Any, by: int) -> Any:
    """A copy whose first element lies `by` bytes after a 16-byte boundary."""
    room = np.zeros(x.nbytes + 32, np.uint8)
    start = -room.ctypes.data % 16 + by
    copy = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def every_other(x: Any) -> Any:
    """The same elements with gaps along the last axis."""
    return np.repeat(x, 2, axis=-1)[..., ::2]


def array_arguments(api: str) -> list[str]:
    """Names of the array arguments of an operation."""
    return [name for name, value in VALID[api]().items() if isinstance(value, np.ndarray)]


def common_cases(api: str) -> Iterator[Case]:
    """The common table for each array argument of an operation except `out`."""
    for arg in array_arguments(api):
        if arg != "out":
            yield from _cases(api, arg, VALID[api]()[arg])


def _cases(api: str, arg: str, x: Any) -> Iterator[Case]:
    def case(row: str, make: Any, error: type[Exception], got: str, says: str = "") -> Case:
        return Case(f"{row}-{arg}", remake(arg, make), error, arg, got, says)

    if arg not in OPTIONAL:
        missing = ScaleError if arg in SCALES else ArgTypeError
        yield case("C1", lambda x: None, missing, "None", f"{arg} is required")
    # The plain (E, N, K/16) case of b_scales is M8, with its own error.
    yield case("C2-list", lambda x: x.tolist(), ArgTypeError, "list", "numpy.asarray")
    yield case("C2-scalar", lambda x: 3.5, ArgTypeError, "float 3.5")
    yield case("C3-object", lambda x: x.astype(object), DTypeError, "object")
    yield case("C3-string", lambda x: np.full(x.shape, "a"), DTypeError, "str")
    yield case(
        "C3-date",
        lambda x: np.zeros(x.shape, "datetime64[s]"),
        DTypeError,
        "datetime64",
        x.dtype.name,
    )
    yield case("C4", lambda x: x.astype(np.float64), DTypeError, "float64", x.dtype.name)
    if x.dtype == np.uint8:
        yield case("C5", lambda x: x.view(np.int8), DTypeError, "int8", r"\.view\('uint8'\)")
    if x.dtype.itemsize > 1:
        swapped = np.dtype("u2" if x.dtype.name == "bfloat16" else x.dtype).newbyteorder()
        yield case("C6", lambda x: np.zeros(x.shape, swapped), DTypeError, "byte-swapped", "astype")
    if x.ndim > 1 and arg != "topk_ids":
        yield case("C7", lambda x: x[0].copy(), ShapeError, r"shape \(", r"expected \(")
    yield case("C8", lambda x: x[..., None], ShapeError, r"shape \(.*1\)", "squeeze")
    yield case("C9", lambda x: np.zeros((), x.dtype), ShapeError, r"shape \(\)")
    yield case("C10", every_other, LayoutError, r"strides \(", "ascontiguousarray")
    if x.ndim > 1:
        yield case("C11", np.asfortranarray, LayoutError, "strides", "ascontiguousarray")
    yield case("C12", lambda x: x[::-1].copy()[::-1], LayoutError, r"strides \(-")
    yield case("C13", lambda x: np.broadcast_to(x.flat[0], x.shape), LayoutError, r"strides \(0")
    if arg in PAYLOAD:
        yield case("C14", lambda x: unaligned(x, 8), LayoutError, "address 0x", "aligned to 16")
    elif x.dtype.itemsize > 1:
        yield case("C14", lambda x: unaligned(x, 1), LayoutError, "address 0x", "aligned to")
    yield from _device_cases(api, arg, case)
    yield Case(f"C16-{arg}", _overlap(arg), AliasError, out_names(api)[0], "overlap", arg)


def _device_cases(api: str, arg: str, case: Any) -> Iterator[Case]:
    first = array_arguments(api)[0]
    on_host = {} if api == "route" else {"backend": "reference"}
    place = "one of the GPU"
    change = remake(arg, FakeDeviceArray.of)
    yield Case(f"C18-{arg}", change, DeviceError, arg, place, "to_numpy", on_host)
    if api != "route" and arg != first:
        yield Case(f"C19-{arg}", _second_gpu(arg), DeviceError, arg, "GPU 1", f"as {first} is")
    yield case(
        "C20-size", _short, LayoutError, "bytes for shape", "consistent __cuda_array_interface__"
    )
    yield case("C20-null", lambda x: FakeDeviceArray.of(x, pointer=0), LayoutError, "null pointer")
    yield case(
        "C20-strides",
        lambda x: FakeDeviceArray.of(x, strides=(1,) * 7),
        LayoutError,
        "strides",
        "a consistent",
    )
    yield case("C21", _huge, RangeError, r"shape \(2147483648")


class _ShortArray(FakeDeviceArray):
    nbytes = 1


def _short(x: Any) -> Any:
    return _ShortArray.of(x)


def _huge(x: Any) -> Any:
    huge = FakeDeviceArray.of(x)
    huge.shape = (2**31, *x.shape[1:])
    return huge


def _second_gpu(arg: str) -> Any:
    def change(arguments: Arguments) -> None:
        for name, value in arguments.items():
            if isinstance(value, np.ndarray):
                arguments[name] = FakeDeviceArray.of(value, device_id=int(name == arg))
        del arguments["out"]

    return change


def _overlap(arg: str) -> Any:
    """Lets the first output begin at the input's last 16 bytes."""

    def change(arguments: Arguments) -> None:
        x, out = arguments[arg], arguments["out"]
        first = out[0] if isinstance(out, tuple) else out
        room = np.zeros(x.nbytes + first.nbytes + 48, np.uint8)
        base = -room.ctypes.data % 16
        room = room[base:]
        shared = room[: x.nbytes].view(x.dtype).reshape(x.shape)
        shared[...] = x
        start = (x.nbytes - 1) // 16 * 16
        buffer = room[start : start + first.nbytes].view(first.dtype).reshape(first.shape)
        arguments[arg] = shared
        arguments["out"] = (buffer, *out[1:]) if isinstance(out, tuple) else buffer

    return change


def out_names(api: str) -> list[str]:
    """Names of the output buffers in messages."""
    out = VALID[api]()["out"]
    if not isinstance(out, tuple):
        return ["out"]
    if len(out) == len(RoutingIndices._fields):
        return [f"out.{field}" for field in RoutingIndices._fields]
    return [f"out[{i}]" for i in range(len(out))]


def out_cases(api: str) -> Iterator[Case]:
    """The common table for each output buffer of an operation, and its size."""
    names = out_names(api)
    for i, arg in enumerate(names):
        yield from _out_cases(api, i, arg)
    if len(names) > 1:
        yield Case(
            "C17", _overlapping_outputs, AliasError, names[1], "overlap", re.escape(names[0])
        )
        for got, bad in (
            ("list", list),
            ("tuple of", lambda out: out[:-1]),
            ("ndarray", lambda out: out[0]),
        ):
            yield Case(f"out-{got}", remake("out", bad), ArgTypeError, "out", got, "a tuple")


def _out_cases(api: str, i: int, arg: str) -> Iterator[Case]:
    out = VALID[api]()["out"]
    buffer = out[i] if isinstance(out, tuple) else out

    def case(row: str, make: Any, error: type[Exception], got: str, says: str = "") -> Case:
        def change(arguments: Arguments) -> None:
            out = arguments["out"]
            if isinstance(out, tuple):
                arguments["out"] = (*out[:i], make(out[i]), *out[i + 1 :])
            else:
                arguments["out"] = make(out)

        return Case(f"{row}-{arg}", change, error, arg, got, says)

    half_error = UnsupportedError if buffer.dtype.name == "bfloat16" else DTypeError
    yield case(
        "C4", lambda b: np.zeros(b.shape, np.float16), half_error, "float16", buffer.dtype.name
    )
    yield case("C9", lambda b: np.zeros((), b.dtype), ShapeError, r"shape \(\)")
    yield case("C10", every_other, LayoutError, r"strides \(")
    yield case("C15", _read_only, LayoutError, "not writeable")
    yield case("C18", FakeDeviceArray.of, DeviceError, "one of the GPU")
    yield case("Q20-short", lambda b: b[:-1].copy(), ShapeError, r"\(")
    if buffer.ndim > 1:
        yield case("Q20-wide", _wider, ShapeError, r"\(")
        yield case("C7", lambda b: b[0].copy(), ShapeError, r"shape \(")
    if len(out_names(api)) > 1:
        yield case("C1", lambda b: None, ArgTypeError, "None")


def _wider(b: Any) -> Any:
    return np.zeros((*b.shape[:-1], b.shape[-1] + 1), b.dtype)


def _read_only(b: Any) -> Any:
    b.flags.writeable = False
    return b


def _overlapping_outputs(arguments: Arguments) -> None:
    first, second, *rest = arguments["out"]
    room = np.zeros(first.nbytes + second.nbytes + 32, np.uint8)
    room = room[-room.ctypes.data % 16 :]
    start = (first.nbytes - 1) // 16 * 16
    arguments["out"] = (
        room[: first.nbytes].view(first.dtype).reshape(first.shape),
        room[start : start + second.nbytes].view(second.dtype).reshape(second.shape),
        *rest,
    )
