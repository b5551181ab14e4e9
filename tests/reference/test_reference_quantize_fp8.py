"""P1, P2: the FP8 quantizers against exact rational arithmetic and ml_dtypes' conversions."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbmoe import reference
from nbmoe.reference.quantize_fp8 import multiplier, stored_scale
from tests.strategies import VALUES, activations, seeds

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
TYPES = ("float32", "bfloat16", "float8_e8m0fnu")
dynamic = reference.quantize_dynamic_scaled_float8
NORMAL = 2.0**-126


def rounded_ratio(a: np.float32, b: np.float32) -> np.float32:
    """a / b rounded once to float32, nearest even, through integers; both positive."""
    exact = Fraction(float(a)) / Fraction(float(b))
    near = np.float32(float(exact))
    below, above = np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))
    return min(
        (v for v in (near, below, above) if np.isfinite(v)),
        key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.uint32)) & 1),
    )


def all_maxima() -> np.ndarray:
    """Every magnitude of bf16 that is finite and not 0."""
    return np.arange(1, 0x7F80, dtype=np.uint16).view(BF16).astype(np.float32)


@pytest.mark.parametrize("scale_ub", [1200.0, 3e38, 1.5])
def test_float32_scale_of_every_magnitude_is_the_rounded_quotient(scale_ub: float) -> None:
    amax = all_maxima()[::7]
    stored, scale = stored_scale(amax, scale_ub, "float32", 0.0)
    expected = [rounded_ratio(min(a, np.float32(scale_ub)), np.float32(448)) for a in amax]
    np.testing.assert_array_equal(stored, expected)
    np.testing.assert_array_equal(stored, scale)


def test_bfloat16_scale_of_every_magnitude_is_the_rounded_float32() -> None:
    amax = all_maxima()
    stored, scale = stored_scale(amax, 3e38, "bfloat16", 0.0)
    expected = (np.minimum(amax, np.float32(3e38)) / np.float32(448)).astype(BF16)
    assert stored.tobytes() == expected.tobytes()
    np.testing.assert_array_equal(scale, expected.astype(np.float32))


@pytest.mark.parametrize("amax_floor", [0.0, 0.7])
def test_e8m0_scale_of_every_magnitude_is_the_next_power_of_two(amax_floor: float) -> None:
    """Exact but for the quotient's rounding, and never below 1e-10."""
    amax = all_maxima()
    stored, scale = stored_scale(amax, 1.0, "float8_e8m0fnu", amax_floor)
    quotient = np.maximum(np.maximum(amax, np.float32(amax_floor)) / np.float32(448), 1e-10)
    np.testing.assert_array_equal(scale, np.exp2(np.ceil(np.log2(quotient.astype(np.float64)))))
    np.testing.assert_array_equal(stored.astype(np.float32), scale)
    # A block below its scale times 448 does not saturate.
    usual = (amax >= amax_floor) & (amax / 448 > 1e-10)
    assert (amax[usual] <= scale[usual].astype(float) * 448).all()
    assert (amax[usual] > scale[usual].astype(float) * 224).all()


@pytest.mark.parametrize("scales_type", TYPES)
def test_scales_of_special_values(scales_type: str) -> None:
    amax = np.float32([0, np.inf, np.nan, -np.nan, 1e-45])
    stored, scale = stored_scale(amax, 1200.0, scales_type, 0.0)
    bits = {
        "float32": np.uint32([0, 0x402B6DB7, 0x7FFFFFFF, 0x7FFFFFFF, 0]),
        "bfloat16": np.uint16([0, 0x402B, 0x7FFF, 0x7FFF, 0]),
        "float8_e8m0fnu": np.uint8([94, 254, 255, 255, 94]),
    }[scales_type]
    assert stored.tobytes() == bits.tobytes()
    assert scale[0] == (0 if scales_type != "float8_e8m0fnu" else 2.0**-33)


def test_multiplier_of_every_kind_of_scale() -> None:
    scales = np.float32([0, 1e-45, 2.0**-128, 2.0**-127, 1, 3, 3e38, np.inf, np.nan])
    got = multiplier(scales)
    expected = np.float32([0, 0, 0, 2.0**127, 1, np.float32(1) / np.float32(3), 0, 0, np.nan])
    expected[6] = rounded_ratio(np.float32(1), scales[6])
    np.testing.assert_array_equal(got, expected)


