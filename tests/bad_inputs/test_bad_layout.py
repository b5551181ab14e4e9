"""P10: bad input of what tiles block scales and of what widens MXFP4 (tables Q and L)."""

from collections.abc import Iterator

import numpy as np
import pytest

from nbmoe.errors import (
    ArgTypeError,
    ConfigError,
    DTypeError,
    RangeError,
    ShapeError,
    UnsupportedError,
)
from nbmoe.formats import MXFP4, NVFP4, BlockFormat
from nbmoe.operand import named_dtype
from tests.bad_inputs.case import (
    Case,
    Recorder,
    both,
    cast,
    check,
    narrow,
    put,
    remake,
    shorter,
    table,
    without,
)
from tests.bad_inputs.common_out import replace_out
from tests.bad_inputs.valid import VALID

INTERLEAVE, DEQUANTIZE = "block_scales_interleave", "mxfp4_dequant"
SIZE = "sf_vector_size"
E4M3, E8M0 = named_dtype("float8_e4m3fn"), named_dtype("float8_e8m0fnu")


def interleave_cases(fmt: BlockFormat) -> Iterator[Case]:
    """Blocks and scales that do not go together, and buffers of another size."""
    yield Case("Q1", put(sf_vector_size=0), RangeError, SIZE, "0")
    yield Case("Q2", put(sf_vector_size=-16), RangeError, SIZE, "-16")
    for size in (1, 24, 64, 128):
        says = "e4m3 scales.*e8m0 scales"
        yield Case(f"Q3-{size}", put(sf_vector_size=size), UnsupportedError, SIZE, str(size), says)
    yield Case("Q6", put(sf_vector_size=16.0), ArgTypeError, SIZE, r"float 16\.0")
    yield Case("Q7", put(sf_vector_size=True), ArgTypeError, SIZE, "bool True")
    wrong = E8M0 if fmt is NVFP4 else E4M3
    typed = both(without("out"), remake("scales", lambda x: x.view(wrong)))
    yield Case("Q4-Q5", typed, ConfigError, SIZE, wrong.name, f"{fmt.block} with float8")
    tiled = both(without("out"), put(scales=np.zeros((4, 1, 2, 32, 4, 4), np.uint8)))
    yield Case("L4", tiled, ShapeError, "scales", r"shape \(4, 1, 2, 32, 4, 4\)", "E, N, C")
    yield Case("L3-none", narrow("scales", 0), ShapeError, "scales", "C = 0", "C > 0")
    no_rows = remake("scales", lambda x: x[:, :0].copy())
    yield Case("L2-none", no_rows, ShapeError, "scales", "N = 0", "N > 0")
    yield Case("C7-vector", remake("scales", lambda x: x[0, 0].copy()), ShapeError, "scales", "5,")
    other = VALID[f"{INTERLEAVE}:{fmt.name}"]()["out"]
    change = replace_out(0, other[:, :, :1].copy())
    yield Case("Q21", change, ShapeError, "out", r"\(4, 1, 1, ", r"ceil\(N/128\), ceil\(C/4\)")
    change = replace_out(0, other[0].copy())
    yield Case("Q21-rank", change, ShapeError, "out", r"\(1, 2, 32", r"\(E, ceil\(N/128\)")
    yield Case("Q23", replace_out(0, other.view(wrong)), DTypeError, "out", wrong.name)


def dequantize_cases() -> Iterator[Case]:
    """Codes and scales that do not go together, and element types that are no result."""
    yield Case("Q8", narrow("packed", 40), ShapeError, "packed", "K = 80", "K % 32.*pad K")
    yield Case("Q9", narrow("packed", 0), ShapeError, "packed", "K = 0", "K > 0")
    says = r"\(4, 65, 5\)"
    yield Case("M9", narrow("scales", 4), ShapeError, "scales", r"\(4, 65, 4\)", says)
    yield Case("M9-E", shorter("scales"), ShapeError, "scales", r"\(3, 65, 5\)", says)
    one = remake("scales", lambda x: x[0].copy())
    yield Case("C7-scales", one, ShapeError, "scales", r"\(65, 5\)", "E in front as packed has")
    tiles = put(scales=np.zeros((4, 1, 2, 32, 4, 4), np.uint8))
    yield Case("M7", tiles, ShapeError, "scales", r"shape \(4, 1, 2, 32", r"\(E, N, K/32\)")
    yield Case("L17", remake("packed", lambda x: x.view(np.int8)), DTypeError, "packed", "int8")
    wrong = remake("scales", lambda x: x.view(E4M3))
    yield Case("K2", wrong, DTypeError, "scales", "float8_e4m3fn", "e8m0")
    yield Case("K2-codes", cast("packed", E4M3), DTypeError, "packed", "float8_e4m3fn", "mxfp4")
    names = r"\('bfloat16', 'float8_e4m3fn'\)"
    yield Case("M20", put(out_type="float16"), ConfigError, "out_type", "'float16'", names)
    yield Case("M20-none", put(out_type=None), ArgTypeError, "out_type", "None", "a name")
    yield Case("M20-type", put(out_type=np.uint8), ArgTypeError, "out_type", "type", "a name")


TABLE = {f"{INTERLEAVE}:{fmt.name}": interleave_cases(fmt) for fmt in (NVFP4, MXFP4)} | {
    f"{DEQUANTIZE}:{out_type}": dequantize_cases() for out_type in ("bfloat16", "float8_e4m3fn")
}


@pytest.mark.parametrize(("entry", "case"), table(TABLE))
def test_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)
