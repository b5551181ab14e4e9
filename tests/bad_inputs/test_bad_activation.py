"""P10: bad input of the gated activations (table S)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nbmoe import backend, ops
from nbmoe.activation import GatedActivation
from nbmoe.errors import (
    ArgTypeError,
    ConfigError,
    DTypeError,
    RangeError,
    RoutingError,
    ScaleError,
    ShapeError,
    UnsupportedError,
)
from nbmoe.formats import FORMATS, NVFP4, BlockFormat
from nbmoe.operand import named_dtype
from nbmoe_kernels.kernel import CompileError
from tests.bad_inputs.case import Case, Recorder, cast, check, edit, put, refused, remake, table
from tests.bad_inputs.common_out import replace_out
from tests.bad_inputs.sizes import ROWS, TILES
from tests.bad_inputs.valid import VALID, function, op_name

FUSED = "fused_silu_quantize"
GATED = "gated_activation"
SWIGLU = [entry for entry in VALID if entry.startswith("grouped_matmul_blocked_swiglu")]
BLOCKS = {GATED: 16, **{f"{FUSED}:{fmt.name}": fmt.block for fmt in FORMATS.values()}}
ALL = [*BLOCKS, *SWIGLU]


def columns(row: str, n: int, block: int) -> Case:
    """Projections of n columns."""
    change = remake("gate_up", lambda x: np.zeros((ROWS, n), x.dtype))
    return Case(row, change, ShapeError, "gate_up", f"2D = {n}", f"D % {block} == 0")


def projection_cases(block: int) -> Iterator[Case]:
    """Gate and up projections of a wrong size or type."""
    yield columns("S1", 6 * block - 1, block)
    yield columns("S2", 5 * block, block)
    yield columns("S2-none", 0, block)
    yield Case("S3", cast("gate_up", np.float64), DTypeError, "gate_up", "float64", "bfloat16")
    yield Case("S3-f32", cast("gate_up", np.float32), DTypeError, "gate_up", "float32", "astype")
    half = cast("gate_up", np.float16)
    yield Case("Q12", half, UnsupportedError, "gate_up", "float16", "convert to bfloat16")
    yield Case("Q11", cast("gate_up", np.uint8), DTypeError, "gate_up", "uint8", "dequantize")
    for bad in (None, 1, "gate"):
        got = f"{type(bad).__name__} {bad!r}"
        yield Case(f"S17-{bad}", put(interleaved=bad), ArgTypeError, "interleaved", got, "a bool")


@pytest.mark.parametrize(
    ("entry", "case"), table({entry: projection_cases(block) for entry, block in BLOCKS.items()})
)
def test_projections_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)


def activation_cases() -> Iterator[Case]:
    """What is no activation; constants are refused where the activation is made."""
    for bad in ("gelu", "silu", abs, 1, {"fused_activation": "silu"}, GatedActivation):
        got, says = type(bad).__name__, "a GatedActivation or None"
        yield Case(f"S8-{got}-{bad}", put(activation=bad), ArgTypeError, "activation", got, says)


@pytest.mark.parametrize(("entry", "case"), table({entry: activation_cases() for entry in ALL}))
def test_activation_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)


@pytest.mark.parametrize("entry", SWIGLU)
def test_function_is_for_the_chained_path(entry: str, recorder: Recorder) -> None:
    change = put(activation=GatedActivation(gated_activation_fn=lambda g, u: g * u))
    hint = "in separate calls"
    case = Case("fn", change, ConfigError, "activation", "gated_activation_fn", hint)
    check(entry, case, recorder)


def helper(gate: Any) -> Any:
    """A function that Numba has not compiled."""
    return gate * gate


@pytest.mark.parametrize("entry", BLOCKS)
def test_function_that_does_not_compile(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever compiles it, the operation says so in a line; a kernel's own faults stay theirs."""

    def refuse(*launch: Any) -> None:
        raise CompileError("k: Failed in a pipeline\nFailed in nopython\n\nUntyped name 'x'\nFile")

    monkeypatch.setattr(backend, "executor", lambda *args, **kwargs: refuse)
    arguments = VALID[entry]()
    arguments["activation"] = GatedActivation(gated_activation_fn=lambda g, u: g * u)
    case = Case(
        "fn", put(), ConfigError, "activation", "<lambda>: Untyped name 'x' — ", "numba.njit"
    )
    refused(function(entry), arguments, case, op_name(entry), Recorder())
    with pytest.raises(CompileError):
        function(entry)(**arguments | {"activation": None})


