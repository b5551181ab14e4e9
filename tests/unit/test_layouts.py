"""P1, P9: layouts equal their formulas and invert; offsets hold for every count of rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbmoe import layouts
from nbmoe.errors import RangeError, ShapeError

SHAPES = [(128, 4), (130, 6), (256, 16), (1, 1), (300, 33), (31, 5), (129, 1)]


def tile_formula(row, column, columns):
    """The 5-D index of a scale, flattened by hand."""
    across = (columns + 3) // 4
    i0, i1, i2, i3, i4 = row // 128, column // 4, row % 32, (row % 128) // 32, column % 4
    return (((i0 * across + i1) * 32 + i2) * 4 + i3) * 4 + i4


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_interleave_puts_each_scale_at_its_formula(rows, columns):
    scales = np.random.default_rng(0).integers(1, 256, (rows, columns)).astype(np.uint8)
    tiles = layouts.interleave_scales(scales)
    assert tiles.shape == (-(-rows // 128), -(-columns // 4), 32, 4, 4)
    assert tiles.flags.c_contiguous
    flat = tiles.ravel()
    used = set()
    for row in range(rows):
        for column in range(columns):
            offset = tile_formula(row, column, columns)
            assert layouts.scale_byte_offset(row, column, columns) == offset
            assert flat[offset] == scales[row, column]
            used.add(offset)
    assert len(used) == rows * columns
    padding = np.ones(flat.size, bool)
    padding[list(used)] = False
    assert (flat[padding] == 0).all()


@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, (384, 12), (128, 5), (100, 4)])
def test_shape_of_tiles_without_padding(rows, columns):
    if (rows, columns) in [(128, 4), (256, 16), (384, 12)]:
        tiles = layouts.interleave_scales(np.zeros((rows, columns), np.uint8))
        assert layouts.interleaved_block_scales_shape(rows, columns) == tiles.shape
    else:
        with pytest.raises(ShapeError, match=f"got {rows} rows and {columns} columns"):
            layouts.interleaved_block_scales_shape(rows, columns)


@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, (0, 4)])
def test_deinterleave_inverts(rows, columns):
    scales = np.random.default_rng(1).integers(0, 256, (3, rows, columns)).astype(np.uint8)
    tiles = layouts.interleave_scales(scales)
    assert tiles.ndim == 6
    np.testing.assert_array_equal(layouts.deinterleave_scales(tiles, rows, columns), scales)
    for expert in range(3):
        one = layouts.interleave_scales(scales[expert])
        np.testing.assert_array_equal(one, tiles[expert])
        np.testing.assert_array_equal(
            layouts.deinterleave_scales(one, rows, columns), scales[expert]
        )


def test_whole_granules_can_be_sliced_after_interleaving():
    scales = np.random.default_rng(2).integers(0, 256, (384, 12)).astype(np.uint8)
    tiles = layouts.interleave_scales(scales)
    np.testing.assert_array_equal(tiles[1:3], layouts.interleave_scales(scales[128:]))
    np.testing.assert_array_equal(tiles[:, 1:2], layouts.interleave_scales(scales[:, 4:8]))


def test_offset_of_a_far_scale_is_not_cut_to_32_bits():
    assert layouts.scale_byte_offset(128 * 2**22, 0, 448) == 2**22 * 112 * 512


@pytest.mark.parametrize(
    ("start", "tiles", "offsets"),
    [
        ([0, 100, 300, 400], [0, 1, 3], [0, 1, 1]),
        ([0, 13, 1012], [0, 1], [0, 1]),
        ([0, 0, 0], [0, 0], [0, 0]),
        ([0, 128, 256], [0, 1], [0, 0]),
        ([0, 129, 129, 130], [0, 2, 2], [0, 1, 1]),
        ([0], [], []),
    ],
)
def test_scale_offsets_of_worked_examples(start, tiles, offsets):
    got = layouts.scales_offset(np.array(start, np.uint32))
    assert got.dtype == np.uint32
    assert got.tolist() == offsets
    assert layouts.tile_starts(start, got).tolist() == tiles


@given(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 700)), max_size=40))
@settings(deadline=None)
def test_groups_get_disjoint_tiles_within_the_allocation(counts):
    start = np.concatenate([[0], np.cumsum(counts, dtype=int)]).astype(np.uint32)
    first = layouts.tile_starts(start, layouts.scales_offset(start))
    expected = 0
    for group, count in enumerate(counts):
        assert first[group] == expected
        expected += -(-count // 128)
    assert expected <= layouts.activation_tiles(sum(counts), len(counts))


def test_sigma_pairs_gate_and_up():
    d = 5
    sigma = layouts.sigma(2 * d)
    assert [int(sigma[2 * i]) for i in range(d)] == list(range(d))
    assert [int(sigma[2 * i + 1]) for i in range(d)] == list(range(d, 2 * d))


@pytest.mark.parametrize("axis", [-2, 1, 0])
def test_sigma_permute_inverts(axis):
    matrix = np.random.default_rng(3).integers(0, 256, (6, 10, 4)).astype(np.uint8)
    permuted = layouts.sigma_permute(matrix, axis)
    n = matrix.shape[axis]
    for row in range(n):
        source = row // 2 if row % 2 == 0 else n // 2 + row // 2
        np.testing.assert_array_equal(permuted.take(row, axis), matrix.take(source, axis))
    np.testing.assert_array_equal(layouts.sigma_unpermute(permuted, axis), matrix)


def test_sigma_permutes_rows_unless_told_otherwise():
    matrix = np.arange(24).reshape(2, 4, 3)
    np.testing.assert_array_equal(layouts.sigma_permute(matrix), matrix[:, [0, 2, 1, 3]])
    np.testing.assert_array_equal(layouts.sigma_unpermute(matrix), matrix[:, [0, 2, 1, 3]])


def test_k_steps_take_every_fourth_element():
    assert len(layouts.K_STEPS) == 4
    assert sorted(k for step in layouts.K_STEPS for k in step) == list(range(64))
    for j, step in enumerate(layouts.K_STEPS):
        assert len(step) == 16
        assert all(k % 4 == j for k in step)


def test_group_k_round_trip():
    k = np.arange(2 * 192).reshape(2, 192)
    grouped = layouts.group_k(k)
    assert grouped.shape == (2, 3, 4, 16)
    for block in range(3):
        for step in range(4):
            expected = 64 * block + np.array(layouts.K_STEPS[step])
            np.testing.assert_array_equal(grouped[0, block, step], expected)
    np.testing.assert_array_equal(layouts.ungroup_k(grouped), k)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: layouts.interleave_scales(np.zeros(4, np.uint8)), ShapeError, "(R, C)"),
        (lambda: layouts.deinterleave_scales(np.zeros((4, 4)), 1, 1), ShapeError, "32, 4, 4"),
        (
            lambda: layouts.deinterleave_scales(np.zeros((1, 1, 32, 4, 4)), 129, 4),
            ShapeError,
            "at least 129 rows and 4 columns",
        ),
        (
            lambda: layouts.deinterleave_scales(np.zeros((1, 1, 32, 4, 4)), 128, 5),
            ShapeError,
            "at least 128 rows and 5 columns",
        ),
        (lambda: layouts.scales_offset([0, 5, 3]), RangeError, "ascending"),
        (lambda: layouts.scales_offset([[0, 1]]), ShapeError, "(S + 1,)"),
        (lambda: layouts.scales_offset([]), ShapeError, "(S + 1,)"),
        (lambda: layouts.tile_starts([0, 1], [0, 0]), ShapeError, "one a group"),
        (lambda: layouts.sigma(3), ShapeError, "even number"),
        (lambda: layouts.group_k(np.zeros(65)), ShapeError, "K % 64 == 0"),
        (lambda: layouts.ungroup_k(np.zeros((1, 4, 8))), ShapeError, "(..., blocks, 4, 16)"),
    ],
)
def test_bad_arguments(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)
