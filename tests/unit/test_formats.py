"""P1: format descriptors say what the OCP specifications say."""

import dataclasses

import ml_dtypes
import pytest

from nbmoe.errors import ConfigError, ShapeError
from nbmoe.formats import (
    E2M1,
    E4M3,
    E5M2,
    FORMATS,
    MXFP4,
    MXFP8,
    NVFP4,
    PAIRS,
    block_format,
)

ML_DTYPES = {
    E2M1: ml_dtypes.float4_e2m1fn,
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
}


@pytest.mark.parametrize("element", ML_DTYPES, ids=lambda e: e.name)
def test_element_agrees_with_ml_dtypes_finfo(element):
    info = ml_dtypes.finfo(ML_DTYPES[element])
    assert element.bits == info.bits
    assert element.exponent_bits == info.nexp
    assert element.mantissa_bits == info.nmant
    assert element.max_value == float(info.max)
    assert 2.0**element.min_exponent == float(info.smallest_normal)
    assert 2.0**element.max_exponent <= element.max_value < 2.0 ** (element.max_exponent + 1)


def test_special_codes():
    assert (E2M1.has_nan, E4M3.has_nan, E5M2.has_nan) == (False, True, True)
    assert (E2M1.inf_code, E4M3.inf_code, E5M2.inf_code) == (None, None, 0x7C)
    assert (E2M1.nan_code, E4M3.nan_code, E5M2.nan_code) == (7, 0x7F, 0x7F)


def test_block_formats():
    assert {f.name: (f.element, f.block, f.scale) for f in FORMATS.values()} == {
        "nvfp4": (E2M1, 16, "e4m3"),
        "mxfp4": (E2M1, 32, "e8m0"),
        "mxfp8": (E4M3, 32, "e8m0"),
    }
    assert [f.max_value for f in (NVFP4, MXFP4, MXFP8)] == [6, 6, 448]
    assert [f.tile_columns for f in (NVFP4, MXFP4, MXFP8)] == [64, 128, 128]
    assert [f.has_tensor_scale for f in (NVFP4, MXFP4, MXFP8)] == [True, False, False]
    assert [f.codes_dtype for f in (NVFP4, MXFP4, MXFP8)] == ["uint8", "uint8", "float8_e4m3fn"]
    assert [f.scales_dtype for f in (NVFP4, MXFP4, MXFP8)] == ["uint8"] + 2 * ["float8_e8m0fnu"]


def test_formats_by_name():
    assert block_format("mxfp8", "call") is MXFP8
    assert block_format(MXFP4, "call") is MXFP4
    with pytest.raises(ConfigError, match=r"call\(\): format: expected one of .*, got 'int4'"):
        block_format("int4", "call")
    assert all(a in FORMATS.values() and w in FORMATS.values() for a, w in PAIRS)


def test_sizes_of_a_row():
    assert [f.packed_k(96) for f in (NVFP4, MXFP4, MXFP8)] == [48, 48, 96]
    assert [f.scale_columns(96) for f in (NVFP4, MXFP4, MXFP8)] == [6, 3, 3]


@pytest.mark.parametrize("k", [-16, 8, 40])
def test_sizes_need_whole_blocks(k):
    with pytest.raises(ShapeError, match=rf"a multiple of the nvfp4 block of 16, got {k}"):
        NVFP4.packed_k(k)
    with pytest.raises(ShapeError, match="pad K"):
        NVFP4.scale_columns(k)


def test_descriptors_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        NVFP4.block = 32
    assert hash(NVFP4) == hash(dataclasses.replace(NVFP4))
