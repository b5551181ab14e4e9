"""P10: float32 factors of experts and slots that are of another length or no factors (G, M, Q)."""

from collections.abc import Iterator

import numpy as np
import pytest

from nbmoe.errors import DTypeError, ScaleError, ShapeError
from tests.bad_inputs.case import Case, Recorder, cast, check, edit, remake, shorter, table
from tests.bad_inputs.valid import VALID

PER = {
    "sf_tensor": "expert",
    "expert_scales": "expert",
    "input_scales": "slot",
    "c_input_scales": "slot",
}
BAD = {
    "G19": np.float32(0),
    "G19-minus": np.float32(-0.0),
    "Q16": np.float32(-2),
    "G20-nan": np.float32("nan"),
    "G20-inf": np.float32("inf"),
    "G20-minus-inf": np.float32("-inf"),
}


def cases(entry: str) -> Iterator[Case]:
    """The rows of each array of factors."""
    for arg in sorted(PER.keys() & VALID[entry]().keys()):
        got = "3 entries" if arg == "sf_tensor" else r"\(3,\)"
        yield Case(f"G18-{arg}", shorter(arg), ShapeError, arg, got)
        if arg != "sf_tensor":
            longer = remake(arg, lambda x: np.append(x, x[-1:]))
            yield Case(f"M13-{arg}", longer, ShapeError, arg, r"\(5,\)")
        yield Case(f"G21-{arg}", cast(arg, np.float64), DTypeError, arg, "float64", "float32")
        yield Case(f"M14-{arg}", cast(arg, "bfloat16"), DTypeError, arg, "bfloat16", "float32")
        for row, value in BAD.items():
            got = rf"{arg}\[3\] = {value} for {PER[arg]} 3"
            yield Case(f"{row}-{arg}", edit(arg, 3, value), ScaleError, arg, got, "missing")


@pytest.mark.parametrize(("entry", "case"), table({entry: cases(entry) for entry in VALID}))
def test_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)
