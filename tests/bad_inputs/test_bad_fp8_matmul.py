"""P10: bad operands of the FP8 matmuls (table M)."""

from collections.abc import Iterator

import numpy as np
import pytest

from nbmoe.errors import ArgTypeError, DTypeError, RoutingError, ScaleError, ShapeError
from nbmoe.layouts import ceil_div
from nbmoe.operand import named_dtype
from tests.bad_inputs.case import (
    Case,
    Recorder,
    both,
    cast,
    check,
    edit,
    narrow,
    put,
    remake,
    shorter,
    table,
)
from tests.bad_inputs.sizes import EXPERTS, ROWS, TOKENS
from tests.bad_inputs.valid import VALID, Arguments

BLOCK = [f"grouped_dynamic_scaled_fp8_matmul:{t}" for t in ("float32", "bfloat16")]
ROW, TENSOR = (f"grouped_rowwise_dynamic_scaled_fp8_matmul:{t}" for t in ("row", "tensor"))
GROUPED, BATCHED = (*BLOCK, ROW, TENSOR), "batched_dynamic_scaled_fp8_matmul"
BF16, E8M0 = named_dtype("bfloat16"), named_dtype("float8_e8m0fnu")


def fewer_experts(arguments: Arguments) -> None:
    """Fewer experts than slots."""
    for name in ("weight", "b_scales", "bias"):
        arguments[name] = arguments[name][:-1].copy()


def a_slot_less(arguments: Arguments) -> None:
    """Three experts and three slots, one of them of the fourth expert."""
    fewer_experts(arguments)
    for name in ("expert_start", "expert_ids"):
        arguments[name] = arguments[name][:-1].copy()
    arguments["expert_ids"][2] = 3


def grouped_cases(entry: str) -> Iterator[Case]:
    """Activations and weights that do not fit each other."""
    n, k = VALID[entry]()["weight"].shape[1:]
    got = rf"\(4, {n}, {k - 8}\)"
    yield Case("M1", narrow("weight", k - 8), ShapeError, "weight", got, f"K = {k}")
    for row, width in (("Q8", 12), ("Q9", 0)):
        change = both(narrow("hidden", width), narrow("weight", width))
        says = "K > 0 and K % 8 == 0.*pad K"
        yield Case(row, change, ShapeError, "hidden", f"K = {width}", says)
    change = remake("weight", lambda x: x.swapaxes(1, 2).copy())
    yield Case("M2", change, ShapeError, "weight", rf"\(4, {k}, {n}\)", "K-major")
    for row, rows in (("M5", 0), ("M6", 12)):
        change = remake("weight", lambda x, rows=rows: x[:, :rows].copy())
        yield Case(row, change, ShapeError, "weight", f"N = {rows}", "N > 0 and N % 8 == 0")
    change = remake("weight", lambda x: x[:0].copy())
    yield Case("E0", change, ShapeError, "weight", r"\(0,", "E >= 1")
    yield Case("M4-slots", fewer_experts, ShapeError, "weight", "3 entries", "4 slots")
    got, says = r"expert_ids\[2\] = 3", "below 3, the experts of weight"
    yield Case("M4", a_slot_less, RoutingError, "expert_ids", got, says)
    for arg in ("hidden", "weight"):
        yield Case(f"M3-{arg}", cast(arg, BF16), DTypeError, arg, "bfloat16", "e4m3 codes")
        e5m2 = remake(arg, lambda x: x.view(named_dtype("float8_e5m2")))
        yield Case(f"M3-{arg}-e5m2", e5m2, DTypeError, arg, "float8_e5m2", "e4m3 codes")
    got, says = rf"\({EXPERTS}, {n - 8}\)", rf"\(E, N\) = \(4, {n}\)"
    yield Case("bias", narrow("bias", n - 8), ShapeError, "bias", got, says)
    yield Case("bias-f32", cast("bias", np.float32), DTypeError, "bias", "float32", "bfloat16")
    yield Case("M21", shorter("out"), ShapeError, "out", rf"\({ROWS - 1}, {n}\)", r"\(M, N\)")
    yield Case("early", put(routed_before=1), ArgTypeError, "routed_before", "int 1", "a bool")


@pytest.mark.parametrize(
    ("entry", "case"), table({entry: grouped_cases(entry) for entry in GROUPED})
)
def test_operands_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)


def batched_cases() -> Iterator[Case]:
    """Batches that do not fit each other."""
    arguments = VALID[BATCHED]()
    n, k = arguments["b"].shape[1:]
    yield Case("M1", narrow("b", k - 8), ShapeError, "b", rf"\(4, {n}, {k - 8}\)", f"K = {k}")
    yield Case("M1-B", shorter("b"), ShapeError, "b", rf"\(3, {n}, {k}\)", "B = 4")
    for row, width in (("Q8", 12), ("Q9", 0)):
        change = both(narrow("a", width), narrow("b", width))
        yield Case(row, change, ShapeError, "a", f"K = {width}", "K % 8 == 0.*pad K")
    for row, rows in (("M5", 0), ("M6", 12)):
        change = remake("b", lambda x, rows=rows: x[:, :rows].copy())
        yield Case(row, change, ShapeError, "b", f"N = {rows}", "N > 0 and N % 8 == 0")
    change = remake("out", lambda x: x[:, :-1].copy())
    yield Case("M21", change, ShapeError, "out", rf"\(4, {TOKENS - 1}, {n}\)", r"\(B, M, N\)")

    def many(arguments: Arguments) -> None:
        for name in ("a", "b"):
            arguments[name] = np.zeros((65536, 1 if name == "a" else 8, 8), np.uint8)

    yield Case("grid", many, ShapeError, "a", "B = 65536", "B <= 65535")


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in batched_cases()])
def test_batches_refused(case: Case, recorder: Recorder) -> None:
    check(BATCHED, case, recorder)


