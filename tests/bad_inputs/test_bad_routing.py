"""P10: bad input of the router, of what moves rows, and of the combination (table R)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nbmoe.errors import (
    ArgTypeError,
    ConfigError,
    DTypeError,
    RangeError,
    RoutingError,
    ShapeError,
    UnsupportedError,
)
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
    without,
)
from tests.bad_inputs.sizes import EXPERTS, HIDDEN, ROWS, TOKENS, TOP_K
from tests.bad_inputs.valid import Arguments

SOFTMAX, SIGMOID = "route:softmax", "route:sigmoid"
NAN, INF = np.float32("nan"), np.float32("inf")
BF16 = named_dtype("bfloat16")
FULL = {"validate": "full"}
NOT_INTS: tuple[tuple[Any, str], ...] = (
    (True, "bool True"),
    (2.0, r"float 2\.0"),
    (None, "NoneType None"),
    ("2", "str '2'"),
)


def not_ints(row: str, arg: str) -> Iterator[Case]:
    """What is no int where one is needed."""
    for value, got in NOT_INTS:
        yield Case(f"{row}-{arg}-{value}", put(**{arg: value}), ArgTypeError, arg, got, "an int in")


def logits_cases() -> Iterator[Case]:
    """Logits and biases of another size or type, and rows without a largest logit."""
    yield Case("R4", cast("logits", np.int32), DTypeError, "logits", "int32", "float32")
    yield Case("R4-bf16", cast("logits", BF16), DTypeError, "logits", "bfloat16", "float32")
    no_experts = narrow("logits", 0)
    yield Case("R8", no_experts, ShapeError, "logits", r"\(65, 0\)", "E >= 1")
    many = put(logits=np.zeros((TOKENS, 4096), np.float32))
    yield Case("R7", many, UnsupportedError, "logits", "E = 4096", "at most 1024 experts")
    yield Case("R5", edit("logits", 7, NAN), RoutingError, "logits", "all NaN in row 7", extra=FULL)
    flat = edit("logits", 9, -INF)
    yield Case("R6", flat, RoutingError, "logits", "all -inf in row 9", extra=FULL)
    yield Case("R19", shorter("bias"), ShapeError, "bias", r"\(3,\)", r"\(E,\) = \(4,\)")


def top_k_cases() -> Iterator[Case]:
    """Numbers of experts that there are not, and options of another type."""
    yield Case("R1", put(top_k=0), RangeError, "top_k", "0", r"\[1, 4\]")
    yield Case("R1-minus", put(top_k=-1), RangeError, "top_k", "-1", r"\[1, 4\]")
    yield Case("R2", put(top_k=EXPERTS + 1), RangeError, "top_k", "5", r"\[1, 4\]")
    yield from not_ints("R3", "top_k")
    yield from not_ints("R3", "num_parts")
    parts = put(num_parts=3)
    yield Case("parts", parts, ShapeError, "logits", "columns = 4", "columns % 3 == 0")
    for value in (0, -2):
        yield Case(f"parts{value}", put(num_parts=value), RangeError, "num_parts", str(value))
    for arg in ("renormalize", "shared_slot"):
        for value, got in (("yes", "str 'yes'"), (None, "NoneType None"), (1, "int 1")):
            yield Case(f"{arg}-{value}", put(**{arg: value}), ArgTypeError, arg, got, "a bool")
    arg = "routed_scaling_factor"
    for value in (0.0, -1.0, float("nan"), float("inf"), 1e39, 1e-60):
        got = str(value).replace("+", r"\+")
        yield Case(f"{arg}-{value}", put(**{arg: value}), RangeError, arg, got, "finite float32")
    for value, got in ((None, "NoneType"), (True, "bool True"), ("1", "str '1'")):
        yield Case(f"{arg}-{got}", put(**{arg: value}), ArgTypeError, arg, got, "a number")
    for value in (None, 1):
        change, says = put(scoring=value), "'softmax', "
        yield Case(f"scoring-{value}", change, ArgTypeError, "scoring", str(value), says)
    change = put(scoring="topk")
    yield Case("scoring", change, ConfigError, "scoring", "'topk'", "'softmax', .*'sigmoid'")


def softmax_cases() -> Iterator[Case]:
    """What only a router by sigmoids takes."""
    says = "only 'sigmoid' chooses by more than logits"
    correction = put(correction_bias=np.zeros(EXPERTS, np.float32))
    yield Case("correction", correction, ConfigError, "correction_bias", "an array", says)
    yield Case("groups", put(n_groups=2), ConfigError, "n_groups", "2", says)
    change = put(scoring="none")
    yield Case("none", change, ConfigError, "renormalize", "True", "no meaningful sum")


def sigmoid_cases() -> Iterator[Case]:
    """Groups that do not divide the experts or hold too few, and weights without a sum."""
    short = shorter("correction_bias")
    yield Case("R19-correction", short, ShapeError, "correction_bias", r"\(3,\)", r"\(4,\)")
    for arg in ("n_groups", "topk_group"):
        yield from not_ints("groups", arg)
        yield Case(f"{arg}-0", put(**{arg: 0}), RangeError, arg, "0", r"\[1, ")
    yield Case("groups-33", put(n_groups=33), RangeError, "n_groups", "33", r"\[1, 32\]")
    yield Case("topk_group-3", put(topk_group=3), RangeError, "topk_group", "3", r"\[1, 2\]")
    for value in (3, 4):
        change = put(n_groups=value, topk_group=1)
        says = "a divisor of E = 4 with at least 2 experts a group"
        yield Case(f"groups-{value}", change, ConfigError, "n_groups", str(value), says)
    few = both(put(topk_group=1, top_k=3), without("out"))
    yield Case("R2-group", few, RangeError, "top_k", "3", "at most 2, the experts of topk_group")

    def no_sum(arguments: Arguments) -> None:
        arguments["logits"][6] = -200

    got, says = "only 0 in row 6", "sum is not 0"
    yield Case("R20", no_sum, RangeError, "logits", got, says, FULL)


ROUTE = {
    SOFTMAX: (*logits_cases(), *top_k_cases(), *softmax_cases()),
    SIGMOID: (*logits_cases(), *top_k_cases(), *sigmoid_cases()),
}


@pytest.mark.parametrize(("entry", "case"), table(ROUTE))
def test_route_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)


def router_logits_cases() -> Iterator[Case]:
    """Tokens and gates whose sizes do not fit."""
    for name, columns in (("H12", 12), ("H0", 0), ("H7", 7)):
        change = both(narrow("x", columns), narrow("weight", columns))
        yield Case(name, change, ShapeError, "x", f"H = {columns}", "H % 8 == 0.*pad H")
    narrower = narrow("weight", 64)
    yield Case("M1", narrower, ShapeError, "weight", r"\(4, 64\)", "H = 80, that of x")
    no_experts = remake("weight", lambda x: x[:0].copy())
    yield Case("R8", no_experts, ShapeError, "weight", "E = 0", "E > 0")
    for arg in ("x", "weight"):
        half, says = cast(arg, np.float16), "convert to bfloat16"
        yield Case(f"Q12-{arg}", half, UnsupportedError, arg, "float16", says)
        yield Case(f"Q12-{arg}-f32", cast(arg, np.float32), DTypeError, arg, "float32", "bfloat16")
    yield Case("M21", shorter("out"), ShapeError, "out", r"\(64, 4\)", r"\(T, E\)")
    yield Case("M20", cast("out", BF16), DTypeError, "out", "bfloat16", "float32")


def create_cases() -> Iterator[Case]:
    """Chosen experts that there are not, or that a token chose twice."""
    arg = "topk_ids"
    yield Case("R9", cast(arg, np.int64), DTypeError, arg, "int64", "int32")
    yield Case("R9-u32", cast(arg, np.uint32), DTypeError, arg, "uint32", r"\.view\('int32'\)")
    twice = edit(arg, (3, slice(None)), 2)
    got, says = r"topk_ids\[3\] = \[2, 2\]", "different experts"
    yield Case("R10", twice, RoutingError, arg, got, says)
    yield Case("R10-0", edit(arg, (5, slice(None)), 0), RoutingError, arg, r"\[5\] = \[0, 0\]")
    got, says = r"topk_ids\[4, 1\] = 4", "num_experts = 4"
    yield Case("R11", edit(arg, (4, 1), EXPERTS), RoutingError, arg, got, says)
    got = r"topk_ids\[0, 0\] = -2"
    yield Case("R12", edit(arg, (0, 0), -2), RoutingError, arg, got, "-1 or ids")
    flat = both(edit(arg, (4, 1), EXPERTS), remake(arg, lambda x: x.reshape(-1)))
    yield Case("R11-flat", flat, RoutingError, arg, r"topk_ids\[9\] = 4", "num_experts = 4")
    arg = "num_experts"
    for value in (0, -1):
        yield Case(f"R8{value}", put(num_experts=value), RangeError, arg, str(value), r"\[1, ")
    yield from not_ints("R8", arg)
    yield Case("R7", put(num_experts=4096), UnsupportedError, arg, "4096", "at most")


def gather_cases() -> Iterator[Case]:
    """Orders that point beyond the input, and weights of another shape."""
    for name, columns in (("K12", 12), ("K0", 0)):
        yield Case(name, narrow("input", columns), ShapeError, "input", f"K = {columns}", "K % 8")
    got, says = rf"order\[9\] = {ROWS}", f"order // 2 < {TOKENS}, the rows of input"
    yield Case("G23", edit("order", 9, ROWS), RoutingError, "order", got, says)
    got = r"order\[7\] = 4294967294"
    yield Case("G22", edit("order", 7, 2**32 - 2), RoutingError, "order", got, "0xFFFFFFFF")
    yield Case("G22-i32", cast("order", np.int32), DTypeError, "order", "int32", "uint32")
    yield Case("G24", put(divisor=0), RangeError, "divisor", "0", r"\[1, ")
    yield Case("G25", put(divisor=-1), RangeError, "divisor", "-1", r"\[1, ")
    yield from not_ints("G25", "divisor")
    says = r"\(R, divisor\) = \(65, 2\)"
    yield Case("R13", narrow("weights", 1), ShapeError, "weights", r"\(65, 1\)", says)
    yield Case("R13-rows", shorter("weights"), ShapeError, "weights", r"\(64, 2\)", says)
    flat = remake("weights", lambda x: x.reshape(-1))
    yield Case("R13-flat", flat, ShapeError, "weights", r"\(130,\)", r"\(R, divisor\)")
    yield Case("M21", shorter("out"), ShapeError, "out", r"\(129, 40\)", r"\(M, K\)")


def finalize_cases() -> Iterator[Case]:
    """Weights, orders and rows that do not fit each other."""
    flat = remake("weights", lambda x: x[:, 0].copy())
    yield Case("R13", flat, ShapeError, "weights", r"\(65,\)", r"\(T, k\)")
    yield Case("R1", narrow("weights", 0), ShapeError, "weights", "k = 0", "k > 0")
    arg = "restore_token_order"
    yield Case("R15", shorter(arg), ShapeError, arg, r"\(129,\)", r"\(130,\)")
    yield Case("R9", cast(arg, np.int64), DTypeError, arg, "int64", "uint32")
    yield Case("R9-i32", cast(arg, np.int32), DTypeError, arg, "int32", r"\.view\('uint32'\)")
    for name, columns in (("H12", 12), ("H0", 0)):
        yield Case(name, narrow("down", columns), ShapeError, "down", f"H = {columns}", "H % 8")
    got = rf"{arg}\[4\] = {arg}\[9\]"
    twice = remake(arg, lambda x: np.concatenate([x[:9], x[4:5], x[10:]]))
    yield Case("R16", twice, RoutingError, arg, got, "a permutation")
    got = rf"{arg}\[11\] = {ROWS}"
    yield Case("R17", edit(arg, 11, ROWS), RoutingError, arg, got, f"below {ROWS}")
    fewer = remake("down", lambda x: x[:100].copy())
    yield Case("R17-rows", fewer, RoutingError, arg, rf"{arg}\[", "below 100, the rows of down")
    got = r"weights\[6, 1\] = nan"
    yield Case("R14", edit("weights", (6, 1), NAN), RangeError, "weights", got, "no NaN", FULL)
    dropped = edit(arg, TOP_K * 5 + 1, 2**32 - 1)
    got = r"weights\[5, 1\] = \d"
    yield Case("R18", dropped, RoutingError, "weights", got, "masked", FULL)
    got = rf"\({TOKENS - 1}, {HIDDEN}\)"
    yield Case("M21", shorter("out"), ShapeError, "out", got, r"\(T, H\)")
    says = rf"\(T, H\) = \(65, {HIDDEN}\)"
    yield Case("shared", shorter("shared"), ShapeError, "shared", got, says)
    wide = remake("shared", lambda x: np.concatenate([x, x], axis=1))
    yield Case("shared-H", wide, ShapeError, "shared", rf"\(65, {2 * HIDDEN}\)", says)


TABLE = {
    "router_logits": router_logits_cases(),
    "moe_create_indices": create_cases(),
    "gather_rows": gather_cases(),
    "moe_finalize": finalize_cases(),
}


@pytest.mark.parametrize(("entry", "case"), table(TABLE))
def test_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)
