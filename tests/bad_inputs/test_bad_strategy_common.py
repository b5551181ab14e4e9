"""P10: the common table for the arrays that strategies take (C), with the operation's message."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from nbmoe.errors import ArgTypeError, DTypeError, LayoutError, ShapeError
from tests.bad_inputs.case import Case, Recorder, refused
from tests.bad_inputs.common import every_other, type_name
from tests.bad_inputs.sizes import Arguments
from tests.bad_inputs.valid_strategy import BLOCK_FORMATS, METHODS, Method

OWN_TYPES = {
    "expert_inputs.expert_start",
    "expert_inputs.scales_offsets",
    "expert_inputs.expert_ids",
}
"""Arguments whose element types a strategy looks at itself: they show operands in a wrong order."""


def get(arguments: Arguments, path: str) -> Any:
    """An argument, or a field of one."""
    name, _, field = path.partition(".")
    return getattr(arguments[name], field) if field else arguments[name]


def remade(path: str, make: Callable[[Any], Any]) -> Callable[[Arguments], None]:
    """A change of an argument, or of a field of one."""
    name, _, field = path.partition(".")

    def change(arguments: Arguments) -> None:
        value = make(get(arguments, path))
        arguments[name] = arguments[name]._replace(**{field: value}) if field else value

    return change


def cases(method: Method) -> Iterator[Case]:
    """Rows of the common table for each array that a method passes on."""
    for path, theirs in method.passed.items():
        if path != "out":
            yield from _cases(method, path, theirs, get(method.build(), path))


def _cases(method: Method, path: str, theirs: str, x: Any) -> Iterator[Case]:
    def case(
        row: str, make: Any, error: type[Exception], got: str, says: str = "", own: bool = False
    ) -> Case:
        arg, api = (path, method.api) if own else (theirs, method.op)
        return Case(f"{row}-{path}", remade(path, make), error, arg, got, says, api=api)

    own = path in OWN_TYPES
    if path.startswith("expert_inputs"):
        says = "the order is"
        yield case("C1", lambda x: None, ArgTypeError, "None", says, own=True)
    yield case("C2-list", lambda x: x.tolist(), ArgTypeError, "list", "numpy.asarray", own)
    yield case("C2-scalar", lambda x: 3.5, ArgTypeError, r"float 3\.5", "an array", own)
    yield case("C3", lambda x: x.astype(object), DTypeError, "object", type_name(x), own)
    yield case("C4", lambda x: x.astype(np.float64), DTypeError, "float64", type_name(x), own)
    one_axis = own and method.variant in BLOCK_FORMATS
    if x.size > 1:
        yield case("C8", lambda x: x[..., None], ShapeError, r"shape \(.*1\)", own=one_axis)
        yield case("C10", every_other, LayoutError, r"strides \(", "ascontiguousarray")
    yield case("C9", lambda x: np.zeros((), x.dtype), ShapeError, r"shape \(\)", own=one_axis)


TABLE = [
    pytest.param(method, case, id=f"{method}-{case.id}")
    for method in METHODS
    for case in cases(method)
    if not (method.variant == "tensor" and case.id == "C8-weight_scales")
]


@pytest.mark.parametrize(("method", "case"), TABLE)
def test_refused(method: Method, case: Case, recorder: Recorder) -> None:
    arguments = method.build()
    case.change(arguments)
    refused(method.bound(), arguments, case, case.api, recorder)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("level", [None, "shapes", "full"])
def test_valid(method: Method, level: str | None, recorder: Recorder) -> None:
    """What is spoilt was right, at every level."""
    method.bound()(**method.build(), validate=level)
    assert recorder.launches
