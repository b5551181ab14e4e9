"""Grouped matmuls of bfloat16 rows: by the definition, near float64, equal with MXFP4 weights."""

import ml_dtypes
import numpy as np
import pytest

from nbmoe import codecs, layouts, reference
from nbmoe.formats import MXFP4
from nbmoe.reference import oracle
from nbmoe.reference.matmul import decode_blocks
from nbmoe.reference.matmul_ragged import grouped_matmul_ragged, grouped_matmul_w4a16
from nbmoe.reference.tensor_core import BFLOAT16, fused_dot

BF16 = ml_dtypes.bfloat16
STARTS = np.array([0, 3, 3, 8, 20], np.uint32)
IDS = np.array([2, 0, -1, 3], np.int32)


def operands(n, k, seed=0):
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((21, k)).astype(BF16)
    weight = (rng.standard_normal((4, n, k)) * 2.0 ** rng.integers(-6, 6, (4, n, 1))).astype(BF16)
    bias = rng.standard_normal((4, n)).astype(BF16)
    return hidden, weight, bias


@pytest.mark.parametrize("k", [8, 64, 200])
@pytest.mark.parametrize("has_bias", [False, True])
def test_elements_follow_the_definition(k, has_bias):
    hidden, weight, bias = operands(16, k)
    out = grouped_matmul_ragged(
        hidden, weight, STARTS, IDS, bias=bias if has_bias else None, estimated_total_m=1
    )
    assert out.dtype == BF16
    padded = np.zeros((2, -(-k // 64) * 64), BF16)
    for m, e, n in ((0, 2, 0), (2, 2, 15), (8, 3, 3), (19, 3, 8)):
        padded[0, :k], padded[1, :k] = hidden[m], weight[e, n]
        bits, acc = padded.view(np.uint16).tolist(), 0
        for block in range(0, padded.shape[1], 64):
            for j in range(4):
                step = [block + j + 4 * i for i in range(16)]
                terms = ([bits[0][i] for i in step], [bits[1][i] for i in step])
                acc = fused_dot(*terms, acc, BFLOAT16)
        value = np.uint32(acc).view(np.float32)
        if has_bias:
            value = value + bias[e, n].astype(np.float32)
        assert out[m, n] == value.astype(BF16)
    assert not out[3:8].view(np.uint16).any()
    assert not out[20:].view(np.uint16).any()


def test_error_against_float64():
    hidden, weight, bias = operands(40, 1096, seed=1)
    out = grouped_matmul_ragged(hidden, weight, STARTS, IDS, bias=bias).astype(np.float64)
    wide = [x.astype(np.float64) for x in (hidden, weight)]
    exact = oracle.grouped_matmul(*wide, STARTS, IDS, bias=bias)
    magnitude = oracle.grouped_matmul(*map(np.abs, wide), STARTS, IDS)
    cuts = 4 * -(-1096 // 64) * (17 * 2.0**-25 + 2.0**-23) * magnitude
    assert (np.abs(out - exact) <= np.abs(exact) * 2.0**-8 + cuts).all()


def test_w4a16_is_the_matmul_of_dequantized_weights():
    rng = np.random.default_rng(2)
    packed = rng.integers(0, 256, (4, 24, 48), dtype=np.uint8)
    scales = rng.integers(0, 256, (4, 24, 3), dtype=np.uint8)
    hidden, _, bias = operands(24, 96)
    weight = codecs.encode_bf16(decode_blocks(packed, scales, MXFP4))
    tiles = layouts.interleave_scales(scales)
    out = grouped_matmul_w4a16(hidden, packed, tiles, STARTS, IDS, bias=bias)
    expected = grouped_matmul_ragged(hidden, weight, STARTS, IDS, bias=bias)
    np.testing.assert_array_equal(out.view(np.uint16), expected.view(np.uint16))
    typed = tiles.view(ml_dtypes.float8_e8m0fnu)
    again = reference.grouped_matmul_w4a16(
        hidden.view(np.uint16), packed, typed, STARTS, IDS, bias=bias.view(np.uint16)
    )
    np.testing.assert_array_equal(again.view(np.uint16), expected.view(np.uint16))
