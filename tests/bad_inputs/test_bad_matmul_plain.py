"""P10: bad operands of the matmuls of bfloat16 activations (table M)."""

from collections.abc import Iterator

import numpy as np
import pytest

from nbmoe.errors import (
    ArgTypeError,
    DTypeError,
    LayoutError,
    RangeError,
    RoutingError,
    ScaleError,
    ShapeError,
    UnsupportedError,
)
from nbmoe.layouts import deinterleave_scales
from nbmoe.operand import named_dtype
from tests.bad_inputs.case import Case, Recorder, cast, check, narrow, put, remake, shorter, table
from tests.bad_inputs.sizes import EXPERTS, ROWS
from tests.bad_inputs.test_bad_matmul import scale_byte
from tests.bad_inputs.valid import VALID, Arguments

RAGGED, W4A16 = "grouped_matmul_ragged", "grouped_matmul_w4a16"
BF16 = named_dtype("bfloat16")


def fewer_experts(arguments: Arguments) -> None:
    """Fewer experts than slots."""
    for name in ("weight", "b_scales", "bias"):
        if name in arguments:
            arguments[name] = arguments[name][:-1].copy()


def a_slot_less(arguments: Arguments) -> None:
    """Three experts and three slots, one of them of the fourth expert."""
    fewer_experts(arguments)
    for name in ("expert_start", "expert_ids"):
        arguments[name] = arguments[name][:-1].copy()
    arguments["expert_ids"][2] = 3


def cases(entry: str, block: int) -> Iterator[Case]:
    """Activations and weights whose sizes and types do not fit."""
    arguments = VALID[entry]()
    width, n = arguments["weight"].shape[2], arguments["weight"].shape[1]
    got = rf"\(4, {n}, {width - 8}\)"
    yield Case("M1", narrow("weight", width - 8), ShapeError, "weight", got, f"= {width}")
    for row, k in (("Q8", block // 2 + block), ("Q9", 0)):
        says = f"K > 0 and K % {block} == 0.*pad K"
        yield Case(row, narrow("hidden", k), ShapeError, "hidden", f"K = {k}", says)
    change = remake("weight", lambda x: x.swapaxes(1, 2).copy())
    yield Case("M2", change, ShapeError, "weight", rf"\(4, {width}, {n}\)", "K-major")
    for row, rows in (("M5", 0), ("M6", 12)):
        change = remake("weight", lambda x, rows=rows: x[:, :rows].copy())
        yield Case(row, change, ShapeError, "weight", f"N = {rows}", "N > 0 and N % 8 == 0")
    change = remake("weight", lambda x: x[:0].copy())
    yield Case("E0", change, ShapeError, "weight", r"\(0,", "E >= 1")
    yield Case("M4-slots", fewer_experts, ShapeError, "weight", "3 entries", "4 slots")
    got, says = r"expert_ids\[2\] = 3", "below 3, the experts of weight"
    yield Case("M4", a_slot_less, RoutingError, "expert_ids", got, says)
    yield Case("Q11", cast("hidden", np.uint8), DTypeError, "hidden", "uint8", "dequantize")
    half = cast("hidden", np.float16)
    yield Case("Q12", half, UnsupportedError, "hidden", "float16", "convert to bfloat16")
    yield Case("Q12-f32", cast("hidden", np.float32), DTypeError, "hidden", "float32", "bfloat16")
    got, says = rf"\({EXPERTS}, {n - 8}\)", rf"\(E, N\) = \(4, {n}\)"
    yield Case("bias", narrow("bias", n - 8), ShapeError, "bias", got, says)
    yield Case("bias-E", shorter("bias"), ShapeError, "bias", rf"\(3, {n}\)", says)
    yield Case("bias-f32", cast("bias", np.float32), DTypeError, "bias", "float32", "bfloat16")
    got = rf"\({ROWS - 1}, {n}\)"
    yield Case("M21", shorter("out"), ShapeError, "out", got, r"\(M, N\)")


def w4a16_cases() -> Iterator[Case]:
    """Weights and scales of another format or layout."""
    arguments = VALID[W4A16]()
    n, width = arguments["weight"].shape[1:]
    for dtype in (BF16, named_dtype("float8_e4m3fn")):
        change, got = cast("weight", dtype), dtype.name
        yield Case(f"M3-{got}", change, DTypeError, "weight", got, "packed e2m1 codes of mxfp4")
    arg = "b_scales"
    e4m3 = remake(arg, lambda x: x.view(named_dtype("float8_e4m3fn")))
    yield Case("K2", e4m3, DTypeError, arg, "float8_e4m3fn", "e8m0 scale bytes")
    one = remake(arg, lambda x: x[0].copy())
    yield Case("M7", one, ShapeError, arg, r"shape \(1, 1, 32, 4, 4\)", r"\(E, ceil\(N/128\)")
    plain = remake(arg, lambda x: deinterleave_scales(x.view(np.uint8), n, 2 * width // 32))
    yield Case("M8", plain, LayoutError, arg, "row-major scales", "prepare_weight_scales")
    for name, axis in (("down", 1), ("across", 2)):
        change = remake(arg, lambda x, axis=axis: np.concatenate([x, x], axis=axis))
        yield Case(f"M9-{name}", change, ShapeError, arg, r"shape \(4, ", "blocks of 32")
    got, says = "NaN byte 0xff for expert 2, row 33, block 1", "e8m0 scales below 0xff"
    yield Case("M12", scale_byte(2, 33, 1, 0xFF), ScaleError, arg, got, says)


TABLE = {RAGGED: cases(RAGGED, 8), W4A16: (*cases(W4A16, 32), *w4a16_cases())}


@pytest.mark.parametrize(("entry", "case"), table(TABLE))
def test_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)


HINTED = [entry for entry in VALID if "estimated_total_m" in VALID[entry]()]


def hint_cases() -> Iterator[Case]:
    """Hints that are no int >= 0; M19, a wrong one, is legal."""
    arg = "estimated_total_m"
    yield Case("M18", put(estimated_total_m=-1), RangeError, arg, "-1", r"\[0, ")
    yield Case("M18-large", put(estimated_total_m=2**31), RangeError, arg, "2147483648")
    yield Case("M18-float", put(estimated_total_m=64.0), ArgTypeError, arg, r"float 64\.0", "int")
    yield Case("M18-bool", put(estimated_total_m=True), ArgTypeError, arg, "bool True", "int")
    yield Case("M18-str", put(estimated_total_m="64"), ArgTypeError, arg, "str '64'", "int")


@pytest.mark.parametrize(("entry", "case"), table({entry: hint_cases() for entry in HINTED}))
def test_hint_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)
