"""P10: bad input of both grouped matmuls (tables G, M, S and W)."""

import ml_dtypes
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
from nbmoe.layouts import ceil_div, deinterleave_scales, interleave_scales
from tests.bad_inputs.case import Case, Recorder, check, edit, params, put, remake
from tests.bad_inputs.valid import EXPERTS, HIDDEN, MOE_DIM, ROWS, TILES, VALID, Arguments

MATMUL = "grouped_matmul_block_scaled"
SWIGLU = "grouped_matmul_blocked_swiglu"
NAN, INF = np.float32("nan"), np.float32("inf")


def shorter(name: str) -> object:
    return remake(name, lambda x: x[:-1].copy())


def plain_scales(arguments: Arguments) -> None:
    """Weight scales as checkpoints store them, not in tiles."""
    _, n, packed = arguments["weight"].shape
    arguments["b_scales"] = deinterleave_scales(arguments["b_scales"], n, packed // 8)


def group_of_32(arguments: Arguments) -> None:
    """Weight scales in tiles, one for 32 elements."""
    experts, n, packed = arguments["weight"].shape
    arguments["b_scales"] = interleave_scales(
        np.full((experts, n, ceil_div(packed, 16)), 0x38, np.uint8)
    )


def scale_byte(expert: int, row: int, block: int, byte: int) -> object:
    """Overwrites one used weight scale."""

    def change(arguments: Arguments) -> None:
        at = (expert, row // 128, block // 4, row % 32, row % 128 // 32, block % 4)
        arguments["b_scales"][at] = byte

    return change


def too_few_rows(arguments: Arguments) -> None:
    """Row offsets that reach beyond hidden."""
    arguments["expert_start"][-1] = ROWS + 1


def fewer_experts(arguments: Arguments) -> None:
    """Three experts and three slots, one of them of the fourth expert."""
    names = ("weight", "b_scales", "expert_scales", "expert_ids", "expert_start", "a_scale_offsets")
    for name in names:
        arguments[name] = arguments[name][:-1].copy()
    arguments["expert_ids"][2] = 3


def shorter_experts(arguments: Arguments) -> None:
    """Fewer experts than slots."""
    for name in ("weight", "b_scales", "expert_scales"):
        arguments[name] = arguments[name][:-1].copy()


def packed_k(api: str) -> int:
    return int(VALID[api]()["hidden"].shape[1])


def shape_cases(api: str) -> list[Case]:
    half = packed_k(api)
    n = VALID[api]()["weight"].shape[1]
    return [
        Case(
            "M1",
            remake("weight", lambda x: x[..., :-8].copy()),
            ShapeError,
            "weight",
            rf"\(4, {n}, {half - 8}\)",
            f"K/2 = {half}",
        ),
        Case(
            "M1-K40",
            remake("hidden", lambda x: x[..., :20].copy()),
            ShapeError,
            "hidden",
            "K = 40",
            "K % 16 == 0",
        ),
        Case("Q9", remake("hidden", lambda x: x[..., :0].copy()), ShapeError, "hidden", "K = 0"),
        Case(
            "M2",
            remake("weight", lambda x: x.swapaxes(1, 2).copy()),
            ShapeError,
            "weight",
            rf"\(4, {half}, {n}\)",
            "K-major",
        ),
        Case("M5", remake("weight", lambda x: x[:, :0].copy()), ShapeError, "weight", "N = 0"),
        Case(
            "M6",
            remake("weight", lambda x: x[:, :12].copy()),
            ShapeError,
            "weight",
            "N = 12",
            "N % 8 == 0",
        ),
        Case(
            "M7",
            remake("b_scales", lambda x: x[0].copy()),
            ShapeError,
            "b_scales",
            r"shape \(1, \d, 32, 4, 4\)",
            r"\(E, ceil\(N/128\)",
        ),
        Case("M8", plain_scales, LayoutError, "b_scales", "row-major scales", "interleave_scales"),
        Case(
            "M9-tiles",
            remake("b_scales", lambda x: np.concatenate([x, x], axis=2)),
            ShapeError,
            "b_scales",
            "shape",
            "blocks of 16",
        ),
        Case(
            "M13", shorter("expert_scales"), ShapeError, "expert_scales", r"\(3,\)", "E from weight"
        ),
        Case(
            "M14",
            remake("expert_scales", lambda x: x.astype(ml_dtypes.bfloat16)),
            DTypeError,
            "expert_scales",
            "bfloat16",
        ),
        Case(
            "M17",
            remake("a_scales", lambda x: x[:1].copy()),
            ShapeError,
            "a_scales",
            r"shape \(1,",
            "at least ceil",
        ),
        Case(
            "M17-columns",
            remake("a_scales", lambda x: np.concatenate([x, x], axis=1)),
            ShapeError,
            "a_scales",
            "shape",
        ),
        Case("M18", put(estimated_total_m=-1), RangeError, "estimated_total_m", "-1"),
        Case("M18-float", put(estimated_total_m=64.0), ArgTypeError, "estimated_total_m", "float"),
        Case("G1", shorter("expert_start"), ShapeError, "expert_start", r"\(4,\)"),
        Case("G7", shorter("expert_ids"), ShapeError, "expert_start", r"\(5,\)"),
        Case("G13", shorter("a_scale_offsets"), ShapeError, "a_scale_offsets", r"\(3,\)"),
        Case(
            "E0", remake("weight", lambda x: x[:0].copy()), ShapeError, "weight", r"\(0,", "E >= 1"
        ),
        Case("E3", remake("weight", lambda x: x[:3].copy()), ShapeError, "b_scales", r"shape \(4,"),
        Case("W5", shorter("a_row_scales"), ShapeError, "a_row_scales", r"\(129,\)"),
        Case(
            "W6",
            remake("a_row_scales", lambda x: x.astype(np.float32)),
            DTypeError,
            "a_row_scales",
            "float32",
            "bfloat16",
        ),
    ]


def data_cases(api: str) -> list[Case]:
    factor = [("M15", NAN), ("M15", INF), ("M15", np.float32(0)), ("M15", np.float32(-1))]
    return [
        Case("G3", edit("expert_start", 0, 1), RoutingError, "expert_start", "1", "== 0"),
        Case(
            "G4", edit("expert_start", 2, 1), RoutingError, "expert_start", r"expert_start\[2\] = 1"
        ),
        Case("G5", too_few_rows, RoutingError, "expert_start", "131", "rows of hidden"),
        Case(
            "G8",
            edit("expert_ids", 0, EXPERTS),
            RoutingError,
            "expert_ids",
            r"expert_ids\[0\] = 4",
            "of weight",
        ),
        Case("G9", edit("expert_ids", 0, -2), RoutingError, "expert_ids", r"expert_ids\[0\] = -2"),
        Case(
            "G10",
            edit("expert_ids", 0, 2),
            RoutingError,
            "expert_ids",
            r"expert_ids\[0\] = expert_ids\[2\] = 2",
        ),
        Case("G14", edit("a_scale_offsets", 2, 0), RoutingError, "a_scale_offsets", "slot 2"),
        Case(
            "G15",
            edit("a_scale_offsets", 3, TILES),
            RoutingError,
            "a_scale_offsets",
            "slot 3",
            f"within the {TILES}",
        ),
        Case(
            "M10",
            scale_byte(2, 33, 1, 0x7F),
            ScaleError,
            "b_scales",
            "NaN byte 0x7f for expert 2, row 33, block 1",
        ),
        Case(
            "M10-sign",
            scale_byte(0, 1, 2, 0xFF),
            ScaleError,
            "b_scales",
            "NaN byte 0xff for expert 0, row 1, block 2",
        ),
        Case(
            "M11",
            scale_byte(3, 0, 0, 0xB8),
            ScaleError,
            "b_scales",
            "negative byte 0xb8 for expert 3, row 0, block 0",
        ),
        *(
            Case(
                f"{row}-{value}",
                edit("expert_scales", 1, value),
                ScaleError,
                "expert_scales",
                rf"expert_scales\[1\] = {value} for expert 1",
                "missing",
            )
            for row, value in factor
        ),
        Case(
            "W7",
            edit("a_row_scales", 5, NAN),
            ScaleError,
            "a_row_scales",
            r"a_row_scales\[5\]",
            extra={"validate": "full"},
        ),
    ]


MATMUL_ONLY = [
    Case(
        "G15-tiles",
        remake("a_scales", lambda x: x[:2].copy()),
        RoutingError,
        "a_scale_offsets",
        r"tiles 2\.\.3 for slot 3",
        "within the 2",
    ),
    Case("M4-slots", shorter_experts, ShapeError, "weight", "3 entries", "4 slots"),
    Case("M4", fewer_experts, RoutingError, "expert_ids", r"expert_ids\[2\] = 3", "below 3"),
    Case("M20", remake("out", lambda o: o.astype(np.float16)), UnsupportedError, "out", "float16"),
    Case(
        "M21",
        remake("out", lambda o: o[:-1].copy()),
        ShapeError,
        "out",
        rf"\({ROWS - 1}, {HIDDEN}\)",
    ),
]
SWIGLU_ONLY = [
    Case(
        "S2",
        put(
            weight=np.zeros((EXPERTS, 40, HIDDEN // 2), np.uint8),
            b_scales=np.zeros((EXPERTS, 1, 2, 32, 4, 4), np.uint8),
        ),
        ShapeError,
        "weight",
        "N = 2D = 40",
        "D % 16",
    ),
    Case("M9", group_of_32, ShapeError, "b_scales", r"shape \(4, 1, 1,", "blocks of 16"),
    Case(
        "W9",
        remake("out", lambda o: (np.zeros((ROWS, MOE_DIM), np.uint8), o[1])),
        ShapeError,
        "out[0]",
        rf"\({ROWS}, {MOE_DIM}\)",
        "D/2",
    ),
    Case(
        "W10",
        remake("out", lambda o: (o[0], np.concatenate([o[1], o[1]]))),
        ShapeError,
        "out[1]",
        rf"\({2 * TILES}, ",
        "tiles of a_scales",
    ),
    Case("W11", put(match_bf16=1), ArgTypeError, "match_bf16", "int 1"),
    Case("W12", put(c_input_scales=None), ScaleError, "c_input_scales", "None"),
    Case(
        "W12-length",
        shorter("c_input_scales"),
        ShapeError,
        "c_input_scales",
        r"\(3,\)",
        "one a slot",
    ),
    *(
        Case(
            f"Q15-{value}",
            edit("c_input_scales", 2, value),
            ScaleError,
            "c_input_scales",
            rf"c_input_scales\[2\] = {value} for slot 2",
        )
        for value in (np.float32(0), np.float32(-1), NAN, INF)
    ),
]


@pytest.mark.parametrize("case", params(shape_cases(MATMUL) + data_cases(MATMUL) + MATMUL_ONLY))
def test_matmul_refused(case: Case, recorder: Recorder) -> None:
    check(MATMUL, case, recorder)


@pytest.mark.parametrize("case", params(shape_cases(SWIGLU) + data_cases(SWIGLU) + SWIGLU_ONLY))
def test_swiglu_refused(case: Case, recorder: Recorder) -> None:
    check(SWIGLU, case, recorder)
