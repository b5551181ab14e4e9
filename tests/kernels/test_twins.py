"""Op twins against ml_dtypes, exact fractions and numpy."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from numba import njit

from nbmoe_kernels.device import convert, nvfp4
from nbmoe_kernels.device import math as device_math

CANONICAL_NAN = np.uint32(0x7FFFFFFF)

# numpy's scalar rules are not numba's; compiled twins are what both engines run.


def compiled(stub):
    return njit(error_model="numpy")(stub.op.twin)


compiled_sqrt = compiled(device_math.sqrt_rn)


def some_floats(seed, n=20000):
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, n, dtype=np.uint64).astype(np.uint32)
    special = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x007FFFFF, 0x7F7FFFFF])
    near = (rng.standard_normal(n) * np.exp2(rng.integers(-30, 30, n))).astype(np.float32)
    return np.concatenate([bits, special.astype(np.uint32), near.view(np.uint32)]).view(np.float32)


def assert_same_floats(got, want):
    """Equal bits; every NaN is the canonical one."""
    nan = np.isnan(want)
    np.testing.assert_array_equal(got.view(np.uint32)[nan], CANONICAL_NAN)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], want.view(np.uint32)[~nan])


@pytest.mark.parametrize(
    ("stub", "oracle"),
    [
        (device_math.add_rn, np.add),
        (device_math.sub_rn, np.subtract),
        (device_math.mul_rn, np.multiply),
        (device_math.div_rn, np.divide),
        (device_math.max_nan, np.maximum),
        (device_math.max_num, np.fmax),
        (device_math.min_nan, np.minimum),
        (device_math.min_num, np.fmin),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_arithmetic_equals_numpy(stub, oracle):
    a, b = some_floats(1), some_floats(2)
    b[::7] = a[::7]
    twin = compiled(stub)
    got = np.array([twin(x, y) for x, y in zip(a, b, strict=True)], np.float32)
    with np.errstate(all="ignore"):
        want = oracle(a, b)
    if oracle in (np.maximum, np.minimum, np.fmax, np.fmin):
        # numpy leaves the sign of a zero among equals open.
        zeros = (want == 0) & (got == 0)
        got[zeros] = want[zeros]
    assert_same_floats(got, want)


def test_zero_signs_of_min_and_max():
    minus, plus = np.float32(-0.0), np.float32(0.0)
    for a, b in ((minus, plus), (plus, minus)):
        for smaller in (device_math.min_num, device_math.min_nan):
            assert math.copysign(1, compiled(smaller)(a, b)) == -1
        for larger in (device_math.max_num, device_math.max_nan):
            assert math.copysign(1, compiled(larger)(a, b)) == 1


def test_square_root_equals_numpy():
    x = some_floats(13)
    got = np.array([compiled_sqrt(v) for v in x], np.float32)
    with np.errstate(invalid="ignore"):
        assert_same_floats(got, np.sqrt(x))


def test_integer_part_saturates():
    edges = [2.0**31, -(2.0**31), 2147483520.0, -2147483648.0, 1e30, -1e30, np.inf, -np.inf]
    x = np.concatenate([some_floats(14), np.array([*edges, 0.99, -0.99, 1.5], np.float32)])
    twin = compiled(device_math.i32_of_f32)
    with np.errstate(invalid="ignore"):
        want = np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=2.0**40, neginf=-(2.0**40))
    want = np.clip(np.trunc(want), -(2**31), 2**31 - 1).astype(np.int64)
    np.testing.assert_array_equal([int(twin(v)) for v in x], want)


def round_fraction(x):
    """The f32 nearest to a fraction, ties to even, by trying both neighbours."""
    guess = np.float32(float(x))
    around = [
        np.nextafter(guess, np.float32(-np.inf)),
        guess,
        np.nextafter(guess, np.float32(np.inf)),
    ]
    best = min(around, key=lambda f: (abs(Fraction(float(f)) - x), int(f.view(np.uint32)) & 1))
    return best


def test_fma_rounds_once():
    rng = np.random.default_rng(3)
    twin = compiled(device_math.fma_rn)
    for _ in range(3000):
        a, b = (np.float32(rng.standard_normal()) for _ in range(2))
        # Two roundings differ near half an ulp of the product and near its negative.
        product = Fraction(float(a)) * Fraction(float(b))
        scale = 2.0 ** int(rng.integers(-30, 3))
        c = np.float32(-float(product) if rng.random() < 0.3 else float(product) * scale)
        want = round_fraction(product + Fraction(float(c)))
        assert np.float32(twin(a, b, c)).view(np.uint32) == want.view(np.uint32)


def test_bf16_conversion_equals_ml_dtypes():
    x = some_floats(4)
    twin = compiled(convert.bf16x2_of_f32)
    words = np.array([twin(high, low) for high, low in zip(x, x[::-1], strict=True)], np.uint32)
    with np.errstate(all="ignore"):
        want = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    want[np.isnan(x)] = 0x7FFF
    np.testing.assert_array_equal(words >> 16, want)
    np.testing.assert_array_equal(words & 0xFFFF, want[::-1])


def test_f16_conversions_equal_numpy():
    every = np.arange(65536, dtype=np.uint32)
    exact = every.astype(np.uint16).view(np.float16).astype(np.float32)
    got = np.array([convert.f32_of_f16(h) for h in every], np.float32)
    finite = ~np.isnan(exact)
    np.testing.assert_array_equal(got.view(np.uint32)[finite], exact.view(np.uint32)[finite])
    with np.errstate(all="ignore"):
        ties = (exact[:-1].astype(np.float64) + exact[1:]).astype(np.float32) / 2
        x = np.concatenate([some_floats(5), exact, ties[np.isfinite(ties)]])
        want = x.astype(np.float16).view(np.uint16)
    want[np.isnan(x)] = 0x7FFF
    np.testing.assert_array_equal([convert.f16_of_f32(np.float32(v)) for v in x], want)


def test_packed_f16_conversion_equals_numpy():
    x = some_floats(15)
    twin = compiled(convert.f16x2_of_f32)
    words = np.array([twin(high, low) for high, low in zip(x, x[::-1], strict=True)], np.uint32)
    with np.errstate(all="ignore"):
        want = x.astype(np.float16).view(np.uint16)
    want[np.isnan(x)] = 0x7FFF
    np.testing.assert_array_equal(words >> 16, want)
    np.testing.assert_array_equal(words & 0xFFFF, want[::-1])


def test_packed_e4m3_conversions_equal_ml_dtypes():
    x = some_floats(16)
    codes = np.arange(256, dtype=np.uint8)
    exact = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = (exact[:-1] + exact[1:]) / 2
    x = np.concatenate([x, exact, ties, np.nextafter(ties, np.float32(0)), exact * 1.001])
    twin = compiled(convert.e4m3x2_of_f32)
    words = np.array([twin(high, low) for high, low in zip(x, x[::-1], strict=True)], np.uint32)
    with np.errstate(all="ignore"):
        want = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    want[np.isnan(x)] = 0x7F
    np.testing.assert_array_equal(words >> 8, want)
    np.testing.assert_array_equal(words & 0xFF, want[::-1])
    back = compiled(convert.f16x2_of_e4m3x2)
    halves = np.array([back(np.uint32(c | (255 - c) << 8)) for c in range(256)], np.uint32)
    want = exact.astype(np.float16).view(np.uint16)
    want[np.isnan(exact)] = 0x7FFF
    np.testing.assert_array_equal(halves & 0xFFFF, want)
    np.testing.assert_array_equal(halves >> 16, want[::-1])


def test_f16_product_equals_numpy():
    rng = np.random.default_rng(6)
    a, b = rng.integers(0, 65536, (2, 40000)).astype(np.uint16)
    twin = compiled(convert.mul_f16x2)
    words = [(int(x) | int(y) << 16) for x, y in zip(a, b, strict=True)]
    got = [twin(np.uint32(w), np.uint32(w >> 16 | (w & 0xFFFF) << 16)) for w in words]
    with np.errstate(all="ignore"):
        want = a.view(np.float16) * b.view(np.float16)
    bits = np.where(np.isnan(want), 0x7FFF, want.view(np.uint16))
    np.testing.assert_array_equal(np.array(got, np.uint32) & 0xFFFF, bits)
    np.testing.assert_array_equal(np.array(got, np.uint32) >> 16, bits)


def test_bf16_product_rounds_once():
    """Subnormal products too: against float64, which holds every product, on bf16's grid."""
    rng = np.random.default_rng(17)
    a, b = rng.integers(0, 65536, (2, 40000)).astype(np.uint32)
    # Half of the products lie around the smallest subnormal and the smallest normal number.
    a[::2] = rng.integers(0x1F00, 0x2000, len(a[::2]))
    b[::2] = rng.integers(0x1C00, 0x2080, len(b[::2]))
    twin = compiled(convert.mul_bf16x2)
    words = np.array([twin(x | (y << 16), y | (x << 16)) for x, y in zip(a, b, strict=True)])
    with np.errstate(all="ignore"):
        x, y = ((u << 16).astype(np.uint32).view(np.float32).astype(np.float64) for u in (a, b))
        product = x * y
        want = product.astype(ml_dtypes.bfloat16)
    tiny = np.abs(product) < 2.0**-126
    want[tiny] = (np.rint(product[tiny] * 2.0**133) * 2.0**-133).astype(ml_dtypes.bfloat16)
    bits = np.where(np.isnan(product), 0x7FFF, want.view(np.uint16))
    np.testing.assert_array_equal(words & 0xFFFF, bits)
    np.testing.assert_array_equal(words >> 16, bits)


