"""P10: bad input of `grouped_quantize_dynamic_block_scaled` (tables Q and G)."""

from collections.abc import Callable

import numpy as np
import pytest

from nbmoe.errors import (
    ArgTypeError,
    DTypeError,
    RangeError,
    RoutingError,
    ScaleError,
    ShapeError,
    UnsupportedError,
)
from tests.bad_inputs.case import Case, Recorder, check, edit, params, put, remake
from tests.bad_inputs.valid import EXPERTS, HIDDEN, ROWS, TILES, TOKENS, Arguments

API = "grouped_quantize_dynamic_block_scaled"
NAN, INF = np.float32("nan"), np.float32("inf")


def without_gather(arguments: Arguments) -> None:
    """Leaves the routing as it is but takes the gather away: 130 rows of 65."""
    del arguments["indices"], arguments["out"]


def without_gather_and_with_end(end: int) -> Callable[[Arguments], None]:
    """Row offsets that claim `end` rows."""

    def change(arguments: Arguments) -> None:
        without_gather(arguments)
        arguments["row_offsets"][-1] = end

    return change


def fewer_indices(arguments: Arguments) -> None:
    """One index less than there are routed rows; outputs are sized by the indices."""
    arguments["indices"] = arguments["indices"][:-1].copy()
    del arguments["out"]


def columns(k: int) -> Case:
    """An input of `k` columns."""
    change = remake("input", lambda x: np.zeros((TOKENS, k), x.dtype))
    return Case(f"Q8-K{k}", change, ShapeError, "input", f"K = {k}", "K % 16 == 0")


