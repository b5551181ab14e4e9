"""P1, P5: MXFP4 dequantization equals the reference and decoding by table."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nbmoe import codecs, ops
from nbmoe.arrays import named_dtype
from tests.ops.compare import assert_equals_reference, assert_same

TYPES = ("bfloat16", "float8_e4m3fn")


def every_code_and_scale() -> tuple[Any, Any]:
    """(256, 16) packed codes, all 16 values twice a block, and (256, 1) scales, all bytes."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 2))
    return codecs.pack_nibbles(codes), np.arange(256, dtype=np.uint8)[:, None]


@pytest.mark.parametrize("out_type", TYPES)
def test_every_code_under_every_scale(kernels: Any, out_type: str) -> None:
    packed, scales = every_code_and_scale()
    got = kernels(ops.mxfp4_dequant, packed, scales, out_type=out_type)
    assert_same(got, ops.mxfp4_dequant(packed, scales, out_type=out_type, backend="reference"))


@pytest.mark.parametrize("out_type", TYPES)
@pytest.mark.parametrize("shape", [(5, 96), (2, 3, 160)])
def test_equals_reference(kernels: Any, shape: tuple[int, ...], out_type: str) -> None:
    rng = np.random.default_rng(2)
    packed = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)
    scales = rng.integers(100, 150, (*shape[:-1], shape[-1] // 32), dtype=np.uint8)
    assert_equals_reference(
        kernels,
        ops.mxfp4_dequant,
        ((shape, named_dtype(out_type)),),
        *(packed, scales.view(ml_dtypes.float8_e8m0fnu)),
        out_type=out_type,
    )


def test_values_against_float64() -> None:
    """Independent of the codecs: a table of the 16 values, powers of two, one rounding."""
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = np.concatenate([table, -table])
    packed, scales = every_code_and_scale()
    exact = table[np.tile(np.arange(16), (256, 2))] * np.exp2(np.arange(256)[:, None] - 127.0)
    with np.errstate(over="ignore"):
        want = exact.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    want[255] = 0x7FFF
    got = ops.mxfp4_dequant(packed, scales, backend="reference")
    np.testing.assert_array_equal(got.view(np.uint16), want)
    saturated = np.clip(exact, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    saturated[255] = 0x7F
    got = ops.mxfp4_dequant(packed, scales, out_type="float8_e4m3fn", backend="reference")
    np.testing.assert_array_equal(got.view(np.uint8), saturated)


def test_byte_0x71_is_a_half_and_six(kernels: Any) -> None:
    packed = np.full((1, 16), 0x71, np.uint8)
    got = kernels(ops.mxfp4_dequant, packed, np.full((1, 1), 127, np.uint8))
    values = codecs.decode_bf16(got.view(np.uint16))
    np.testing.assert_array_equal(values, np.tile(np.float32([0.5, 6]), (1, 16)))


def test_no_rows(kernels: Any) -> None:
    packed, scales = np.zeros((0, 16), np.uint8), np.zeros((0, 1), np.uint8)
    assert kernels(ops.mxfp4_dequant, packed, scales).shape == (0, 32)
