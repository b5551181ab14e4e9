"""The common table C1-C21, spoiling any array argument of any operation."""

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
)
from nbmoe.reference import RoutingIndices
from tests.bad_inputs.case import Case, FakeDeviceArray, remake
from tests.bad_inputs.valid import VALID, Arguments, op_name

OPTIONAL = {"indices", "a_row_scales", "bias", "correction_bias", "shared", "workspace"}
OPTIONAL_OF = {
    "grouped_quantize_nvfp4_row_scaled": {"expert_ids"},
    "gather_rows": {"weights"},
    **{
        f"grouped_matmul_{kind}:{formats}": {"expert_scales"}
        for kind in ("block_scaled", "blocked_swiglu")
        for formats in ("mxfp4", "mxfp8", "mxfp8xmxfp4")
    },
    **{
        f"quantize_{kind}": {"row_offsets"}
        for kind in (
            "dynamic_scaled_float8",
            "static_scaled_float8",
            "tensor_dynamic_scaled_float8",
        )
    },
}
"""Arguments that may be None, of any operation and by operation or entry."""
SCALES = {
    *("scales_offsets", "a_scale_offsets", "sf_tensor", "a_scales", "b_scales"),
    *("expert_scales", "c_input_scales", "input_scales", "scale"),
}
SCALES_OF = {"mxfp4_dequant": {"scales"}}
"""Arguments whose absence is a `ScaleError`, of any operation and of one."""
PAYLOAD = {
    *("input", "hidden", "weight", "down", "gate_up", "packed", "scales", "x", "a", "b"),
    "shared",
}
"""Arguments that kernels read 16 bytes at a time, as they do scale tiles and biases in bfloat16."""
LEGAL = {
    # As many axes as another form of the argument has.
    *(("C7", entry, arg) for entry, arg in (("moe_create_indices", "topk_ids"),)),
    *(("C7", "mxfp4_dequant", arg) for arg in ("packed", "scales")),
    ("C7", "block_scales_interleave", "scales"),
    ("C7", "grouped_rowwise_dynamic_scaled_fp8_matmul", "a_scales"),
    ("C8", "grouped_rowwise_dynamic_scaled_fp8_matmul:tensor", "a_scales"),
    ("C8", "grouped_rowwise_dynamic_scaled_fp8_matmul:tensor", "b_scales"),
    # Bytes of a GPU have no type, so the typed buffer is refused first.
    ("C18", "block_scales_interleave:mxfp4", "scales"),
    # A number is a form of it.
    ("C2-scalar", "quantize_static_scaled_float8", "scale"),
}
"""Rows of the table that are no error, or not this one, by entry or operation and argument."""


def is_legal(row: str, entry: str, arg: str) -> bool:
    """Whether a row does not apply to an argument."""
    return bool({(row, entry, arg), (row, op_name(entry), arg)} & LEGAL)


def is_optional(entry: str, arg: str) -> bool:
    """Whether an argument may be None."""
    of_entry = OPTIONAL_OF.get(entry, set()) | OPTIONAL_OF.get(op_name(entry), set())
    return arg in OPTIONAL | of_entry


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


def reversed_rows(x: Any) -> Any:
    """The same elements with a negative step."""
    return x[::-1].copy()[::-1]


def broadcast(x: Any) -> Any:
    """One element everywhere."""
    return np.broadcast_to(x.flat[0], x.shape)


BAD_STRIDES = (
    ("C10", every_other, r"strides \("),
    ("C11", np.asfortranarray, r"strides \("),
    ("C12", reversed_rows, r"strides \(-"),
    ("C13", broadcast, r"strides \(0"),
)


def type_name(x: Any) -> str:
    """Pattern of the element types that a message may expect instead of an array's."""
    return r"uint8|float8" if x.dtype.itemsize == 1 else x.dtype.name


def input_names(entry: str) -> list[str]:
    """Names of the array arguments that an operation reads."""
    arguments = VALID[entry]().items()
    return [n for n, v in arguments if isinstance(v, np.ndarray) and n not in ("out", "workspace")]


def common_cases(entry: str) -> Iterator[Case]:
    """The common table for each array that an operation reads."""
    for arg in input_names(entry):
        for case in _cases(entry, arg, VALID[entry]()[arg]):
            if not is_legal(case.id.removesuffix(f"-{arg}"), entry, arg):
                yield case