def type_cases(entry: str) -> Iterator[Case]:
    """Scales of another type, of two types, and weight scales that are none."""
    arguments = VALID[entry]()
    scales = arguments["b_scales"]
    is_f32 = scales.dtype == np.float32
    other = BF16 if is_f32 else np.float32
    got, says = np.dtype(other).name, f"the type of a_scales, {scales.dtype.name}"
    yield Case("M14", cast("b_scales", other), DTypeError, "b_scales", got, says)
    for arg in ("a_scales", "b_scales"):
        yield Case(f"M14-{arg}", cast(arg, np.float16), DTypeError, arg, "float16", "or bfloat16")
        says = r"float32 \(or bfloat16\)"
        yield Case(f"M9-{arg}-e8m0", cast(arg, E8M0), DTypeError, arg, "float8_e8m0fnu", says)
    at = (1, *(0,) * (scales.ndim - 1))
    words = {"nan": "0x7fc0", "inf": "0x7f80", "-inf": "0xff80", "-1": "0xbf80"}
    for value, word in words.items():
        got = rf"bits {word}{'0000' if is_f32 else ''} for expert 1, at \(1,"
        change = edit("b_scales", at, float(value))
        yield Case(f"M15-{value}", change, ScaleError, "b_scales", got, "finite scales >= 0")


@pytest.mark.parametrize(
    ("entry", "case"), table({entry: type_cases(entry) for entry in (*GROUPED, BATCHED)})
)
def test_scales_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)


def block_cases(entry: str) -> Iterator[Case]:
    """Scales a block in another order or of another block."""
    arguments = VALID[entry]()
    a_name, b_name = ("a", "b") if entry == BATCHED else ("hidden", "weight")
    m, k = arguments[a_name].shape[-2:]
    n = arguments[b_name].shape[1]
    down, across = ceil_div(n, 128), ceil_div(k, 128)
    arg = "a_scales"
    transposed = remake(arg, lambda x: x[..., :m].swapaxes(-1, -2).copy())
    hint = "scales of activations are transposed"
    yield Case("M7", transposed, ShapeError, arg, rf"{m}, {across}\)", hint)
    yield Case("M17", narrow(arg, m - 1), ShapeError, arg, rf"{m - 1}\)", f"Mpad >= M = {m}")
    one = remake(arg, lambda x: x[..., :1, :].copy())
    yield Case("M9-a", one, ShapeError, arg, r"1, \d+\)", rf"ceil\(K/128\).*{across}, Mpad")
    arg = "b_scales"
    says = rf"\({down}, {across}\) blocks"
    yield Case("M9", narrow(arg, 1), ShapeError, arg, rf"\(4, {down}, 1\)", says)
    yield Case("M13", shorter(arg), ShapeError, arg, rf"\(3, {down}, {across}\)", says)
    rows = remake(arg, lambda x: np.repeat(x, 128, axis=1)[:, :n].copy())
    yield Case("M9-rows", rows, ShapeError, arg, rf"\(4, {n}, {across}\)", says)
    many = remake(arg, lambda x: np.concatenate([x, x], axis=1))
    yield Case("M9-down", many, ShapeError, arg, rf"\(4, {2 * down}, {across}\)", says)


@pytest.mark.parametrize(
    ("entry", "case"), table({entry: block_cases(entry) for entry in (*BLOCK, BATCHED)})
)
def test_block_scales_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)


def row_cases(entry: str) -> Iterator[Case]:
    """Scales a row or a tensor of other lengths."""
    n = VALID[entry]()["weight"].shape[1]
    says = rf"\(M, 1\) or \(1, Mpad\) or \(1,\) with M = {ROWS}"
    for row, shape in (
        ("M17", (ROWS - 1, 1)),
        ("M17-wide", (1, ROWS - 1)),
        ("M17-vector", (ROWS,)),
        ("M17-long", (ROWS + 1, 1)),
        ("M17-square", (ROWS, 2)),
    ):
        got = r"shape \(" + ", ".join(map(str, shape))
        change = remake("a_scales", lambda x, shape=shape: np.ones(shape, x.dtype))
        yield Case(row, change, ShapeError, "a_scales", got, says)
    says = rf"\(E, N, 1\) or \(E, 1, 1\) or \(E,\) with E = 4, N = {n}"
    for row, shape in (
        ("M8", (EXPERTS, n - 8, 1)),
        ("M13", (EXPERTS - 1, n, 1)),
        ("M13-E", (EXPERTS - 1,)),
        ("M9", (EXPERTS, n, 2)),
        ("M7", (EXPERTS, 1, n)),
    ):
        got = r"shape \(" + ", ".join(map(str, shape))
        change = remake("b_scales", lambda x, shape=shape: np.ones(shape, x.dtype))
        yield Case(row, change, ShapeError, "b_scales", got, says)


@pytest.mark.parametrize(
    ("entry", "case"), table({entry: row_cases(entry) for entry in (ROW, TENSOR)})
)
def test_row_scales_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)
