"""P10: bad routing of rows to slots, of every grouped operation (table G)."""

from collections.abc import Iterator

import numpy as np
import pytest

from nbmoe.errors import DTypeError, RoutingError, ShapeError
from tests.bad_inputs.case import (
    Case,
    Recorder,
    both,
    cast,
    check,
    edit,
    narrow,
    remake,
    shorter,
    table,
    without,
)
from tests.bad_inputs.sizes import EXPERTS, ROWS, TILES, TOKENS
from tests.bad_inputs.valid import VALID

GROUPED = [entry for entry in VALID if "expert_ids" in VALID[entry]()]
LARGEST = 2**32 - 1


def first_of(entry: str, *names: str) -> str:
    """The first of these arguments that an entry has."""
    arguments = VALID[entry]()
    return next(name for name in names if name in arguments)


def starts_of(entry: str) -> str:
    """What an operation calls the row offsets."""
    return first_of(entry, "row_offsets", "expert_start")


def starts_cases(entry: str) -> Iterator[Case]:
    """Row offsets of another type or length, and some that are no prefix sums."""
    starts = starts_of(entry)
    yield Case("G1", shorter(starts), ShapeError, starts, r"\(4,\)", r"S \+ 1")
    yield Case("G1-long", remake(starts, lambda x: np.append(x, x[-1:])), ShapeError, starts, "6")
    yield Case("G2", cast(starts, np.int64), DTypeError, starts, "int64", "uint32")
    hint = r"\.view\('uint32'\)"
    yield Case("G2-i32", cast(starts, np.int32), DTypeError, starts, "int32", hint)
    yield Case("G3", edit(starts, 0, 5), RoutingError, starts, "5", "== 0")
    got = rf"{starts}\[2\] = 3, {starts}\[3\] = 2"
    yield Case("G4", edit(starts, 3, 2), RoutingError, starts, got, "ascending")
    # Without a gather each routed row is a row of the input.
    rows_of = first_of(entry, "input", "gate_up", "hidden")
    gathers = "indices" in VALID[entry]()
    rows = TOKENS if gathers else ROWS
    alone = without("indices", "out") if gathers else without()
    says = f"<= {rows}, the rows of {rows_of}"
    for row, end in (("G5", ROWS if gathers else ROWS + 1), ("G6", LARGEST)):
        change = both(alone, edit(starts, -1, end))
        yield Case(row, change, RoutingError, starts, str(end), says)


def ids_cases(entry: str) -> Iterator[Case]:
    """Expert ids of another type or length, and some that name no expert or one twice."""
    arg, starts = "expert_ids", starts_of(entry)
    if entry == "grouped_quantize_nvfp4_row_scaled":
        yield Case("G7", shorter(arg), ShapeError, arg, r"\(3,\)", "S from scales_offsets")
        none = narrow("scales_offsets", 0)
        yield Case("G7-none", none, ShapeError, "scales_offsets", r"\(0,\)", "S >= 1")
    else:
        yield Case("G7", shorter(arg), ShapeError, starts, r"\(5,\)", "S from expert_ids")
        yield Case("G7-none", narrow(arg, 0), ShapeError, arg, r"\(0,\)", "S >= 1")
    yield Case("G12", cast(arg, np.uint32), DTypeError, arg, "uint32", "-1 masks")
    yield Case("G12-i64", cast(arg, np.int64), DTypeError, arg, "int64", "int32")
    yield Case("G9", edit(arg, 2, -2), RoutingError, arg, r"expert_ids\[2\] = -2", "-1 or ids")
    got = r"expert_ids\[2\] = expert_ids\[3\] = 2"
    yield Case("G10", edit(arg, 3, 2), RoutingError, arg, got, "one slot")
    if {"sf_tensor", "weight"} & set(VALID[entry]()):
        got = r"expert_ids\[1\] = 4"
        yield Case("G8", edit(arg, 1, EXPERTS), RoutingError, arg, got, "below 4, the experts of")