def _cases(entry: str, arg: str, x: Any) -> Iterator[Case]:
    def case(row: str, make: Any, error: type[Exception], got: str, says: str = "") -> Case:
        return Case(f"{row}-{arg}", remake(arg, make), error, arg, got, says)

    if not is_optional(entry, arg):
        scales = SCALES | SCALES_OF.get(op_name(entry), set())
        missing = ScaleError if arg in scales else ArgTypeError
        yield case("C1", lambda x: None, missing, "None", f"{arg} is required")
    # The plain (E, N, K/16) case of b_scales is M8, with its own error.
    yield case("C2-list", lambda x: x.tolist(), ArgTypeError, "list", "numpy.asarray")
    yield case("C2-scalar", lambda x: 3.5, ArgTypeError, "float 3.5")
    yield case("C3-object", lambda x: x.astype(object), DTypeError, "object")
    yield case("C3-string", lambda x: np.full(x.shape, "a"), DTypeError, "str")
    dates = np.dtype("datetime64[s]")
    yield case(
        "C3-date", lambda x: np.zeros(x.shape, dates), DTypeError, "datetime64", type_name(x)
    )
    hint = "quantized, not converted" if x.dtype.itemsize == 1 else "astype"
    says = f"{type_name(x)}.*{hint}"
    yield case("C4", lambda x: x.astype(np.float64), DTypeError, "float64", says)
    if x.dtype.itemsize == 1:
        yield case("C5", lambda x: x.view(np.int8), DTypeError, "int8", r"\.view\('uint8'\)")
    else:
        swapped = np.dtype("u2" if x.dtype.name == "bfloat16" else x.dtype).newbyteorder()
        yield case("C6", lambda x: np.zeros(x.shape, swapped), DTypeError, "byte-swapped", "astype")
    if x.ndim > 1:
        yield case("C7", lambda x: x[0].copy(), ShapeError, r"shape \(", r"expected \(")
    yield case("C8", lambda x: x[..., None], ShapeError, r"shape \(.*1\)", "squeeze")
    yield case("C9", lambda x: np.zeros((), x.dtype), ShapeError, r"shape \(\)")
    for row, make, got in BAD_STRIDES:
        if not make(x).flags.c_contiguous:
            yield case(row, make, LayoutError, got, "ascontiguousarray")
    by = misalignment(arg, x)
    if by:
        yield case("C14", lambda x: unaligned(x, by), LayoutError, "address 0x", "aligned to")
    yield from _device_cases(entry, arg, case)
    for i, out in enumerate(out_names(entry)):
        yield Case(f"C16-{out}-{arg}", _overlap(arg, i), AliasError, out, "overlap", arg)


def misalignment(arg: str, x: Any) -> int:
    """Bytes after a 16-byte boundary where an array must not begin, 0 if it may anywhere."""
    is_wide_bias = arg == "bias" and x.dtype.itemsize == 2
    if arg in PAYLOAD or x.ndim >= 5 or is_wide_bias:
        return 8
    return int(x.dtype.itemsize > 1)


def _device_cases(entry: str, arg: str, case: Any) -> Iterator[Case]:
    first = input_names(entry)[0]
    on_host = {"backend": "reference"}
    place = "one of the GPU"
    change = remake(arg, FakeDeviceArray.of)
    yield Case(f"C18-{arg}", change, DeviceError, arg, place, "to_numpy", on_host)
    if arg != first:
        yield Case(f"C19-{arg}", _second_gpu(arg), DeviceError, arg, "GPU 1", f"as {first} is")
    consistent = "consistent __cuda_array_interface__"
    yield case("C20-size", _short, LayoutError, "bytes for shape", consistent)
    yield case("C20-null", lambda x: FakeDeviceArray.of(x, pointer=0), LayoutError, "null pointer")
    strides = (1,) * 7
    yield case(
        "C20-strides",
        lambda x: FakeDeviceArray.of(x, strides=strides),
        LayoutError,
        "strides",
        consistent,
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
        arguments.pop("workspace", None)

    return change


def _overlap(arg: str, index: int) -> Any:
    """Lets an output begin at the input's last 16 bytes."""

    def change(arguments: Arguments) -> None:
        x, out = arguments[arg], arguments["out"]
        buffer = out[index] if isinstance(out, tuple) else out
        room = np.zeros(x.nbytes + buffer.nbytes + 48, np.uint8)
        room = room[-room.ctypes.data % 16 :]
        arguments[arg] = room[: x.nbytes].view(x.dtype).reshape(x.shape)
        arguments[arg][...] = x
        start = (x.nbytes - 1) // 16 * 16
        buffer = room[start : start + buffer.nbytes].view(buffer.dtype).reshape(buffer.shape)
        put_out(arguments, index, buffer)

    return change


def put_out(arguments: Arguments, index: int, buffer: Any) -> None:
    """Replaces one of the output buffers."""
    out = arguments["out"]
    if isinstance(out, tuple):
        arguments["out"] = (*out[:index], buffer, *out[index + 1 :])
    else:
        arguments["out"] = buffer


def out_names(entry: str) -> list[str]:
    """Names of the output buffers in messages."""
    out = VALID[entry]()["out"]
    if not isinstance(out, tuple):
        return ["out"]
    if len(out) == len(RoutingIndices._fields):
        return [f"out.{field}" for field in RoutingIndices._fields]
    return [f"out[{i}]" for i in range(len(out))]
