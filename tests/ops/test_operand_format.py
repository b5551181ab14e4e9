"""The format of an operand: named by the caller or read off the element types."""

import ml_dtypes
import numpy as np
import pytest

from nbmoe.errors import ConfigError
from nbmoe.formats import FORMATS, MXFP4, MXFP8, NVFP4
from nbmoe.validate import Call
from nbmoe.validate.elements import BLOCK_CODES, BLOCK_SCALES
from nbmoe.validate.operand_format import operand_format

E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu


def decide(codes, scales, fmt=None):
    call = Call("op", None)
    call.array("hidden", np.zeros((2, 64), codes), BLOCK_CODES, "(M, K)")
    call.array("a_scales", np.zeros((1, 1, 32, 4, 4), scales), BLOCK_SCALES, "(t, c, 32, 4, 4)")
    return operand_format(call, "format", fmt, "hidden", "a_scales")


@pytest.mark.parametrize(
    ("codes", "scales", "found"),
    [
        (np.uint8, np.uint8, NVFP4),
        (np.uint8, E4M3, NVFP4),
        (np.uint8, E8M0, MXFP4),
        (E4M3, E8M0, MXFP8),
        (E4M3, np.uint8, MXFP8),
    ],
)
def test_types_decide_without_a_name(codes, scales, found):
    assert decide(codes, scales) is found
    assert decide(codes, scales, found) is found


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_name_decides_for_plain_bytes(fmt):
    assert decide(np.uint8, np.uint8, fmt) is FORMATS[fmt]


@pytest.mark.parametrize(
    ("codes", "scales", "fmt", "wrong"),
    [
        (E4M3, E8M0, "mxfp4", "hidden of float8_e4m3fn"),
        (np.uint8, E8M0, "nvfp4", "a_scales of float8_e8m0fnu"),
        (E4M3, E4M3, None, "a_scales of float8_e4m3fn"),
        (np.uint8, np.uint8, "fp4", "'fp4'"),
    ],
)
def test_a_contradiction_is_refused(codes, scales, fmt, wrong):
    with pytest.raises(ConfigError, match=rf"op\(\): format: .* got {wrong}"):
        decide(codes, scales, fmt)
