"""Scales and elements, encoded and decoded: every byte means what the formats say."""

import ml_dtypes
import numpy as np
import pytest

from nbmoe import ops, reference
from nbmoe.formats import FORMATS, MXFP4, MXFP8, NVFP4
from nbmoe.layouts import deinterleave_scales, interleave_scales
from tests.bug_cases.grouped import types

BF16 = ml_dtypes.bfloat16
E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def dequantize(kernels, byte, codes):
    """(len(codes),) float32 of packed e2m1 codes under one e8m0 byte."""
    packed = np.zeros((1, 16), np.uint8)
    packed[0, : len(codes) // 2] = np.array(codes[0::2]) | np.array(codes[1::2]) << 4
    scales = np.full((1, 1), byte, np.uint8)
    y = kernels(ops.mxfp4_dequant, packed, scales)
    return y.view(BF16).astype(np.float32)[0, : len(codes)]


@pytest.mark.parametrize("byte", [0, 1, *range(100, 121), 254])
def test_e8m0_is_a_power_of_two(kernels, byte):
    """NVIDIA/TransformerEngine#3262 (0 became 0, 255 infinity), 1CatAI/1Cat-vLLM#222 (103 to 112
    flushed to zero), vllm-project/vllm#46676 (added to the exponent field), #51946, #43416 (read
    as an integer)."""
    with np.errstate(over="ignore"):  # 6 * 2^127 is infinite
        expected = (E2M1 * np.float32(2.0 ** (byte - 127))).astype(BF16).astype(np.float32)
    got = dequantize(kernels, byte, list(range(16)))
    assert got.tobytes() == expected.tobytes()


def test_e8m0_255_is_nan(kernels):
    """NVIDIA/TransformerEngine#3262."""
    assert np.isnan(dequantize(kernels, 255, list(range(16)))).all()


@pytest.mark.parametrize(
    ("amax", "exponents"),
    [(6.0, (0, 0, 0)), (6.5, (0, 0, 1)), (7.0, (0, 1, 1)), (12.0, (1, 1, 1)), (24.0, (2, 2, 2))],
)
def test_e8m0_rules(kernels, amax, exponents):
    """vllm-project/vllm#43557, ROCm/aiter#3212: the rule differed between kernel and reference.
    12 and 24 flip when 1/6 is a unit in the last place too large."""
    x = np.zeros((1, 32), BF16)
    x[0, 3] = amax
    for rule, exponent in zip(("floor", "even", "rceil"), exponents, strict=True):
        _, scales = kernels(ops.quantize_dynamic_block_scaled, x, **types(MXFP4), scale_rule=rule)
        assert scales.view(np.uint8)[0, 0, 0, 0, 0] == 127 + exponent, rule


@pytest.mark.parametrize(("amax", "exponent"), [(448.0, 0), (449.0, 0), (14.0, -5), (28.0, -4)])
def test_e8m0_of_mxfp8(kernels, amax, exponent):
    """As above with 1/448; 449 is 448 in bfloat16."""
    x = np.zeros((1, 32), BF16)
    x[0, 31] = -amax
    _, scales = kernels(ops.quantize_dynamic_block_scaled, x, **types(MXFP8))
    assert scales.view(np.uint8)[0, 0, 0, 0, 0] == 127 + exponent


def test_midpoints_of_e2m1_round_to_even(kernels):
    """ROCm/aiter#3992, #4030: "round even" rounded 0.25, 1.25, 2.5 and 5 away from zero."""
    middles = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    down, up = middles * np.float32(1 - 2**-8), middles * np.float32(1 + 2**-7)
    x = np.zeros((1, 32), np.float32)
    x[0, 0], x[0, 1:8], x[0, 8:15], x[0, 15:22], x[0, 22:29] = 6, middles, down, up, -middles
    even = [0, 1, 1, 2, 2, 4, 4]
    for fmt in (MXFP4, NVFP4):
        rows = x if fmt is MXFP4 else np.concatenate([x[:, :16], x[:, :1], x[:, 16:31]], axis=1)
        codes, _ = kernels(ops.quantize_dynamic_block_scaled, rows.astype(BF16), **types(fmt))
        nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1)
        values = E2M1[nibbles]
        exact = rows.astype(BF16).astype(np.float32)[0]
        nearest = np.abs(E2M1[:8, None] - np.abs(exact)).min(axis=0)
        assert (np.abs(np.abs(values) - np.abs(exact)) == nearest).all()
        assert [int(np.abs(v) * 2) for v in values[1:8]] == [2 * e for e in even]


def test_e4m3_subnormal_scales(kernels):
    """local-inference-lab/b12x#388: 0x01 to 0x07 decoded with the normal formula; and
    vllm-project/vllm#34577, #37464: small scales lost after a shift in float16."""
    k, n = 16, 8
    for byte in (*range(1, 8), 0x08, 0x38):
        weight = np.full((1, n, k // 2), 0x22, np.uint8)
        hidden = np.full((1, k // 2), 0x22, np.uint8)
        a_scales = interleave_scales(np.full((1, 1), 0x38, np.uint8))
        b_scales = interleave_scales(np.full((1, n, 1), byte, np.uint8))
        slots = np.array([0, 1], np.uint32), np.zeros(1, np.uint32), np.zeros(1, np.int32)
        factor = np.float32([2.0**20])
        y = kernels(
            ops.grouped_matmul_block_scaled,
            *(hidden, weight, a_scales, b_scales, *slots, factor),
        )
        scale = float(np.uint8(byte).view(ml_dtypes.float8_e4m3fn))
        assert (y.view(BF16).astype(np.float64) == 16 * scale * 2.0**20).all(), byte


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_scale_tiles_are_no_rows(kernels, fmt):
    """The tile layout read as row-major, and tiles tiled again (modular/modular#6600)."""
    rows, columns = 130, 6
    scales = (np.arange(rows * columns) % 256).astype(np.uint8).reshape(rows, columns)
    tiles = kernels(ops.block_scales_interleave, scales, fmt.block)
    for r, c in ((0, 0), (129, 5), (31, 4), (32, 3), (127, 1)):
        assert tiles[r // 128, c // 4, r % 32, r % 128 // 32, c % 4] == scales[r, c]
    assert (deinterleave_scales(tiles, rows, columns) == scales).all()
    with pytest.raises(ValueError, match="scales"):
        kernels(ops.block_scales_interleave, tiles, fmt.block)


def test_low_nibble_is_even(kernels):
    """0x71 is (0.5, 6)."""
    packed = np.full((1, 16), 0x71, np.uint8)
    y = kernels(ops.mxfp4_dequant, packed, np.full((1, 1), 127, np.uint8)).view(BF16)
    assert y.astype(np.float32)[0].tolist() == [0.5, 6.0] * 16
    x = np.tile(np.float32([0.5, 6.0]), 16).reshape(1, 32).astype(BF16)
    codes, _ = reference.quantize_dynamic_block_scaled(x, **types(MXFP4))
    assert (codes == 0x71).all()


def test_static_fp8_saturates(kernels):
    """vllm-project/vllm#4614: values beyond 448 times the scale became NaN."""
    x = np.array([[500.0, -1e30, 448.0, np.inf]], BF16)
    q = kernels(ops.quantize_static_scaled_float8, x, 1.0)
    assert q.view(np.uint8).tolist() == [[0x7E, 0xFE, 0x7E, 0x7E]]
