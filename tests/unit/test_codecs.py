"""P1: codecs equal ml_dtypes on every code and on every input that can round differently."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from nbmoe import codecs
from nbmoe.errors import ConfigError, DTypeError, RangeError, ShapeError
from nbmoe.formats import E2M1, E4M3, E5M2

ML_DTYPES = {
    E2M1: ml_dtypes.float4_e2m1fn,
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
}
ELEMENTS = pytest.mark.parametrize("element", ML_DTYPES, ids=lambda e: e.name)
NAN = np.float32(np.nan)
NEGATIVE_NAN = np.uint32(0xFFC00001).view(np.float32)


def f32(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


def ml_values(element):
    """Every code's value, by ml_dtypes."""
    codes = np.arange(2**element.bits, dtype=np.uint8)
    return codes.view(ML_DTYPES[element]).astype(np.float32)


def rounding_inputs(element):
    """Every bf16 and f16, every value and midpoint of the format +-1 ulp, subnormals, noise."""
    values = ml_values(element).astype(np.float64)
    values = np.unique(np.abs(values[np.isfinite(values)]))
    beyond = 2 * values[-1] - values[-2]  # where the format would go on
    values = np.append(values, beyond)
    middles = (values[1:] + values[:-1]) / 2
    centres = np.concatenate([values, middles]).astype(np.float32).view(np.uint32).astype(np.int64)
    near = (centres[:, None] + np.arange(-1, 2)).clip(0).ravel()
    rng = np.random.default_rng(0)
    patterns = np.concatenate(
        [
            near,
            near | 0x80000000,
            np.arange(1 << 16) << 16,
            np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32),
            [1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF, 0x800000, 0x7F7FFFFF],
            rng.integers(0, 1 << 32, 100_000),
        ]
    )
    return f32(patterns.astype(np.uint32))


@ELEMENTS
def test_decode_every_code(element):
    codes = np.arange(2**element.bits, dtype=np.uint8)
    np.testing.assert_array_equal(codecs.decode(codes, element), ml_values(element))
    finite = np.isfinite(ml_values(element))
    signs = np.signbit(codecs.decode(codes, element))
    np.testing.assert_array_equal(signs[finite], np.signbit(ml_values(element))[finite])


@ELEMENTS
def test_shared_tables_cannot_be_changed(element):
    table = codecs.decode_table(element)
    assert table.shape == (2**element.bits,)
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 1


@ELEMENTS
def test_encode_rounds_like_ml_dtypes(element):
    x = rounding_inputs(element)
    x = x[np.isfinite(x)]
    # ml_dtypes does not saturate: clamp for it.
    clamped = np.clip(x, -element.max_value, element.max_value).astype(np.float32)
    expected = clamped.astype(ML_DTYPES[element]).view(np.uint8)
    np.testing.assert_array_equal(codecs.encode(x, element), expected)


@ELEMENTS
def test_encode_inverts_decode(element):
    codes = np.arange(2**element.bits, dtype=np.uint8)
    codes = codes[np.isfinite(ml_values(element))]
    np.testing.assert_array_equal(codecs.encode(codecs.decode(codes, element), element), codes)


@pytest.mark.parametrize(
    ("encode", "expected"),
    [
        # NaN, -NaN, inf, -inf, 0, -0, -1, smallest f32, 3e38: NVIDIA's cvt.rn.satfinite
        (codecs.encode_e2m1, [0x7, 0x7, 0x7, 0xF, 0x0, 0x8, 0xA, 0x0, 0x7]),
        (codecs.encode_e4m3, [0x7F, 0x7F, 0x7E, 0xFE, 0x00, 0x80, 0xB8, 0x00, 0x7E]),
        (codecs.encode_e5m2, [0x7F, 0x7F, 0x7B, 0xFB, 0x00, 0x80, 0xBC, 0x00, 0x7B]),
    ],
)
def test_special_values(encode, expected):
    x = np.array([NAN, NEGATIVE_NAN, np.inf, -np.inf, 0, -0.0, -1, 1e-45, 3e38], np.float32)
    assert encode(x).tolist() == expected


