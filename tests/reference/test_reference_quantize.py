"""P1: NVFP4 quantization equals an independent implementation, exhaustively and on hard blocks."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbmoe import codecs, layouts, reference
from nbmoe.errors import ConfigError, ShapeError, UnsupportedError
from nbmoe.formats import NVFP4
from nbmoe.reference.quantize import quantize_blocks

BF16 = ml_dtypes.bfloat16
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TENSOR_SCALES = [1.0, 0.43, 2688 / 3.0, 448.0, 1e-3, 3.0e5, 1.7e38, 2e-37]


def e2m1_by_thresholds(y):
    """Nearest of eight magnitudes; a tie goes to the code that is even."""
    magnitude = np.abs(y.astype(np.float64))
    middles = (E2M1_VALUES[1:] + E2M1_VALUES[:-1]) / 2
    below = np.searchsorted(middles, magnitude, side="left")  # ties downward
    above = np.searchsorted(middles, magnitude, side="right")  # ties upward
    code = np.where(below % 2 == 0, below, above)
    code = code | (np.signbit(y) << 3)
    return np.where(np.isnan(y), 7, code).astype(np.uint8)


def e4m3_by_ml_dtypes(s):
    saturated = np.clip(s, -448, 448).astype(np.float32)
    code = saturated.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(s), 0x7F, code).astype(np.uint8)


def once(exact):
    """Rounds a float64 to float32. Exact products and quotients of float32 round only here."""
    return np.asarray(exact, np.float64).astype(np.float32)


def independent(blocks, tensor_sf):
    """(n, 16) float32 to codes (n, 16) and scale bytes (n,): float64, then one rounding each."""
    wide = np.float64
    with np.errstate(all="ignore"):
        tensor_sf = np.float32(tensor_sf)
        amax = np.abs(blocks).max(axis=1)
        sixth = once(wide(1) / wide(6))
        scaled = once(wide(tensor_sf) * once(amax.astype(wide) * wide(sixth)).astype(wide))
        scale_bytes = e4m3_by_ml_dtypes(scaled)
        scale = scale_bytes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        decode = once(scale.astype(wide) * once(wide(1) / wide(tensor_sf)).astype(wide))
        inverse = once(wide(1) / decode.astype(wide))
        largest = np.finfo(np.float32).max
        inverse = np.where(inverse > largest, largest, inverse)  # keeps NaN
        inverse[scale == 0] = 0
        y = once(blocks.astype(wide) * inverse[:, None].astype(wide))
        codes = e2m1_by_thresholds(y)
    return codes, scale_bytes


def check(blocks, tensor_sf):
    packed, scales = quantize_blocks(blocks, NVFP4, np.float32(tensor_sf))
    codes, expected_scales = independent(blocks, tensor_sf)
    np.testing.assert_array_equal(scales[:, 0], expected_scales)
    expected = codes[:, 0::2] | codes[:, 1::2] << 4
    np.testing.assert_array_equal(packed, expected)
    return codes, expected_scales


def to_bf16_values(x):
    return np.asarray(x, np.float32).astype(BF16).astype(np.float32)


EVERY_BF16 = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("tensor_sf", TENSOR_SCALES)
def test_every_bf16_as_the_largest_of_its_block(tensor_sf):
    fractions = np.array([1, 0, -1, 5 / 6, 4 / 6, 3.5 / 6, 0.5, 2.5 / 6, 2 / 6, 1.75 / 6, 0.25])
    fractions = np.append(fractions, [1.25 / 6, 1 / 6, 0.75 / 6, 0.5 / 6, 0.25 / 6])
    with np.errstate(all="ignore"):
        blocks = to_bf16_values(EVERY_BF16[:, None] * fractions)
    codes, scales = check(blocks, tensor_sf)
    assert len(np.unique(scales)) > 20
    assert len(np.unique(codes)) == 16


@pytest.mark.parametrize("amax", [6.0, 1.0, 448.0, 0.37, 5.9, 3e-3])
@pytest.mark.parametrize("tensor_sf", [1.0, 0.43, 2688 / 3.0])
def test_every_bf16_below_a_given_largest(amax, tensor_sf):
    amax = to_bf16_values(amax)
    smaller = EVERY_BF16[np.abs(EVERY_BF16) <= amax]
    blocks = np.zeros((-(-smaller.size // 15), 16), np.float32)
    blocks[:, 1:].flat[: smaller.size] = smaller
    blocks[:, 0] = amax
    check(blocks, tensor_sf)


def block_families(rng):
    """Families of blocks in which quantizers are known to differ."""
    normal = rng.standard_normal((400, 16))
    ties = rng.choice([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], (400, 16))
    ties[:, 3] = 6
    ties *= rng.choice([-1, 1], ties.shape)
    power = np.exp2(rng.integers(-40, 40, (400, 1)))
    heavy = rng.standard_t(1.2, (400, 16))
    zeros = normal.copy()
    zeros[::2] = 0
    zeros[1::4] *= -0.0
    special = normal.copy()
    special[np.arange(400), rng.integers(0, 16, 400)] = rng.choice([np.nan, np.inf, -np.inf], 400)
    return {
        "normal": normal,
        "ties": ties,
        "ties at every exponent": ties * power,
        "wide": normal * power,
        "heavy tail": heavy,
        "zero blocks": zeros,
        "subnormal": normal * 1e-39,
        "scale underflows": normal * 1e-5,
        "huge": normal * 1e38,
        "special": special,
    }


@pytest.mark.parametrize("family", block_families(np.random.default_rng(0)))
def test_block_families(family):
    with np.errstate(over="ignore"):
        blocks = to_bf16_values(block_families(np.random.default_rng(1))[family])
    for tensor_sf in [*TENSOR_SCALES, 1e-42, 0.0, np.inf, np.nan, -2.0]:
        check(blocks, tensor_sf)
        check(blocks * np.float32(1.0001), tensor_sf)  # as in SwiGLU, where x is not bf16


@given(st.lists(st.integers(0, 0xFFFFFFFF), min_size=16, max_size=16), st.floats(width=32))
@settings(deadline=None)
def test_any_float32_block_and_scale(bits, tensor_sf):
    check(np.array([bits], np.uint32).view(np.float32), tensor_sf)


def codes_of(block, tensor_sf=1.0):
    packed, scales = quantize_blocks(np.asarray([block], np.float32), NVFP4, np.float32(tensor_sf))
    return codecs.unpack_nibbles(packed)[0].tolist(), int(scales[0, 0])


def test_amax_6_leaves_the_grid_unchanged():
    grid = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert codes_of(grid) == (list(range(16)), 0x38)


def test_ties_of_amax_6():
    block = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0]
    assert codes_of(block)[0] == [7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 0]


@pytest.mark.parametrize(
    ("block", "codes", "scale"),
    [
        ([0.0] * 16, [0] * 16, 0x00),
        ([-0.0] * 16, [8] * 16, 0x00),  # -0 * 0 keeps its sign
        ([np.nan] + [1.0] * 15, [7] * 16, 0x7F),
        ([np.inf] + [1.0, -1.0] * 7 + [0], [7] + [0, 8] * 7 + [0], 0x7E),
        ([1e-5, -1e-5] * 8, [0, 8] * 8, 0x00),  # the scale rounds to zero
    ],
    ids=["zero", "negative zero", "nan", "infinity", "tiny"],
)
def test_special_blocks(block, codes, scale):
    assert codes_of(block) == (codes, scale)


def test_infinity_saturates_the_scale_and_the_rest_follows_it():
    codes, scale = codes_of([-np.inf, 2688.0, 1344.0, 112.0] + [0] * 12)
    assert (codes[:4], scale) == ([15, 7, 5, 0], 0x7E)


# ------------------------------------------------------------------ grouped


def grouped(x, counts, sf, *, expert_ids=None, **options):
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
    ids = np.arange(len(counts), dtype=np.int32) if expert_ids is None else expert_ids
    return reference.grouped_quantize_dynamic_block_scaled(
        x, start, layouts.scales_offset(start), ids, np.asarray(sf, np.float32), **options
    )


def random_rows(rows, k, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, k)).astype(np.float32).astype(BF16)


@pytest.mark.parametrize(
    ("counts", "k"),
    [
        ([256, 128, 256], 704),
        ([100, 200, 50], 64),
        ([13, 999], 352),
        ([100, 60], 352),
        ([0, 1, 0, 129, 0], 16),
        ([0, 0], 80),
        ([], 80),
    ],
)
def test_each_group_equals_its_rows_alone(counts, k):
    x = random_rows(sum(counts), k)
    sf = np.linspace(0.5, 3, len(counts))
    packed, tiles = grouped(x, counts, sf)
    assert packed.shape == (sum(counts), k // 2)
    across = -(-k // 64)
    assert tiles.shape == (-(-sum(counts) // 128) + min(len(counts), sum(counts)), across, 32, 4, 4)
    flat = tiles.ravel()
    row, tile, used = 0, 0, np.zeros(flat.size, bool)
    for count, factor in zip(counts, sf, strict=True):
        values = x[row : row + count].astype(np.float32)
        codes, scales = independent(values.reshape(-1, 16), factor)
        codes = codes.reshape(count, k)
        np.testing.assert_array_equal(
            packed[row : row + count], codes[:, 0::2] | codes[:, 1::2] << 4
        )
        r, c = np.divmod(np.arange(count * k // 16), k // 16)
        offset = ((tile + r // 128) * across + c // 4) * 512
        offset += r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        np.testing.assert_array_equal(flat[offset], scales)
        used[offset] = True
        row, tile = row + count, tile + -(-count // 128)
    assert (flat[~used] == 0).all()


def test_scale_is_chosen_by_expert_id():
    x = random_rows(6, 64)
    sf = [1.0, 2.0, 4.0]
    packed, tiles = grouped(x, [3, 3], sf, expert_ids=np.array([2, 0], np.int32))
    first, _ = quantize_blocks(x[:3].astype(np.float32), NVFP4, np.float32(4))
    second, _ = quantize_blocks(x[3:].astype(np.float32), NVFP4, np.float32(1))
    np.testing.assert_array_equal(packed, np.concatenate([first, second]))
    assert tiles.any()


def test_masked_slot_gets_zeros():
    x = random_rows(200, 64)
    packed, tiles = grouped(x, [70, 60, 70], [1, 1, 1], expert_ids=np.array([0, -1, 2], np.int32))
    whole, whole_tiles = grouped(x, [70, 60, 70], [1, 1, 1])
    assert (packed[70:130] == 0).all()
    assert (tiles[1] == 0).all()
    np.testing.assert_array_equal(packed[130:], whole[130:])
    np.testing.assert_array_equal(tiles[[0, 2]], whole_tiles[[0, 2]])


def test_gather_reads_index_over_divisor():
    x = random_rows(7, 96)
    indices = np.array([13, 0, 6, 20, 7, 0xFFFFFFFF, 0xFFFFFFFF], np.uint32)
    packed, tiles = grouped(x, [2, 3], [1, 2], indices=indices, indices_divisor=3)
    direct = x[np.array([4, 0, 2, 6, 2])]
    expected, expected_tiles = grouped(direct, [2, 3], [1, 2])
    assert packed.shape == (7, 48)
    np.testing.assert_array_equal(packed[:5], expected)
    assert (packed[5:] == 0).all()
    np.testing.assert_array_equal(tiles, expected_tiles)


def test_gather_without_a_divisor_reads_the_row_itself():
    x = random_rows(4, 32)
    packed, _ = grouped(x, [3], [1], indices=np.array([3, 1, 1], np.uint32))
    expected, _ = grouped(x[[3, 1, 1]], [3], [1])
    np.testing.assert_array_equal(packed, expected)


def test_leading_axes_are_kept():
    x = random_rows(6, 64).astype(np.float32).reshape(2, 3, 64)
    packed, scales = quantize_blocks(x, NVFP4, np.float32(2))
    flat, flat_scales = quantize_blocks(x.reshape(6, 64), NVFP4, np.float32(2))
    np.testing.assert_array_equal(packed, flat.reshape(2, 3, 32))
    np.testing.assert_array_equal(scales, flat_scales.reshape(2, 3, 4))


def test_bits_and_ml_dtypes_input_are_the_same():
    x = random_rows(5, 32)
    for one, other in zip(grouped(x, [5], [1]), grouped(x.view(np.uint16), [5], [1]), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_nan_stays_in_its_block():
    x = random_rows(140, 64)
    clean, clean_tiles = grouped(x, [140], [1])
    x[130, 20] = np.nan
    packed, tiles = grouped(x, [140], [1])
    changed = np.argwhere(packed != clean)
    assert set(changed[:, 0]) == {130}
    assert set(changed[:, 1]) <= set(range(8, 16))
    assert (packed[130, 8:16] == 0x77).all()
    assert np.argwhere(tiles != clean_tiles).tolist() == [[1, 0, 2, 0, 1]]
    assert tiles[1, 0, 2, 0, 1] == 0x7F


def test_bad_arguments():
    with pytest.raises(ShapeError, match="K % 16 == 0"):
        grouped(random_rows(2, 40), [2], [1])
    with pytest.raises(UnsupportedError, match=r"sf_vector_size: expected 16 .*, got 24"):
        grouped(random_rows(2, 48), [2], [1], sf_vector_size=24)
    with pytest.raises(ConfigError, match="scales_type: expected 'float8_e8m0fnu'"):
        grouped(random_rows(2, 64), [2], [1], sf_vector_size=32)