def test_bf16_maximum_equals_numpy():
    rng = np.random.default_rng(7)
    a, b = rng.integers(0, 65536, (2, 40000)).astype(np.uint16)
    twin = compiled(convert.max_nan_bf16x2)
    got = np.array([twin(np.uint32(x), np.uint32(y)) for x, y in zip(a, b, strict=True)]) & 0xFFFF
    fa, fb = (
        a.view(ml_dtypes.bfloat16).astype(np.float32),
        b.view(ml_dtypes.bfloat16).astype(np.float32),
    )
    with np.errstate(all="ignore"):
        want = np.maximum(fa, fb).astype(ml_dtypes.bfloat16).view(np.uint16)
    want[np.isnan(np.maximum(fa, fb))] = 0x7FFF
    different = want != got
    assert not different[(fa != 0) | (fb != 0)].any()


def test_permute_bytes_by_hand():
    twin = compiled(convert.permute_bytes)
    a, b = np.uint32(0x33221100), np.uint32(0x77665544)
    assert twin(a, b, np.uint32(0x3210)) == a
    assert twin(a, b, np.uint32(0x7654)) == b
    assert twin(a, b, np.uint32(0x0741)) == 0x00774411


def test_e4m3_codes_equal_ml_dtypes():
    x = np.abs(some_floats(8))
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    x = np.concatenate([x, codes, (codes[1:] + codes[:-1]) / 2])
    with np.errstate(all="ignore"):
        x = np.concatenate([x, *(np.nextafter(x, np.float32(end)) for end in (np.inf, 0))])
        want = np.minimum(x, np.float32(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    want[np.isnan(x)] = 0x7F
    np.testing.assert_array_equal([convert.e4m3_of_f32(v) for v in x], want)
    for code, value in enumerate(codes):
        assert convert.f32_of_e4m3(np.uint32(code)) == value
        assert (
            convert.f16x2_of_e4m3(np.uint32(code))
            == int(np.float16(value).view(np.uint16)) * 0x10001
        )
    assert np.isnan(convert.f32_of_e4m3(np.uint32(0x7F)))
    assert convert.f16x2_of_e4m3(np.uint32(0x7F)) == 0x7FFF7FFF


def test_e2m1_codes_equal_ml_dtypes():
    grid = np.arange(0, 8, 0.125, dtype=np.float32)
    x = np.concatenate([some_floats(9), grid, np.nextafter(grid, np.float32(9)), -grid])
    x = x[~np.isnan(x)]
    want = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    np.testing.assert_array_equal([nvfp4.code_of_f32(v) for v in x], want)
    assert nvfp4.code_of_f32(np.float32(np.nan)) == 7


def test_exp_is_within_an_ulp_and_monotone_at_the_ends():
    x = np.concatenate([np.linspace(-88, 88.7, 20001), np.linspace(-1e-3, 1e-3, 101)])
    x = x.astype(np.float32)
    got = np.array([device_math.exp_f32(v) for v in x], np.float32)
    want = np.exp(x.astype(np.float64))
    ulp = np.spacing(want.astype(np.float32)).astype(np.float64)
    assert np.max(np.abs(got - want) / ulp) <= 1.0
    exp = device_math.exp_f32
    with np.errstate(over="ignore"):
        assert np.isinf(exp(np.float32(89))) and np.isinf(exp(np.float32(np.inf)))
    assert exp(np.float32(-np.inf)) == exp(np.float32(-88)) < 1e-38
    assert exp(np.float32(0)) == 1 and np.isnan(exp(np.float32(np.nan)))