def tiles_cases(entry: str) -> Iterator[Case]:
    """Scale offsets of another type or length, and some that give slots too few tiles."""
    arg = first_of(entry, "scales_offsets", "a_scale_offsets")
    longer = remake(arg, lambda x: np.append(x, x[-1:]))
    if entry == "grouped_quantize_nvfp4_row_scaled":
        yield Case("G13", longer, ShapeError, starts_of(entry), r"\(5,\)", "S from scales_offsets")
    else:
        yield Case("G13", longer, ShapeError, arg, r"\(5,\)", r"\(S,\)")
        yield Case("G13-short", shorter(arg), ShapeError, arg, r"\(3,\)", r"\(S,\)")
    yield Case("G13-i64", cast(arg, np.int64), DTypeError, arg, "int64", "uint32")
    got = r"tiles 1\.\.1 for slot 1, from 0 for slot 2"
    yield Case("G14", edit(arg, 2, 0), RoutingError, arg, got, "sum over j < e of ceil")
    got, says = rf"tiles {TILES + 1}\.\.{TILES + 2} for slot 3", f"within the {TILES}"
    yield Case("G15", edit(arg, 3, TILES), RoutingError, arg, got, says)
    yield Case("G15-wrap", edit(arg, 3, LARGEST), RoutingError, arg, "for slot 3")


def cases(entry: str) -> Iterator[Case]:
    """Table G for an operation."""
    yield from starts_cases(entry)
    yield from ids_cases(entry)
    if {"scales_offsets", "a_scale_offsets"} & set(VALID[entry]()):
        yield from tiles_cases(entry)


@pytest.mark.parametrize(("entry", "case"), table({entry: cases(entry) for entry in GROUPED}))
def test_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)


def gather_cases(entry: str) -> Iterator[Case]:
    """Gathers that reach beyond the input or have too few indices."""
    arg = "indices"
    got = rf"indices\[7\] = {LARGEST}"
    yield Case("G22", edit(arg, 7, LARGEST), RoutingError, arg, got)
    yield Case("G22-i32", cast(arg, np.int32), DTypeError, arg, "int32", r"\.view\('uint32'\)")
    got = rf"indices\[9\] = {ROWS}"
    yield Case("G23", edit(arg, 9, ROWS), RoutingError, arg, got, f"// 2 < {TOKENS}")
    fewer = both(shorter(arg), without("out"))
    yield Case("G26", fewer, ShapeError, arg, r"\(129,\)", r"row_offsets\[-1\] = 130")


GATHERING = [entry for entry in GROUPED if "indices" in VALID[entry]()]


@pytest.mark.parametrize(
    ("entry", "case"), table({entry: gather_cases(entry) for entry in GATHERING})
)
def test_gather_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)


OFFSETS = [e for e in VALID if "row_offsets" in VALID[e]() and e not in GROUPED]


def offsets_cases(entry: str) -> Iterator[Case]:
    """Row offsets that bound a quantizer without slots."""
    arg, rows_of = "row_offsets", first_of(entry, "input", "x")
    yield Case("G1", narrow(arg, 1), ShapeError, arg, r"\(1,\)", "S >= 1")
    yield Case("G1-none", narrow(arg, 0), ShapeError, arg, r"\(0,\)", "S >= 1")
    yield Case("G2", cast(arg, np.int32), DTypeError, arg, "int32", r"\.view\('uint32'\)")
    yield Case("G3", edit(arg, 0, 1), RoutingError, arg, "1", "== 0")
    got = r"row_offsets\[2\] = 3, row_offsets\[3\] = 2"
    yield Case("G4", edit(arg, 3, 2), RoutingError, arg, got, "ascending")
    says = f"<= {ROWS}, the rows of {rows_of}"
    yield Case("G5", edit(arg, -1, ROWS + 1), RoutingError, arg, str(ROWS + 1), says)
    yield Case("G6", edit(arg, -1, LARGEST), RoutingError, arg, str(LARGEST), says)


@pytest.mark.parametrize(
    ("entry", "case"), table({entry: offsets_cases(entry) for entry in OFFSETS})
)
def test_bound_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)