NUMBERS = [
    Case("Q1", put(sf_vector_size=0), RangeError, "sf_vector_size", "0"),
    Case("Q2", put(sf_vector_size=-16), RangeError, "sf_vector_size", "-16"),
    Case("Q3", put(sf_vector_size=24), UnsupportedError, "sf_vector_size", "24", "16"),
    Case("Q5", put(sf_vector_size=32), UnsupportedError, "sf_vector_size", "32", "NVFP4"),
    Case("Q6", put(sf_vector_size=16.0), ArgTypeError, "sf_vector_size", r"float 16\.0"),
    Case("Q7", put(sf_vector_size=True), ArgTypeError, "sf_vector_size", "bool True"),
    Case("G24", put(indices_divisor=0), RangeError, "indices_divisor", "0"),
    Case("G25", put(indices_divisor=-1), RangeError, "indices_divisor", "-1"),
    Case("G25-float", put(indices_divisor=2.0), ArgTypeError, "indices_divisor", r"float 2\.0"),
]
SHAPES = [
    columns(40),
    columns(0),
    columns(31),
    Case(
        "Q11",
        remake("input", lambda x: np.zeros(x.shape, np.uint8)),
        DTypeError,
        "input",
        "uint8",
        "dequantize",
    ),
    Case(
        "Q12", remake("input", lambda x: x.astype(np.float16)), UnsupportedError, "input", "float16"
    ),
    Case(
        "Q12-f32", remake("input", lambda x: x.astype(np.float32)), DTypeError, "input", "float32"
    ),
    Case(
        "G1",
        remake("row_offsets", lambda x: x[:-1].copy()),
        ShapeError,
        "row_offsets",
        r"\(4,\)",
        r"S \+ 1",
    ),
    Case(
        "G2",
        remake("row_offsets", lambda x: x.astype(np.int64)),
        DTypeError,
        "row_offsets",
        "int64",
        "uint32",
    ),
    Case(
        "G2-i32",
        remake("row_offsets", lambda x: x.astype(np.int32)),
        DTypeError,
        "row_offsets",
        "int32",
        r"\.view\('uint32'\)",
    ),
    Case(
        "G7",
        remake("expert_ids", lambda x: x[:-1].copy()),
        ShapeError,
        "row_offsets",
        r"\(5,\)",
        "S from expert_ids",
    ),
    Case(
        "G7-none", remake("expert_ids", lambda x: x[:0].copy()), ShapeError, "expert_ids", r"\(0,\)"
    ),
    Case(
        "G12",
        remake("expert_ids", lambda x: x.astype(np.uint32)),
        DTypeError,
        "expert_ids",
        "uint32",
        "-1 masks",
    ),
    Case(
        "G13",
        remake("scales_offsets", lambda x: np.append(x, x[-1:])),
        ShapeError,
        "scales_offsets",
        r"\(5,\)",
    ),
    Case("G16", put(scales_offsets=None), ScaleError, "scales_offsets", "None"),
    Case("G17", put(sf_tensor=None), ScaleError, "sf_tensor", "None"),
    Case("G18", remake("sf_tensor", lambda x: x[:-1].copy()), ShapeError, "sf_tensor", "3 entries"),
    Case(
        "G21",
        remake("sf_tensor", lambda x: x.astype(np.float64)),
        DTypeError,
        "sf_tensor",
        "float64",
    ),
    Case(
        "G22-i32", remake("indices", lambda x: x.astype(np.int32)), DTypeError, "indices", "int32"
    ),
    Case(
        "Q21",
        remake("out", lambda o: (o[0], np.zeros((TILES - 1, 2, 32, 4, 4), np.uint8))),
        ShapeError,
        "out[1]",
        r"\(5, 2",
        r"ceil\(rows/128\) \+ min\(S, rows\)",
    ),
    Case(
        "Q20",
        remake("out", lambda o: (np.zeros((ROWS, HIDDEN), np.uint8), o[1])),
        ShapeError,
        "out[0]",
        r"\(130, 80\)",
        "K/2",
    ),
]
ROUTING = [
    Case("G3", edit("row_offsets", 0, 5), RoutingError, "row_offsets", "5", "== 0"),
    Case(
        "G4",
        edit("row_offsets", 3, 2),
        RoutingError,
        "row_offsets",
        r"row_offsets\[2\] = 3, row_offsets\[3\] = 2",
        "ascending",
    ),
    Case("G5", without_gather, RoutingError, "row_offsets", "130", "<= 65, the rows of input"),
    Case("G6", without_gather_and_with_end(2**32 - 1), RoutingError, "row_offsets", "4294967295"),
    Case(
        "G8",
        edit("expert_ids", 1, EXPERTS),
        RoutingError,
        "expert_ids",
        r"expert_ids\[1\] = 4",
        "below 4",
    ),
    Case("G9", edit("expert_ids", 2, -2), RoutingError, "expert_ids", r"expert_ids\[2\] = -2"),
    Case(
        "G10",
        edit("expert_ids", 3, 0),
        RoutingError,
        "expert_ids",
        r"expert_ids\[0\] = expert_ids\[3\] = 0",
        "one slot",
    ),
    Case(
        "G14",
        edit("scales_offsets", 2, 0),
        RoutingError,
        "scales_offsets",
        r"tiles 1\.\.1 for slot 1, from 0 for slot 2",
        "sum over j < e of ceil",
    ),
    Case(
        "G15",
        edit("scales_offsets", 3, 6),
        RoutingError,
        "scales_offsets",
        r"tiles 7\.\.8 for slot 3",
        "within the 6",
    ),
    Case(
        "G15-wrap",
        edit("scales_offsets", 3, 2**32 - 1),
        RoutingError,
        "scales_offsets",
        "for slot 3",
    ),
    Case(
        "G22", edit("indices", 7, 2**32 - 1), RoutingError, "indices", r"indices\[7\] = 4294967295"
    ),
    Case(
        "G23", edit("indices", 9, ROWS), RoutingError, "indices", r"indices\[9\] = 130", "// 2 < 65"
    ),
    Case("G26", fewer_indices, ShapeError, "indices", r"\(129,\)", "130"),
]
SCALES = [
    Case(
        f"{row}-{value}",
        edit("sf_tensor", 3, value),
        ScaleError,
        "sf_tensor",
        rf"sf_tensor\[3\] = {value} for expert 3",
        "missing",
    )
    for row, value in (("G19", 0.0), ("Q16", -2.0), ("G20", NAN), ("G20", INF), ("G20", -INF))
]


@pytest.mark.parametrize("case", params(NUMBERS + SHAPES + ROUTING + SCALES))
def test_refused(case: Case, recorder: Recorder) -> None:
    check(API, case, recorder)