@given(
    st.integers(1, 9),
    st.sampled_from([(1, -1), (15, -1), (16, 4), (200, 128), (96, 32), (40, 100)]),
    st.sampled_from(TYPES),
    st.sampled_from(VALUES),
    seeds,
)
def test_codes_are_rounded_quotients(
    m: int, shape: tuple[int, int], scales_type: str, kind: str, seed: int
) -> None:
    """Group by group in float32, rounded by ml_dtypes."""
    k, group = shape
    x = activations(np.random.default_rng(seed), m, k, kind)
    codes, scales = dynamic(x, group_size_or_per_token=group, scales_type=scales_type)
    assert codes.dtype == E4M3 and scales.dtype.name == scales_type
    width = k if group == -1 else group
    for row in range(m):
        for g, begin in enumerate(range(0, k, width)):
            part = x[row, begin : begin + width].astype(np.float32)
            scale = scales[g, row].astype(np.float32)
            got = codes[row, begin : begin + width]
            if np.isnan(part).any():
                assert np.isnan(scale) and (got.view(np.uint8) == 0x7F).all()
                continue
            with np.errstate(all="ignore"):
                inverse = np.float32(1) / scale
                product = part * (inverse if np.isfinite(inverse) else np.float32(0))
            expected = np.clip(product, -448, 448).astype(E4M3)
            assert got.tobytes() == expected.tobytes()


@given(seeds, st.sampled_from(TYPES))
def test_values_come_back(seed: int, scales_type: str) -> None:
    """An e4m3 code keeps 4 significant bits, and below 2**-6 of the scale's range its last."""
    x = activations(np.random.default_rng(seed), 5, 256, "heavy")
    codes, scales = dynamic(x, group_size_or_per_token=64, scales_type=scales_type, scale_ub=3e38)
    scale = np.repeat(scales[:, :5].astype(float), 64, axis=0).T
    got, want = codes.astype(float) * scale, x.astype(float)
    # The scale and its inverse are rounded, and a bfloat16 scale may be 2**-9 too small, so that
    # the largest value saturates.
    loose = 2.0**-8 if scales_type == "bfloat16" else 2.0**-22
    allowed = np.maximum(np.abs(want) * 2.0**-4, 2.0**-10 * scale) + np.abs(want) * loose
    assert (np.abs(got - want) <= allowed).all()


@pytest.mark.parametrize("scales_type", TYPES)
def test_powers_of_two_move_scales_alone(scales_type: str) -> None:
    x = activations(np.random.default_rng(1), 4, 128, "gauss")
    options = {"group_size_or_per_token": 32, "scales_type": scales_type, "scale_ub": 3e38}
    codes, scales = dynamic(x, **options)
    moved = (x.astype(np.float32) * 2.0**20).astype(BF16)
    codes_of_moved, scales_of_moved = dynamic(moved, **options)
    assert codes.tobytes() == codes_of_moved.tobytes()
    np.testing.assert_array_equal(
        scales_of_moved[:, :4].astype(float), scales[:, :4].astype(float) * 2.0**20
    )


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
def test_static_codes_are_rounded_products(dtype: object) -> None:
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 2**32, (64, 33), dtype=np.uint32)
    x = bits.view(np.float32)
    with np.errstate(all="ignore"):
        x = (x if dtype is np.float32 else bits.astype(np.uint16).view(dtype)).astype(dtype)  # type: ignore[call-overload]
        values = x.astype(np.float32)
        for scale in (0.37, 2.0**-128, 1e30):
            for inverted in (True, False):
                factor = np.float32(scale)
                if inverted:
                    factor = np.float32(1) / factor if scale > 2.0**-128 else np.float32(0)
                expected = np.clip(values * factor, -448, 448).astype(E4M3).view(np.uint8)
                expected[np.isnan(values * factor)] = 0x7F
                got = reference.quantize_static_scaled_float8(x, scale, scale_is_inverted=inverted)
                np.testing.assert_array_equal(got.view(np.uint8), expected)


def test_one_scale_of_a_matrix_is_that_of_its_largest_row() -> None:
    x = activations(np.random.default_rng(3), 9, 40, "heavy")
    codes, scale = reference.quantize_tensor_dynamic_scaled_float8(x)
    flat, row_scale = dynamic(x.reshape(1, -1))
    assert codes.tobytes() == flat.tobytes() and scale[0] == row_scale[0, 0]


def test_rows_past_the_bound_are_zero() -> None:
    x = activations(np.random.default_rng(4), 9, 40, "gauss")
    bound = np.array([0, 4, 5], np.uint32)
    for codes in (
        dynamic(x, row_offsets=bound)[0],
        reference.quantize_static_scaled_float8(x, 0.1, row_offsets=bound),
        reference.quantize_tensor_dynamic_scaled_float8(x, row_offsets=bound)[0],
    ):
        assert (codes[:5].view(np.uint8) != 0).any(axis=1).all()
        assert not codes[5:].view(np.uint8).any()
    x[5:] = np.nan
    assert not np.isnan(reference.quantize_tensor_dynamic_scaled_float8(x, row_offsets=bound)[1])
