"""P1: fma and exp equal exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest

from nbmoe.reference.float32 import exp, fma, sigmoid


def round_to_f32(exact):
    """A Fraction rounded once to float32, nearest even, by integer arithmetic."""
    if exact == 0:
        return np.float32(0)
    sign, exact = (-1 if exact < 0 else 1), abs(exact)
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    if Fraction(2) ** exponent > exact:
        exponent -= 1
    lsb = max(exponent, -126) - 23
    steps = exact / Fraction(2) ** lsb
    whole = steps.numerator // steps.denominator
    rest = steps - whole
    whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1)
    value = sign * math.ldexp(whole, lsb)
    return np.float32(value) if abs(value) < 2.0**128 else np.float32(sign * np.inf)


def patterns(rng, count):
    return rng.integers(0, 1 << 32, count).astype(np.uint32).view(np.float32)


def close_to_ties(rng, count):
    """a * b is half an ulp of c but for a few units of float64: two roundings may differ.

    (1 + i 2**-23)(1 - j 2**-24) = 1 + m 2**-24 - i j 2**-47 with m = 2 i - j; float64 holds the sum
    with c to 2**-28 of a * b.
    """
    i, m = np.meshgrid(np.arange(1, 6000), np.arange(4))
    j = 2 * i - m
    near = np.abs(m * 2.0**-24 - i * j * 2.0**-47) < 2.0**-25
    pick = rng.integers(0, near.sum(), count)
    a = 1 + i[near][pick] * 2.0**-23
    b = 1 - j[near][pick] * 2.0**-24
    scale = np.exp2(rng.integers(-60, 60, count)).astype(np.float32)
    a = a.astype(np.float32)
    b = b.astype(np.float32) * np.float32(2.0**-24) * scale * rng.choice([-1, 1], count)
    c = rng.integers(1 << 23, 1 << 24, count) * np.float32(2.0**-23) * scale
    return a, b.astype(np.float32), c.astype(np.float32)


def product_ties(rng, count):
    """a * b lies midway between two float32 and c, beyond float64, says on which side."""
    a = 2 * rng.integers(1 << 11, 5792 // 2, count) + 1  # odd, so that 25 bits are all needed
    b = 2 * rng.integers(1 << 11, 5792 // 2, count) + 1
    scale = np.exp2(rng.integers(-30, 30, count))
    c = scale * np.exp2(rng.integers(-60, -30, count)) * rng.choice([-1, 1], count)
    sign = rng.choice([-1, 1], count)
    return (a * scale * sign).astype(np.float32), b.astype(np.float32), c.astype(np.float32)


def test_fma_rounds_once():
    rng = np.random.default_rng(0)
    near = rng.standard_normal((3, 3000)).astype(np.float32)
    wild = np.stack([patterns(rng, 4000) for _ in range(3)])
    wild = wild[:, np.isfinite(wild).all(axis=0)]
    tiny = near * np.float32(1e-23)
    tiny[2] *= np.float32(1e-17)
    for a, b, c in (near, wild, tiny, close_to_ties(rng, 6000), product_ties(rng, 4000)):
        got = fma(a, b, c)
        expected = [
            round_to_f32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
            for x, y, z in zip(a, b, c, strict=True)
        ]
        np.testing.assert_array_equal(got, np.array(expected))


def test_fma_inputs_reach_double_rounding():
    for make in (close_to_ties, product_ties):
        a, b, c = make(np.random.default_rng(0), 6000)
        rounded_twice = (a.astype(np.float64) * b + c).astype(np.float32)
        assert (fma(a, b, c) != rounded_twice).sum() > 100


@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [
        (np.inf, 1, 0, np.inf),
        (np.inf, 0, 1, np.nan),
        (np.inf, 1, -np.inf, np.nan),
        (1, 1, -np.inf, -np.inf),
        (np.nan, 1, 1, np.nan),
        (3e38, 2, 0, np.inf),
        (3e38, 2, -3e38, 3e38),
    ],
)
def test_fma_of_special_values(a, b, c, expected):
    a, b, c, expected = (np.float32(v) for v in (a, b, c, expected))
    np.testing.assert_array_equal(fma(a, b, c), expected)


def test_fma_keeps_the_sign_of_zero():
    one, zero = np.float32(1), np.float32(0)
    assert np.signbit(fma(-one, zero, -zero))
    assert not np.signbit(fma(-one, zero, zero))
    assert not np.signbit(fma(one, one, -one))


def test_exp_is_within_one_ulp():
    x = np.linspace(-87, 88.7, 400_001).astype(np.float32)
    true = np.exp(x.astype(np.float64))
    ulp = np.spacing(true.astype(np.float32)).astype(np.float64)
    assert (np.abs(exp(x) - true) / ulp).max() < 1


def test_exp_follows_its_definition_step_by_step():
    """Each step in exact arithmetic, each rounded by hand."""
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.uniform(-88, 89, 300), rng.standard_normal(300), [0, -0.0, 88, -88]])
    x = x.astype(np.float32)
    coefficients = [round_to_f32(Fraction(1, f)) for f in (5040, 720, 120, 24, 6, 2, 1, 1)]
    log2_e, magic = Fraction(float(np.float32(1.4426950408889634))), Fraction(12582912)
    high, low = Fraction(float(np.float32(0.693359375))), Fraction(float(np.float32(2.12194440e-4)))

    def step(exact):
        return Fraction(float(round_to_f32(exact)))

    for value, got in zip(x, exp(x), strict=True):
        v = Fraction(float(value))
        n = step(step(v * log2_e + magic) - magic)
        r = step(step(v - n * high) + n * low)
        p = Fraction(float(coefficients[0]))
        for coefficient in coefficients[1:]:
            p = step(p * r + Fraction(float(coefficient)))
        half = n // 2
        expected = round_to_f32(step(p * Fraction(2) ** half) * Fraction(2) ** (n - half))
        assert got == expected, value


def test_exp_at_its_ends():
    x = np.array([89, 100, np.inf, -88, -1000, -np.inf, np.nan, 0], np.float32)
    low = exp(np.float32(-88))
    expected = np.array([np.inf, np.inf, np.inf, low, low, low, np.nan, 1], np.float32)
    np.testing.assert_array_equal(exp(x), expected)
    assert 0 < low < np.finfo(np.float32).tiny


def test_sigmoid():
    x = np.array([-1000, 0, 1000, np.nan], np.float32)
    np.testing.assert_array_equal(sigmoid(x), np.array([0, 0.5, 1, np.nan], np.float32))
    x = np.linspace(-20, 20, 1001).astype(np.float32)
    np.testing.assert_allclose(sigmoid(x), 1 / (1 + np.exp(-x.astype(np.float64))), rtol=5e-7)
