"""P10: bad input of `route`, `moe_create_indices` and `moe_finalize` (table R)."""

import numpy as np
import pytest

from nbmoe.errors import (
    ArgTypeError,
    DTypeError,
    RangeError,
    RoutingError,
    ShapeError,
    UnsupportedError,
)
from tests.bad_inputs.case import Case, Recorder, check, edit, params, put, remake
from tests.bad_inputs.valid import EXPERTS, HIDDEN, ROWS, TOKENS, Arguments

NAN, INF = np.float32("nan"), np.float32("inf")
FULL = {"validate": "full"}


def dropped_with_weight(arguments: Arguments) -> None:
    """A masked slot whose weight is not 0."""
    arguments["restore_token_order"][2 * 5 + 1] = 2**32 - 1


ROUTE = [
    Case("R1", put(top_k=0), RangeError, "top_k", "0", r"\[1, 4\]"),
    Case("R2", put(top_k=EXPERTS + 1), RangeError, "top_k", "5", r"\[1, 4\]"),
    Case("R3-bool", put(top_k=True), ArgTypeError, "top_k", "bool True"),
    Case("R3-float", put(top_k=2.0), ArgTypeError, "top_k", r"float 2\.0"),
    Case("R3-none", put(top_k=None), ArgTypeError, "top_k", "NoneType"),
    Case(
        "R4",
        remake("logits", lambda x: x.astype(np.int32)),
        DTypeError,
        "logits",
        "int32",
        "float32",
    ),
    Case(
        "R8",
        remake("logits", lambda x: x[:, :0].copy()),
        ShapeError,
        "logits",
        r"\(65, 0\)",
        "E >= 1",
    ),
    Case("R5", edit("logits", 7, NAN), RoutingError, "logits", "all NaN in row 7", extra=FULL),
    Case("R6", edit("logits", 9, -INF), RoutingError, "logits", "all -inf in row 9", extra=FULL),
    Case("renormalize", put(renormalize="yes"), ArgTypeError, "renormalize", "str 'yes'"),
]
CREATE = [
    Case(
        "R9",
        remake("topk_ids", lambda x: x.astype(np.int64)),
        DTypeError,
        "topk_ids",
        "int64",
        "int32",
    ),
    Case(
        "R10",
        edit("topk_ids", (3, slice(None)), 2),
        RoutingError,
        "topk_ids",
        r"topk_ids\[3\] = \[2, 2\]",
        "different experts",
    ),
    Case(
        "R10-0",
        edit("topk_ids", (5, slice(None)), 0),
        RoutingError,
        "topk_ids",
        r"\[5\] = \[0, 0\]",
    ),
    Case(
        "R11",
        edit("topk_ids", (4, 1), EXPERTS),
        RoutingError,
        "topk_ids",
        r"topk_ids\[4, 1\] = 4",
        "num_experts = 4",
    ),
    Case("R12", edit("topk_ids", (0, 0), -2), RoutingError, "topk_ids", r"topk_ids\[0, 0\] = -2"),
    Case("R8", put(num_experts=0), RangeError, "num_experts", "0"),
    Case("R8-bool", put(num_experts=True), ArgTypeError, "num_experts", "bool True"),
    Case("R8-float", put(num_experts=4.0), ArgTypeError, "num_experts", r"float 4\.0"),
    Case("R7", put(num_experts=4096), UnsupportedError, "num_experts", "4096", "at most"),
]
FINALIZE = [
    Case(
        "R13",
        remake("weights", lambda x: x[:, 0].copy()),
        ShapeError,
        "weights",
        r"\(65,\)",
        r"\(T, k\)",
    ),
    Case("R1", remake("weights", lambda x: x[:, :0].copy()), ShapeError, "weights", "k = 0"),
    Case(
        "R15",
        remake("restore_token_order", lambda x: x[:-1].copy()),
        ShapeError,
        "restore_token_order",
        r"\(129,\)",
        r"\(130,\)",
    ),
    Case(
        "R9",
        remake("restore_token_order", lambda x: x.astype(np.int64)),
        DTypeError,
        "restore_token_order",
        "int64",
    ),
    Case(
        "H12",
        remake("down", lambda x: x[:, :12].copy()),
        ShapeError,
        "down",
        "H = 12",
        "H % 8 == 0",
    ),
    Case("H0", remake("down", lambda x: x[:, :0].copy()), ShapeError, "down", "H = 0"),
    Case(
        "R16",
        lambda a: a["restore_token_order"].__setitem__(9, a["restore_token_order"][4]),
        RoutingError,
        "restore_token_order",
        r"restore_token_order\[4\] = restore_token_order\[9\]",
        "permutation",
    ),
    Case(
        "R17",
        edit("restore_token_order", 11, ROWS),
        RoutingError,
        "restore_token_order",
        r"restore_token_order\[11\] = 130",
        "below 130",
    ),
    Case(
        "R14",
        edit("weights", (6, 1), NAN),
        RangeError,
        "weights",
        r"weights\[6, 1\] = nan",
        extra=FULL,
    ),
    Case(
        "R18",
        dropped_with_weight,
        RoutingError,
        "weights",
        r"weights\[5, 1\] = 0\.",
        "masked",
        FULL,
    ),
    Case(
        "M21",
        remake("out", lambda o: o[:-1].copy()),
        ShapeError,
        "out",
        rf"\({TOKENS - 1}, {HIDDEN}\)",
    ),
]


@pytest.mark.parametrize("case", params(ROUTE))
def test_route_refused(case: Case, recorder: Recorder) -> None:
    check("route", case, recorder)


@pytest.mark.parametrize("case", params(CREATE))
def test_create_indices_refused(case: Case, recorder: Recorder) -> None:
    check("moe_create_indices", case, recorder)


@pytest.mark.parametrize("case", params(FINALIZE))
def test_finalize_refused(case: Case, recorder: Recorder) -> None:
    check("moe_finalize", case, recorder)
