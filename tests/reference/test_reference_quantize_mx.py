"""P1: MX quantization equals an independent implementation and known answers."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbmoe import codecs, layouts, reference
from nbmoe.errors import ConfigError, ScaleError, ShapeError
from nbmoe.formats import MXFP4, MXFP8, SCALE_RULES
from nbmoe.reference.quantize import quantize_blocks

BF16 = ml_dtypes.bfloat16
MX = (MXFP4, MXFP8)
TYPES = {
    "mxfp4": {"sf_vector_size": 32, "scales_type": "float8_e8m0fnu"},
    "mxfp8": {
        "sf_vector_size": 32,
        "scales_type": "float8_e8m0fnu",
        "out_type": "float8_e4m3fn",
    },
}


def exponent_by_fractions(amax, fmt, rule):
    """The scale's exponent in exact arithmetic, from the rules' definitions."""
    if amax == 0:
        return -127
    exact, top = Fraction(float(amax)), {"mxfp4": Fraction(6), "mxfp8": Fraction(448)}[fmt.name]
    floor = math.frexp(float(amax))[1] - 1
    if rule == "rceil":
        exponent = floor - 12
        while Fraction(2) ** exponent * top < exact:
            exponent += 1
    elif rule == "floor":
        exponent = floor - {"mxfp4": 2, "mxfp8": 8}[fmt.name]
    else:
        # Rounded to the element's mantissa, does amax reach the next power of two?
        bits = {"mxfp4": 1, "mxfp8": 3}[fmt.name]
        reaches = exact >= Fraction(2) ** floor * (2 - Fraction(1, 2 ** (bits + 1)))
        exponent = floor + reaches - {"mxfp4": 2, "mxfp8": 8}[fmt.name]
    return max(exponent, -127)


def code_by_search(value, fmt):
    """The nearest code by comparing exact distances; a tie goes to the even code."""
    element = fmt.element
    codes = range(element.max_code + 1)
    table = [Fraction(float(v)) for v in codecs.decode_table(element)[: element.max_code + 1]]
    magnitude = abs(value)
    if magnitude == 0:
        return 0
    code = min(codes, key=lambda c: (abs(table[c] - magnitude), c % 2))
    return code


def independent(block, fmt, rule):
    """Codes and scale byte of one finite block, in exact arithmetic."""
    exponent = exponent_by_fractions(np.abs(block).max(), fmt, rule)
    factor = Fraction(2) ** -exponent
    codes = [code_by_search(Fraction(float(x)) * factor, fmt) for x in block]
    sign = 1 << (fmt.element.bits - 1)
    codes = [c | sign if np.signbit(x) else c for c, x in zip(codes, block, strict=True)]
    return codes, exponent + 127


def quantized(block, fmt, rule="rceil"):
    """Codes of one block, unpacked, and its scale byte."""
    codes, scales = quantize_blocks(np.asarray([block], np.float32), fmt, rule=rule)
    codes = codecs.unpack_nibbles(codes) if fmt.per_byte == 2 else codes
    return codes[0].tolist(), int(scales[0, 0])


def blocks(rng):
    """Blocks in which a wrong rule, tie or range would show, all exact in bf16."""
    ties = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 0, 17 / 16, 1.0625], (6, 32))
    power = np.exp2(rng.integers(-120, 120, (6, 1)))
    normal = rng.standard_normal((6, 32))
    tiny = rng.standard_normal((4, 32)) * 2.0**-128
    huge = rng.uniform(-1, 1, (2, 32)) * 3.3e38
    zero = np.zeros((1, 32)) * -1.0
    every = np.concatenate([ties * power, ties, normal, normal * power, tiny, huge, zero])
    return every.astype(np.float32).astype(BF16).astype(np.float32)


@pytest.mark.parametrize("fmt", MX, ids=lambda f: f.name)
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_blocks_in_exact_arithmetic(fmt, rule):
    for block in blocks(np.random.default_rng(4)):
        assert quantized(block, fmt, rule) == independent(block, fmt, rule)


@given(st.lists(st.integers(0, 0xFFFF), min_size=32, max_size=32), st.sampled_from(SCALE_RULES))
@settings(deadline=None, max_examples=10)
def test_any_finite_bf16_block(bits, rule):
    bits = [b if b & 0x7F80 != 0x7F80 else b & 0xBFFF for b in bits]
    block = codecs.decode_bf16(np.array(bits, np.uint16))
    for fmt in MX:
        assert quantized(block, fmt, rule) == independent(block, fmt, rule)


@pytest.mark.parametrize(
    ("amax", "floor", "even", "rceil"),
    [(6.0, 0, 0, 0), (6.5, 0, 0, 1), (7.0, 0, 1, 1), (12.0, 1, 1, 1), (24.0, 2, 2, 2)],
)
def test_rules_that_tell_exponents_of_mxfp4_apart(amax, floor, even, rceil):
    """6.5 moves only "rceil", 7 also "even"; 12 and 24 are lost by a reciprocal one ulp high."""
    expected = {"floor": floor, "even": even, "rceil": rceil}
    for rule in SCALE_RULES:
        assert quantized([amax] + [0.0] * 31, MXFP4, rule)[1] - 127 == expected[rule], rule


@pytest.mark.parametrize(
    ("amax", "floor", "even", "rceil"),
    [(448.0, 0, 0, 0), (480.0, 0, 0, 1), (496.0, 0, 1, 1), (14.0, -5, -5, -5), (28.0, -4, -4, -4)],
)
def test_rules_that_tell_exponents_of_mxfp8_apart(amax, floor, even, rceil):
    expected = {"floor": floor, "even": even, "rceil": rceil}
    for rule in SCALE_RULES:
        assert quantized([amax] + [0.0] * 31, MXFP8, rule)[1] - 127 == expected[rule], rule


@pytest.mark.parametrize("fmt", MX, ids=lambda f: f.name)
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_one_ulp_of_float32_decides(fmt, rule):
    """Maxima that are no bf16, as after an activation: on, above and below each threshold."""
    thresholds = np.float32([1.5, 1.75, 1.9375, 2.0]) * np.float32(2) ** np.float32(
        [[-7], [0], [9]]
    )
    for threshold in thresholds.ravel():
        for towards in (0, threshold, np.inf):
            block = np.zeros(32, np.float32)
            block[3] = np.nextafter(threshold, np.float32(towards))
            assert quantized(block, fmt, rule) == independent(block, fmt, rule)


@pytest.mark.parametrize(
    ("value", "power"), [(1.0, 1.0), (1.1, 2.0), (4.34, 8.0), (0.0, 2.0**-127)]
)
def test_scale_is_rounded_up_to_a_power_of_two(value, power):
    byte = codecs.ceil_e8m0(np.array([value], np.float32))
    assert codecs.decode_e8m0(byte)[0] == power


def test_amax_6_leaves_the_grid_of_e2m1_unchanged():
    grid = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert quantized(grid * 2, MXFP4) == (list(range(16)) * 2, 127)


def test_midpoints_go_to_the_even_code():
    middles = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5] + [0.0] * 24
    assert quantized(middles, MXFP4)[0][:8] == [7, 0, 2, 2, 4, 4, 6, 6]
    # 448 fixes the scale at 1; steps of 1/8 from 1 on, of 2^-9 below 2^-6.
    middles = [448, 1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10, 15 * 2.0**-10, -432] + [0.0] * 25
    assert quantized(middles, MXFP8)[0][:7] == [0x7E, 0x38, 0x3A, 0, 2, 8, 0xFE]


def test_low_nibble_is_the_even_element():
    codes, _ = quantize_blocks(np.float32([[0.5, 6.0] * 16]), MXFP4)
    assert set(codes.ravel().tolist()) == {0x71}


@pytest.mark.parametrize("fmt", MX, ids=lambda f: f.name)
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_special_blocks(fmt, rule):
    nan_code, top = (7, 7) if fmt is MXFP4 else (0x7F, 0x7E)
    sign = 1 << (fmt.element.bits - 1)
    assert quantized([0.0] * 32, fmt, rule) == ([0] * 32, 0)
    assert quantized([-0.0] * 32, fmt, rule) == ([sign] * 32, 0)
    assert quantized([np.nan, -1.0] * 16, fmt, rule) == ([nan_code] * 32, 255)
    codes, byte = quantized([np.inf, -np.inf, 1.0, -1.0] * 8, fmt, rule)
    assert codes == [top, top | sign, 0, sign] * 8
    # NVIDIA's conversion saturates at 254; exponents less the element's largest stay below.
    assert byte == (254 if rule == "rceil" else 255 - fmt.element.max_exponent)


def test_subnormal_maxima_use_the_factor_2_to_the_127():
    """amax = 2^-126: byte 0 and codes of x * 2^127, exactly."""
    codes, byte = quantized([2.0**-126, 2.0**-128, -(2.0**-133)] + [0.0] * 29, MXFP4)
    assert (codes[:3], byte) == ([4, 1, 8], 0)
    codes, byte = quantized([2.0**-126, 2.0**-128, -(2.0**-133)] + [0.0] * 29, MXFP8)
    assert (codes[:3], byte) == ([0x40, 0x30, 0x88], 0)


# ------------------------------------------------------------------ grouped and the others


def random_rows(rows, k, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32).astype(BF16)


@pytest.mark.parametrize("fmt", MX, ids=lambda f: f.name)
@pytest.mark.parametrize("k", [32, 288, 352])
def test_each_group_equals_its_rows_alone(fmt, k):
    counts, x = [100, 0, 160], random_rows(263, k)
    start = np.uint32([0, 100, 100, 260])
    codes, tiles = reference.grouped_quantize_dynamic_block_scaled(
        x, start, layouts.scales_offset(start), np.int32([4, 0, 9]), None, **TYPES[fmt.name]
    )
    assert (codes.dtype.name, tiles.dtype.name) == (fmt.codes_dtype, fmt.scales_dtype)
    assert tiles.shape == (3 + 3, -(-k // 128), 32, 4, 4)
    row = tile = 0
    for count in counts:
        values = x[row : row + count].astype(np.float32)
        if count:
            own, scales = quantize_blocks(values, fmt)
            used = -(-count // 128)
            np.testing.assert_array_equal(codes[row : row + count].view(np.uint8), own)
            padded = layouts.interleave_scales(scales)
            np.testing.assert_array_equal(tiles[tile : tile + used].view(np.uint8), padded)
            row, tile = row + count, tile + used
    assert not codes[row:].view(np.uint8).any() and not tiles[tile:].view(np.uint8).any()


@pytest.mark.parametrize("name", TYPES)
def test_rows_without_groups_equal_one_group(name):
    x = random_rows(131, 96)
    alone = reference.quantize_dynamic_block_scaled(x, **TYPES[name])
    start = np.uint32([0, 131])
    zeros = np.zeros(1, np.uint32), np.zeros(1, np.int32)
    grouped = reference.grouped_quantize_dynamic_block_scaled(x, start, *zeros, **TYPES[name])
    np.testing.assert_array_equal(alone[0].view(np.uint8), grouped[0].view(np.uint8))
    np.testing.assert_array_equal(alone[1].view(np.uint8), grouped[1][:2].view(np.uint8))


def test_row_scaled_in_exact_arithmetic():
    """Divide, round to bf16, quantize: each step rounded once from its exact value."""
    x = random_rows(200, 32, seed=3)
    x[1] *= np.float32(1000)
    codes, tiles, row_scales = reference.grouped_quantize_nvfp4_row_scaled(
        x, np.uint32([0, 200]), np.zeros(1, np.uint32)
    )
    values = x.astype(np.float64)
    amax = np.abs(values).max(axis=1)
    want = (amax / 2688).astype(np.float32).astype(BF16)
    np.testing.assert_array_equal(row_scales, want)
    inverse = (1 / want.astype(np.float64)).astype(np.float32).astype(np.float64)
    scaled = (values * inverse[:, None]).astype(np.float32).astype(BF16)
    again = reference.quantize_dynamic_block_scaled(scaled)
    np.testing.assert_array_equal(codes, again[0])
    np.testing.assert_array_equal(tiles[:2], again[1])
    assert (np.abs(scaled.astype(np.float32)).max(axis=1) > 2600).all()


def test_relu2_squares_what_is_positive():
    x = np.float32([[-3.0, 2.0, -0.0, 1.5] * 8]).astype(BF16)
    args = (np.uint32([0, 1]), np.zeros(1, np.uint32))
    squared = np.float32([[0, 4, 0, 2.25] * 8]).astype(BF16)
    for got, want in zip(
        reference.grouped_quantize_nvfp4_row_scaled(x, *args, relu2=True),
        reference.grouped_quantize_nvfp4_row_scaled(squared, *args),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


def test_bad_arguments():
    x, start, zero = random_rows(2, 96), np.uint32([0, 2]), np.zeros(1, np.uint32)
    ids = np.zeros(1, np.int32)
    grouped = reference.grouped_quantize_dynamic_block_scaled
    with pytest.raises(ConfigError, match="sf_tensor: expected None: mxfp4 and mxfp8"):
        grouped(x, start, zero, ids, np.ones(1, np.float32), **TYPES["mxfp4"])
    with pytest.raises(ScaleError, match="sf_tensor is required"):
        grouped(x, start, zero, ids)
    with pytest.raises(ConfigError, match="scale_rule: expected one of"):
        grouped(x, start, zero, ids, **TYPES["mxfp8"], scale_rule="ceil")
    with pytest.raises(ConfigError, match="'rceil' for NVFP4"):
        reference.quantize_dynamic_block_scaled(x, scale_rule="floor")
    with pytest.raises(ConfigError, match="tensor_sf: expected 1"):
        reference.quantize_dynamic_block_scaled(x, tensor_sf=2, **TYPES["mxfp8"])
    with pytest.raises(ShapeError, match="K % 32 == 0"):
        reference.quantize_dynamic_block_scaled(x[:, :48], **TYPES["mxfp8"])
