"""P10: bad formats, sizes and scales of the block quantizers (table Q)."""

from collections.abc import Iterator

import numpy as np
import pytest

from nbmoe.errors import (
    ArgTypeError,
    ConfigError,
    DTypeError,
    RangeError,
    ScaleError,
    ShapeError,
    UnsupportedError,
)
from nbmoe.formats import MXFP4, MXFP8, NVFP4, BlockFormat
from nbmoe.operand import named_dtype
from tests.bad_inputs.case import (
    Case,
    Recorder,
    cast,
    check,
    put,
    remake,
    table,
)
from tests.bad_inputs.common_out import replace_out
from tests.bad_inputs.sizes import ROWS, TILES, TOKENS
from tests.bad_inputs.valid import VALID
from tests.bad_inputs.valid_quantize import naming

GROUPED, ROW, PLAIN = (
    "grouped_quantize_dynamic_block_scaled",
    "grouped_quantize_nvfp4_row_scaled",
    "quantize_dynamic_block_scaled",
)
FORMATS = {
    **{f"{op}:{fmt.name}": fmt for op in (GROUPED, PLAIN) for fmt in (NVFP4, MXFP4, MXFP8)},
    ROW: NVFP4,
}
NAMED = [entry for entry in FORMATS if entry != ROW]
SIZE = "sf_vector_size"
BFLOAT16 = named_dtype("bfloat16")


def columns(row: str, k: int, block: int) -> Case:
    """An input of `k` columns."""
    change = remake("input", lambda x: np.zeros((TOKENS, k), x.dtype))
    return Case(row, change, ShapeError, "input", f"K = {k}", f"K % {block} == 0 .*|pad K")


def input_cases(fmt: BlockFormat) -> Iterator[Case]:
    """Inputs of a size or type that the format cannot take."""
    yield columns("Q8", 2 * fmt.block + 8, fmt.block)
    yield columns("Q8-half", fmt.block // 2, fmt.block)
    yield columns("Q9", 0, fmt.block)
    yield columns("Q10", 2 * fmt.block - 1, fmt.block)
    yield Case("Q11", cast("input", np.uint8), DTypeError, "input", "uint8", "dequantize")
    fp8 = named_dtype("float8_e4m3fn")
    yield Case("Q11-fp8", cast("input", fp8), DTypeError, "input", "float8_e4m3fn", "bfloat16")
    half = cast("input", np.float16)
    yield Case("Q12", half, UnsupportedError, "input", "float16", "convert to bfloat16")
    yield Case("Q12-f32", cast("input", np.float32), DTypeError, "input", "float32", "astype")


@pytest.mark.parametrize(
    ("entry", "case"), table({entry: input_cases(fmt) for entry, fmt in FORMATS.items()})
)
def test_input_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)


def naming_cases(fmt: BlockFormat) -> Iterator[Case]:
    """Numbers and names that are no format, or another one than the rest says."""
    yield Case("Q1", put(sf_vector_size=0), RangeError, SIZE, "0")
    yield Case("Q2", put(sf_vector_size=-16), RangeError, SIZE, "-16")
    yield Case("Q3", put(sf_vector_size=24), UnsupportedError, SIZE, "24", r"16 \(NVFP4\) or 32")
    yield Case("Q3-1", put(sf_vector_size=1), UnsupportedError, SIZE, "1", r"16 \(NVFP4\) or 32")
    says = "quantize_dynamic_scaled_float8"
    yield Case("Q3-fp8", put(sf_vector_size=128), UnsupportedError, SIZE, "128", says)
    yield Case("Q6", put(sf_vector_size=float(fmt.block)), ArgTypeError, SIZE, r"float \d+\.0")
    yield Case("Q7", put(sf_vector_size=True), ArgTypeError, SIZE, "bool True")
    other = 48 - fmt.block
    scales = naming(fmt)["scales_type"]
    says = f"with blocks of {other}"
    yield Case("Q4-Q5", put(sf_vector_size=other), ConfigError, "scales_type", scales, says)
    wrong_scales = naming(MXFP4 if fmt is NVFP4 else NVFP4)["scales_type"]
    says = f"with blocks of {fmt.block}"
    change = put(scales_type=wrong_scales)
    yield Case("Q23-scales", change, ConfigError, "scales_type", wrong_scales, says)
    for arg in ("scales_type", "out_type"):
        yield Case(f"Q23-{arg}", put(**{arg: "int8"}), ConfigError, arg, "'int8'", says)
        yield Case(f"Q23-{arg}-none", put(**{arg: None}), ArgTypeError, arg, "None", "a name")
        yield Case(f"Q23-{arg}-type", put(**{arg: np.uint8}), ArgTypeError, arg, "type", "a name")
    if fmt is NVFP4:
        change = put(out_type="float8_e4m3fn")
        yield Case("Q23-out", change, ConfigError, "out_type", "'float8_e4m3fn'", r"\(nvfp4\)")
        for rule in ("even", "floor"):
            change, got = put(scale_rule=rule), f"'{rule}'"
            yield Case(f"Q22-{rule}", change, ConfigError, "scale_rule", got, "'rceil' for NVFP4")
    names = r"\('rceil', 'even', 'floor'\)"
    yield Case("Q22", put(scale_rule="nearest"), ConfigError, "scale_rule", "'nearest'", names)
    yield Case("Q24", put(scale_rule="stochastic"), ConfigError, "scale_rule", "'stoch", names)
    yield Case("Q24-type", put(scale_rule=1), ArgTypeError, "scale_rule", "int 1", "a name")
    yield Case("Q24-none", put(scale_rule=None), ArgTypeError, "scale_rule", "None", "a name")