def test_e2m1_ties_go_to_even_codes():
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    even = np.array([0, 1, 1, 2, 2, 4, 4], np.float32)
    np.testing.assert_array_equal(codecs.decode_e2m1(codecs.encode_e2m1(ties)), even)
    above = np.array([0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    below = np.array([0, 0.5, 1, 1.5, 2, 3, 4], np.float32)
    for direction, nearest in ((np.inf, above), (-np.inf, below)):
        x = np.nextafter(ties, np.float32(direction))
        np.testing.assert_array_equal(codecs.decode_e2m1(codecs.encode_e2m1(x)), nearest)
        np.testing.assert_array_equal(codecs.decode_e2m1(codecs.encode_e2m1(-x)), -nearest)


def test_e4m3_saturates_at_448():
    x = np.array([448, 463.9, 464, 464.1, 480, 1e30], np.float32)
    assert codecs.encode_e4m3(x).tolist() == [0x7E] * 6


def test_shapes_are_kept():
    x = np.zeros((2, 0, 3), np.float32)
    assert codecs.encode_e4m3(x).shape == codecs.decode_e4m3(codecs.encode_e4m3(x)).shape == x.shape
    assert codecs.encode_e2m1(np.float32(6)).shape == ()
    strided = np.arange(8, dtype=np.float32)[::2]
    assert codecs.encode_e2m1(strided).tolist() == [0, 4, 6, 7]


def test_decode_e8m0_every_byte():
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(codecs.decode_e8m0(codes), expected)
    assert codecs.decode_e8m0(np.uint8(0)) == np.float32(2.0**-127)


def positive_f32():
    """Every bf16, every exponent with the mantissas around its ends, some noise."""
    exponents = np.arange(256)[:, None] << 23
    ends = [0, 1, 0x1FFFFF, 0x200000, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001]
    ends += [0x6FFFFF, 0x700000, 0x77FFFF, 0x780000, 0x7FFFFF]
    noise = np.random.default_rng(1).integers(0, 0x7F800000, 20_000)
    patterns = np.concatenate([(exponents | ends).ravel(), np.arange(1 << 15) << 16, noise])
    values = f32(patterns.astype(np.uint32))
    return values[np.isfinite(values)]


def log2_floor(value):
    return math.frexp(value)[1] - 1


def clip_byte(exponent):
    return min(max(exponent + 127, 0), 254)


def slow_ceil(value):
    """Byte of the smallest 2**k >= value, by exact comparison."""
    if value == 0:
        return 0
    k = log2_floor(value)
    return clip_byte(k if Fraction(value) == Fraction(2) ** k else k + 1)


def test_ceil_e8m0():
    x = positive_f32()
    expected = [slow_ceil(float(v)) for v in x]
    assert codecs.ceil_e8m0(x).tolist() == expected
    assert codecs.ceil_e8m0(-x).tolist() == expected
    special = np.array([NAN, NEGATIVE_NAN, np.inf, -np.inf, 1.1, 4.34], np.float32)
    assert codecs.ceil_e8m0(special).tolist() == [255, 255, 254, 254, 128, 130]


def slow_scale(amax, element, rule):
    """The three MX rules in exact arithmetic."""
    if amax == 0:
        return 0
    if rule == "rceil":
        return slow_ceil(float(np.float32(amax) * (np.float32(1) / np.float32(element.max_value))))
    k = log2_floor(amax)
    if rule == "even":
        # Where amax / 2**k rounds to 2 at the element's precision; a tie is already rounded up.
        step = Fraction(1, 2**element.mantissa_bits)
        k += Fraction(amax) / Fraction(2) ** k >= 2 - step / 2
    return clip_byte(k - element.max_exponent)


@pytest.mark.parametrize("element", [E2M1, E4M3], ids=lambda e: e.name)
@pytest.mark.parametrize("rule", ["rceil", "even", "floor"])
def test_mx_scale_rules(element, rule):
    x = positive_f32()
    x = x[(x == 0) | (x >= np.float32(2.0**-126))]
    expected = [slow_scale(float(v), element, rule) for v in x]
    assert codecs.encode_e8m0(x, element, rule).tolist() == expected


def test_mx_scale_rules_differ_where_documented():
    amax = np.array([6.0, 6.5, 7.0, 12.0, 24.0], np.float32)
    bytes_of = {
        rule: (codecs.encode_e8m0(amax, E2M1, rule).astype(int) - 127).tolist()
        for rule in ("rceil", "even", "floor")
    }
    assert bytes_of == {
        "rceil": [0, 1, 1, 1, 2],
        "even": [0, 0, 1, 1, 2],
        "floor": [0, 0, 0, 1, 2],
    }


@pytest.mark.parametrize(("rule", "infinity"), [("rceil", 254), ("even", 253), ("floor", 253)])
def test_mx_scale_of_special_blocks(rule, infinity):
    amax = np.array([0, NAN, NEGATIVE_NAN, np.inf, 1e-45], np.float32)
    assert codecs.encode_e8m0(amax, E2M1, rule).tolist() == [0, 255, 255, infinity, 0]


def test_bf16_rounds_like_ml_dtypes():
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    patterns = ((np.arange(1 << 16) << 16)[:, None] | low).ravel().astype(np.uint32)
    x = f32(patterns)
    got = codecs.encode_bf16(x)
    assert got.dtype == ml_dtypes.bfloat16
    nan = np.isnan(x)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(got.view(np.uint16)[~nan], expected.view(np.uint16)[~nan])
    assert (got.view(np.uint16)[nan] == 0x7FFF).all()


def test_bf16_decodes_bits_and_ml_dtypes_alike():
    bits = np.arange(1 << 16, dtype=np.uint16)
    typed = bits.view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(codecs.decode_bf16(bits), typed.astype(np.float32))
    np.testing.assert_array_equal(codecs.decode_bf16(typed), codecs.decode_bf16(bits))
    np.testing.assert_array_equal(codecs.bf16_bits(typed), bits)


def test_low_nibble_is_the_even_element():
    packed = codecs.pack_nibbles(codecs.encode_e2m1(np.array([0.5, 6.0], np.float32)))
    assert packed.tolist() == [0x71]
    every_byte = np.arange(256, dtype=np.uint8).reshape(4, 64)
    codes = codecs.unpack_nibbles(every_byte)
    assert codes.shape == (4, 128)
    np.testing.assert_array_equal(codes[:, 0::2] + 16 * codes[:, 1::2].astype(int), every_byte)
    np.testing.assert_array_equal(codecs.pack_nibbles(codes), every_byte)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: codecs.encode_e2m1(np.zeros(2)), DTypeError, "expected float32, got float64"),
        (lambda: codecs.encode_bf16(np.zeros(2, np.float16)), DTypeError, "expected float32"),
        (lambda: codecs.decode_e4m3(np.zeros(2, np.int8)), DTypeError, "expected uint8, got int8"),
        (
            lambda: codecs.decode_e2m1(np.array([16], np.uint8)),
            RangeError,
            "below 16, got 16 — unpack",
        ),
        (lambda: codecs.decode_bf16(np.zeros(2, np.float32)), DTypeError, "bfloat16"),
        (lambda: codecs.pack_nibbles(np.zeros(3, np.uint8)), ShapeError, "even last axis"),
        (lambda: codecs.pack_nibbles(np.uint8(3)), ShapeError, "even last axis"),
        (lambda: codecs.pack_nibbles(np.full(2, 16, np.uint8)), RangeError, "codes 0..15, got 16"),
        (lambda: codecs.unpack_nibbles(np.uint8(3)), ShapeError, "at least one axis"),
        (
            lambda: codecs.encode_e8m0(np.zeros(2, np.float32), E2M1, "ceil"),
            ConfigError,
            "rule: expected rceil | even | floor, got 'ceil'",
        ),
        (lambda: codecs.encode_e8m0(np.zeros(2), E2M1), DTypeError, "amax: expected float32"),
    ],
)
def test_bad_arguments(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)