@pytest.mark.parametrize(
    ("name", "got"), [("emulate", "'helper'"), ("reference", ""), ("cudasim", "")]
)
def test_helper_that_is_not_compiled(name: str, got: str) -> None:
    """Backends that interpret Python take it."""
    if backend.problem(name) or (got and backend.simulator_enabled()):
        return
    fn = lambda gate, up: helper(gate) * up  # noqa: E731
    arguments: Any = {"activation": GatedActivation(gated_activation_fn=fn), "backend": name}
    x = np.full((2, 32), 3, named_dtype("bfloat16"))
    if not got:
        assert (ops.gated_activation(x, **arguments) == 27).all()
        return
    with pytest.raises(ConfigError, match=f"activation: expected .* Numba compiles, got .*{got}"):
        ops.gated_activation(x, **arguments)


CONSTANTS: dict[str, tuple[dict[str, Any], type[Exception], str, str]] = {
    "S9": ({"limit": -1.0}, RangeError, "limit", r"-1\.0"),
    "S9-zero": ({"fused_activation": "swigluoai", "alpha": 1.0}, RangeError, "limit", r"0\.0"),
    "S10": ({"limit": float("nan")}, RangeError, "limit", "nan"),
    "S11": (
        {"fused_activation": "swigluoai", "alpha": float("inf"), "limit": 7.0},
        RangeError,
        "alpha",
        "inf",
    ),
    "F16": ({"fused_activation": "swigluoai"}, RangeError, "alpha", r"0\.0"),
    "S8-name": ({"fused_activation": "gelu"}, ConfigError, "fused_activation", "'gelu'"),
}


@pytest.mark.parametrize("row", CONSTANTS)
def test_constant_refused(row: str) -> None:
    """The activation is refused before a call can have it; all rows in `tests/unit`."""
    fields, error, arg, got = CONSTANTS[row]
    with pytest.raises(error, match=rf"^GatedActivation\(\): {arg}: expected .*, got .*{got}"):
        GatedActivation(**fields)


def fused_cases(fmt: BlockFormat) -> Iterator[Case]:
    """Formats, scales, routing and buffers of `fused_silu_quantize`."""
    yield Case("K2", put(format="fp4"), ConfigError, "format", "'fp4'", "nvfp4.*mxfp4.*mxfp8")
    for bad in (4, None):
        got = type(bad).__name__
        yield Case(f"K2-{got}", put(format=bad), ArgTypeError, "format", got, "a name")
    yield Case("Q22", put(scale_rule="up"), ConfigError, "scale_rule", "'up'", "rceil.*even")
    yield Case("Q24", put(scale_rule=1), ArgTypeError, "scale_rule", "int 1", "a name")
    rows = edit("expert_start", -1, ROWS + 1)
    yield Case("S7", rows, RoutingError, "expert_start", "131", "<= 130, the rows of gate_up")
    swapped = put(expert_start=np.ones(5, np.float32))
    yield Case("S6", swapped, DTypeError, "expert_start", "float32", "uint32")
    if fmt is NVFP4:
        none = put(input_scales=None)
        yield Case("S13", none, ScaleError, "input_scales", "None", "input_scales is required")
        for rule in ("even", "floor"):
            change, got = put(scale_rule=rule), f"'{rule}'"
            yield Case(f"Q22-{rule}", change, ConfigError, "scale_rule", got, "'rceil' for NVFP4")
    else:
        given = put(input_scales=np.ones(4, np.float32))
        yield Case("Q19", given, ConfigError, "input_scales", "an array", "mxfp4 and mxfp8")
    codes, scales = VALID[f"{FUSED}:{fmt.name}"]()["out"]
    wide = np.zeros((len(codes), 2 * codes.shape[1]), codes.dtype)
    got = r"\(130, \d+\)"
    yield Case("W9", replace_out(0, wide), ShapeError, "out[0]", got, r"\(rows, D")
    formula, says = scales[:-1].copy(), r"ceil\(M/128\) \+ min\(S, M\)"
    yield Case("Q21", replace_out(1, formula), ShapeError, "out[1]", rf"\({TILES - 1}, ", says)


@pytest.mark.parametrize(
    ("entry", "case"), table({f"{FUSED}:{fmt.name}": fused_cases(fmt) for fmt in FORMATS.values()})
)
def test_fused_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)