@pytest.mark.parametrize(
    ("entry", "case"), table({entry: naming_cases(FORMATS[entry]) for entry in NAMED})
)
def test_naming_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)


def divisor_cases() -> Iterator[Case]:
    """Divisors of a gather that are no positive int."""
    arg = "indices_divisor"
    yield Case("G24", put(indices_divisor=0), RangeError, arg, "0")
    yield Case("G25", put(indices_divisor=-1), RangeError, arg, "-1")
    yield Case("G25-float", put(indices_divisor=2.0), ArgTypeError, arg, r"float 2\.0")
    yield Case("G25-bool", put(indices_divisor=True), ArgTypeError, arg, "bool True")


@pytest.mark.parametrize(
    ("entry", "case"), table({e: divisor_cases() for e in FORMATS if "indices" in VALID[e]()})
)
def test_divisor_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)


def factor_cases() -> Iterator[Case]:
    """Tensor scales of NVFP4 that are no factors."""
    arg = "tensor_sf"
    for row, value in (
        ("Q15", 0.0),
        ("Q15-tiny", 1e-60),
        ("Q16", -1),
        ("Q17", float("nan")),
        ("Q18", float("inf")),
        ("Q18-large", 1e39),
    ):
        got = str(value).replace("+", r"\+")
        yield Case(row, put(tensor_sf=value), ScaleError, arg, got, "missing")
    for value, got in (("1", "str '1'"), (True, "bool True"), (np.ones(2), "ndarray")):
        yield Case(f"Q15-{got}", put(tensor_sf=value), ArgTypeError, arg, got)


MX_FACTORS = {
    f"{op}:{fmt.name}": [Case("Q19", put(**{arg: value}), ConfigError, arg, got, "mxfp4|mxfp8")]
    for op, arg, value, got in (
        (GROUPED, "sf_tensor", np.ones(4, np.float32), "an array"),
        (PLAIN, "tensor_sf", 2.0, r"2\.0"),
    )
    for fmt in (MXFP4, MXFP8)
}


@pytest.mark.parametrize(("entry", "case"), table({f"{PLAIN}:nvfp4": factor_cases()} | MX_FACTORS))
def test_factor_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)


def out_cases(entry: str, fmt: BlockFormat) -> Iterator[Case]:
    """Buffers for unpacked codes, for fewer scale tiles, and for another format."""
    codes, scales, *_ = VALID[entry]()["out"]
    if fmt.per_byte == 2:
        unpacked = np.zeros((len(codes), 2 * codes.shape[1]), codes.dtype)
        yield Case("Q20", replace_out(0, unpacked), ShapeError, "out[0]", r"\(\d+, \d+\)", "K/2")
    formula = r"ceil\(M/128\)"
    if entry.startswith("grouped"):
        formula = r"ceil\(rows/128\) \+ min\(S, rows\)"
        says = rf"\({TILES}, .* or longer"
        unpadded = scales[: -(-ROWS // 128)].copy()
        yield Case("Q21", replace_out(1, unpadded), ShapeError, "out[1]", r"\(2, ", says)
    yield Case("Q21-short", replace_out(1, scales[:-1].copy()), ShapeError, "out[1]", "", formula)
    rows = scales.reshape(-1, scales.shape[-1])
    yield Case("Q21-rows", replace_out(1, rows), ShapeError, "out[1]", r"shape \(", formula)
    other = NVFP4 if fmt is not NVFP4 else MXFP8
    wrong = named_dtype("float8_e5m2") if fmt is not NVFP4 else named_dtype(other.scales_dtype)
    change = replace_out(1, scales.view(wrong))
    yield Case("Q23-out", change, DTypeError, "out[1]", wrong.name, fmt.scale)
    change = replace_out(0, codes.view(wrong))
    yield Case("Q23-codes", change, DTypeError, "out[0]", wrong.name, fmt.name)


@pytest.mark.parametrize(
    ("entry", "case"), table({entry: out_cases(entry, fmt) for entry, fmt in FORMATS.items()})
)
def test_out_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)


ROW_SCALED = [
    Case("relu2", put(relu2=1), ArgTypeError, "relu2", "int 1"),
    Case("relu2-none", put(relu2=None), ArgTypeError, "relu2", "NoneType None"),
    Case("W6-f32", replace_out(2, np.zeros(ROWS, np.float32)), DTypeError, "out[2]", "float32"),
    Case("W5", replace_out(2, np.zeros(TOKENS, BFLOAT16)), ShapeError, "out[2]", r"\(65,\)"),
]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in ROW_SCALED])
def test_row_scaled_refused(case: Case, recorder: Recorder) -> None:
    check(ROW, case, recorder)
