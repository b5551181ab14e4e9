"""P10: bad input of the FP8 quantizers (tables Q and G; their row offsets with the other slots)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nbmoe.errors import (
    AliasError,
    ArgTypeError,
    ConfigError,
    DTypeError,
    LayoutError,
    RangeError,
    ScaleError,
    ShapeError,
    UnsupportedError,
)
from nbmoe.operand import named_dtype
from tests.bad_inputs.case import (
    Case,
    FakeDeviceArray,
    Recorder,
    both,
    cast,
    check,
    edit,
    narrow,
    put,
    remake,
    table,
    without,
)
from tests.bad_inputs.common import unaligned
from tests.bad_inputs.common_out import replace_out
from tests.bad_inputs.valid import VALID, Arguments

GROUPS = "quantize_dynamic_scaled_float8"
STATIC, STATIC_F32 = (f"quantize_static_scaled_float8:{t}" for t in ("bfloat16", "float32"))
TENSOR = "quantize_tensor_dynamic_scaled_float8"
ROW_ENTRIES = [entry for entry in VALID if entry.startswith(f"{GROUPS}:")]
INPUT = {**{entry: "input" for entry in ROW_ENTRIES}, STATIC: "x", STATIC_F32: "x", TENSOR: "x"}
NAN, INF = float("nan"), float("inf")
NOT_NUMBERS: tuple[tuple[Any, str], ...] = (
    (None, "NoneType None"),
    (True, "bool True"),
    ("1", "str '1'"),
    (1j, "complex 1j"),
)


def input_cases(entry: str) -> Iterator[Case]:
    """Inputs without columns or of another type."""
    arg = INPUT[entry]
    yield Case("Q9", both(narrow(arg, 0), without("out")), ShapeError, arg, "K = 0", "K > 0")
    says = "float16 or float32" if arg == "x" and entry != TENSOR else "dequantize"
    yield Case("Q11", cast(arg, np.uint8), DTypeError, arg, "uint8", says)
    yield Case("S3", cast(arg, np.float64), DTypeError, arg, "float64", "bfloat16")
    if says == "dequantize":
        half = cast(arg, np.float16)
        yield Case("Q12", half, UnsupportedError, arg, "float16", "convert to bfloat16")
        yield Case("Q12-f32", cast(arg, np.float32), DTypeError, arg, "float32", "astype")
    codes = VALID[entry]()["out"]
    codes = codes[0] if isinstance(codes, tuple) else codes
    packed = replace_out(0, codes[:, : codes.shape[1] // 2].copy())
    out = "out[0]" if entry != STATIC and entry != STATIC_F32 else "out"
    yield Case("Q20", packed, ShapeError, out, r"\(130, \d+\)", r"\(M, K\)")
    e5m2 = replace_out(0, codes.view(named_dtype("float8_e5m2")))
    yield Case("Q23", e5m2, DTypeError, out, "float8_e5m2", "float8_e4m3fn")


@pytest.mark.parametrize(("entry", "case"), table({entry: input_cases(entry) for entry in INPUT}))
def test_input_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)


def bound_cases() -> Iterator[Case]:
    """Bounds of the largest magnitude that are no positive finite float32."""
    arg = "scale_ub"
    for value in (0.0, -1.0, NAN, INF, 1e39, 2.0**-101):
        got = str(value).replace("+", r"\+")
        yield Case(f"ub-{value}", put(scale_ub=value), RangeError, arg, got, "a finite number >= ")
    for value, got in NOT_NUMBERS:
        yield Case(f"ub-{got}", put(scale_ub=value), ArgTypeError, arg, got, "a finite number")


@pytest.mark.parametrize(
    ("entry", "case"), table({entry: bound_cases() for entry in (*ROW_ENTRIES, TENSOR)})
)
def test_bound_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)


def group_cases(scales_type: str) -> Iterator[Case]:
    """Groups, scale types and floors that there are not, and buffers of another size."""
    arg = "group_size_or_per_token"
    yield Case("Q1", put(**{arg: 0}), RangeError, arg, "0", "-1 for whole rows")
    yield Case("Q2", put(**{arg: -16}), RangeError, arg, "-16", r"\[-1, ")
    yield Case("Q6", put(**{arg: 128.0}), ArgTypeError, arg, r"float 128\.0", "an int")
    yield Case("Q7", put(**{arg: True}), ArgTypeError, arg, "bool True", "an int")
    yield Case("Q6-none", put(**{arg: None}), ArgTypeError, arg, "NoneType None", "an int")
    arg, names = "scales_type", r"'float32', 'bfloat16', 'float8_e8m0fnu'"
    for value in ("float16", "float8_e4m3fn"):
        yield Case(f"Q23-{value}", put(scales_type=value), ConfigError, arg, f"'{value}'", names)
    for value, got in ((None, "NoneType None"), (np.float32, "type <class")):
        yield Case(f"Q23-{got}", put(scales_type=value), ArgTypeError, arg, got, "a name")
    arg = "amax_floor"
    says = "0 unless scales are float8_e8m0fnu and row_offsets is None"
    yield Case("floor", put(amax_floor=1.0), ConfigError, arg, r"1\.0", says)
    if scales_type != "float8_e8m0fnu":
        alone = put(amax_floor=1.0, row_offsets=None)
        yield Case("floor-type", alone, ConfigError, arg, r"1\.0", says)
    for value in (-1.0, NAN, INF, 1e39):
        got = str(value).replace("+", r"\+")
        yield Case(f"floor-{value}", put(amax_floor=value), RangeError, arg, got, ">= 0")
    for value, got in NOT_NUMBERS:
        yield Case(f"floor-{got}", put(amax_floor=value), ArgTypeError, arg, got, "a finite")
    scales = VALID[f"{GROUPS}:{scales_type}"]()["out"][1]
    unpadded = replace_out(1, scales[:, :130].copy())
    yield Case("Q21", unpadded, ShapeError, "out[1]", r"\(2, 130\)", "padded to 16 bytes")
    rows = replace_out(1, scales.T.copy())
    yield Case("Q21-rows", rows, ShapeError, "out[1]", r"\(\d+, 2\)", r"ceil\(K/group\)")
    other = "bfloat16" if scales_type == "float32" else "float32"
    wrong = replace_out(1, np.zeros(scales.shape, named_dtype(other)))
    yield Case("Q23-out", wrong, DTypeError, "out[1]", other, scales_type)


@pytest.mark.parametrize(
    ("entry", "case"), table({entry: group_cases(entry.partition(":")[2]) for entry in ROW_ENTRIES})
)
def test_group_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)


def scale_cases() -> Iterator[Case]:
    """Scales, as numbers, that are no factors."""
    arg = "scale"
    for row, value in (
        ("Q15", 0.0),
        ("Q15-tiny", 1e-50),
        ("Q16", -2.0),
        ("Q17", NAN),
        ("Q18", INF),
        ("Q18-large", 1e39),
        ("Q16-int", -1),
    ):
        got = str(value).replace("+", r"\+")
        yield Case(row, put(scale=value), ScaleError, arg, got, "missing from the checkpoint")
    yield Case("G17", put(scale=None), ScaleError, arg, "None", "scale is required")
    for value, got in ((True, "bool True"), ("1", "str '1'"), (1j, "complex")):
        yield Case(f"C2-{got}", put(scale=value), ArgTypeError, arg, got, "an array")
    two = put(scale=np.ones(2, np.float32))
    yield Case("G18", two, ShapeError, arg, r"\(2,\)", r"a number or \(1,\)")
    yield Case("G21", put(scale=np.ones(1)), DTypeError, arg, "float64", "float32")
    arg = "scale_is_inverted"
    for value, got in ((1, "int 1"), (None, "NoneType None"), ("yes", "str 'yes'")):
        yield Case(f"{arg}-{got}", put(**{arg: value}), ArgTypeError, arg, got, "a bool")


def scale_array_cases() -> Iterator[Case]:
    """Scales, in an array, that are no factors."""
    for row, value in (("Q15", 0), ("Q16", -2), ("Q17", NAN), ("Q18", INF)):
        got = rf"scale\[0\] = {np.float32(value)} for tensor 0"
        yield Case(f"{row}-array", edit("scale", 0, value), ScaleError, "scale", got, "missing")


STATICS = {STATIC: (*scale_cases(), *scale_array_cases()), STATIC_F32: scale_cases()}


@pytest.mark.parametrize(("entry", "case"), table(STATICS))
def test_scale_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)


def read_only(x: Any) -> Any:
    x.flags.writeable = False
    return x


def workspace_overlapping(arguments: Arguments) -> None:
    """The codes in the memory of the scratch."""
    codes, scale = arguments["out"]
    room = np.zeros((codes.nbytes + 4096) // 4, np.float32)
    room = room[-room.ctypes.data % 16 // 4 :]
    arguments["workspace"] = room
    shared = room.view(np.uint8)[: codes.nbytes].view(codes.dtype).reshape(codes.shape)
    arguments["out"] = (shared, scale)


def workspace_cases() -> Iterator[Case]:
    """Scratch that is too short or cannot be written; it is an output without a result."""
    arg = "workspace"
    yield Case("F3", narrow(arg, 1023), ShapeError, arg, r"\(1023,\)", "1024.* or longer")
    yield Case("C2", remake(arg, lambda x: x.tolist()), ArgTypeError, arg, "list", "numpy.asarray")
    yield Case("C4", cast(arg, np.float64), DTypeError, arg, "float64", "float32")
    square = remake(arg, lambda x: x.reshape(32, 32))
    yield Case("C8", square, ShapeError, arg, r"shape \(32, 32\)", r"\(1024,\)")
    gaps = remake(arg, lambda x: np.repeat(x, 2)[::2])
    yield Case("C10", gaps, LayoutError, arg, r"strides \(8,\)", "ascontiguousarray")
    odd = remake(arg, lambda x: unaligned(x, 2))
    yield Case("C14", odd, LayoutError, arg, "address 0x", "aligned to 4")
    yield Case("C15", remake(arg, read_only), LayoutError, arg, "not writeable")
    yield Case("C17", workspace_overlapping, AliasError, arg, "overlap", r"out\[0\]")
    huge = put(workspace=FakeDeviceArray((2**31,), "<f4"))
    yield Case("C21", huge, RangeError, arg, "2147483648")


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in workspace_cases()])
def test_workspace_refused(case: Case, recorder: Recorder) -> None:
    check(TENSOR, case, recorder)
