"""P1: the fused epilogue equals the chained ops byte for byte, and float64 within its rounding."""

import ml_dtypes
import numpy as np
import pytest

from nbmoe import layouts, reference
from nbmoe.reference import oracle
from nbmoe.reference.quantize import quantize_nvfp4
from nbmoe.reference.swiglu import swiglu

BF16 = ml_dtypes.bfloat16


def fused(problem, c_input_scales, **options):
    """Runs on sigma-permuted weights; `problem` has gate rows then up rows."""
    args = list(problem.arguments())
    args[1] = layouts.sigma_permute(problem.weight)
    args[3] = layouts.interleave_scales(layouts.sigma_permute(problem.weight_scales))
    return reference.grouped_matmul_blocked_swiglu(
        *args,
        expert_scales=problem.expert_scales,
        c_input_scales=np.asarray(c_input_scales, np.float32),
        **options,
    )


def slot_scales(problem, tiles, columns):
    """Row-major scales of every row, read out by the layout's formula."""
    across = tiles.shape[1]
    flat = tiles.ravel()
    first = problem.start[:-1].astype(int) // 128 + problem.offsets
    r = np.arange(len(problem.hidden)) - problem.start[:-1].astype(int)[problem.slot_of_row]
    tile = (first[problem.slot_of_row] + r // 128)[:, None] * across
    c = np.arange(columns)
    r = r[:, None]
    return flat[(tile + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4]


@pytest.mark.parametrize(
    ("counts", "d", "k"), [([4, 1, 1], 64, 80), ([129, 0, 3], 48, 64), ([2], 16, 16)]
)
@pytest.mark.parametrize("row_scales", [False, True])
def test_fused_equals_chained(make_problem, counts, d, k, row_scales):
    problem = make_problem(counts, 2 * d, k, seed=1)
    sf = np.linspace(0.5, 2, len(counts))
    scale = np.linspace(0.5, 2, sum(counts)).astype(BF16) if row_scales else None
    packed, tiles = fused(problem, sf, a_row_scales=scale)
    chained = reference.grouped_matmul_block_scaled(
        *problem.arguments(), problem.expert_scales, a_row_scales=scale
    ).astype(np.float32)
    z = swiglu(chained[:, :d], chained[:, d:])
    for slot in range(len(counts)):
        rows = problem.slot_of_row == slot
        expected, expected_scales = quantize_nvfp4(z[rows], np.float32(sf[slot]))
        np.testing.assert_array_equal(packed[rows], expected)
        np.testing.assert_array_equal(slot_scales(problem, tiles, d // 16)[rows], expected_scales)
    assert packed.any()


def test_outputs_have_the_documented_shapes_and_padding(make_problem):
    problem = make_problem([129, 0, 3], 2 * 80, 64, seed=2)
    packed, tiles = fused(problem, np.ones(3))
    assert packed.shape == (132, 40)
    assert tiles.shape == (len(problem.a_tiles()), 2, 32, 4, 4)
    rows = layouts.deinterleave_scales(tiles, 128 * len(tiles), 8)
    used = np.zeros(rows.shape, bool)
    used[:129, :5] = True
    used[256:259, :5] = True
    assert (rows[~used] == 0).all()
    assert (rows[used] != 0).mean() > 0.9


def test_down_scale_goes_by_slot_and_expert_scale_by_id(make_problem):
    problem = make_problem([3, 2], 32, 64, expert_ids=[2, 0], seed=3)
    packed, tiles = fused(problem, [1.0, 2.0])
    chained = reference.grouped_matmul_block_scaled(*problem.arguments(), problem.expert_scales)
    chained = chained.astype(np.float32)
    z = swiglu(chained[:, :16], chained[:, 16:])
    np.testing.assert_array_equal(packed[:3], quantize_nvfp4(z[:3], np.float32(1))[0])
    np.testing.assert_array_equal(packed[3:], quantize_nvfp4(z[3:], np.float32(2))[0])
    assert tiles.any()


def test_masked_slot_gets_zeros(make_problem):
    problem = make_problem([3, 4, 5], 32, 64, seed=4)
    whole, whole_tiles = fused(problem, np.ones(3))
    problem.expert_ids[1] = -1
    packed, tiles = fused(problem, [1, np.nan, 1])
    assert (packed[3:7] == 0).all()
    assert (tiles[1] == 0).all()
    np.testing.assert_array_equal(
        np.delete(packed, range(3, 7), 0), np.delete(whole, range(3, 7), 0)
    )
    np.testing.assert_array_equal(tiles[[0, 2]], whole_tiles[[0, 2]])


def test_without_bf16_rounding_the_result_is_nearer_to_float64(make_problem):
    problem = make_problem([40, 30], 2 * 64, 256, seed=5)
    exact = oracle.grouped_matmul(
        oracle.dequantize_nvfp4(problem.hidden, problem.hidden_scales),
        oracle.dequantize_nvfp4(problem.weight, problem.weight_scales),
        problem.start,
        problem.expert_ids,
        problem.expert_scales,
    )
    z = oracle.swiglu(exact[:, :64], exact[:, 64:])
    sf = 2688 / np.abs(z).max()
    ideal = oracle.fake_quantize_nvfp4(z, sf)

    def disagreement(match_bf16):
        packed, tiles = fused(problem, np.full(2, sf), match_bf16=match_bf16)
        scales = slot_scales(problem, tiles, 4)
        got = oracle.dequantize_nvfp4(packed, scales, 1 / float(np.float32(sf)))
        assert np.linalg.norm(got - z) < 0.12 * np.linalg.norm(z)
        return np.linalg.norm(got - ideal) / np.linalg.norm(z)

    assert disagreement(False) < disagreement(True) < 0.05


def test_swiglu_in_float32():
    rng = np.random.default_rng(6)
    gate, up = (4 * rng.standard_normal((2, 5000))).astype(np.float32)
    got = swiglu(gate, up)
    assert got.dtype == np.float32
    wide = gate.astype(np.float64)
    expected = wide / (1 + np.exp(-wide)) * up
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_swiglu_of_extreme_gates():
    gate = np.array([-1e4, 1e4, -np.inf, np.inf, np.nan, 0], np.float32)
    got = swiglu(gate, np.ones(6, np.float32))
    np.testing.assert_array_equal(got, np.array([0, 1e4, np.nan, np.inf, np.nan, 0], np.float32))


def test_a_nan_row_shows_as_nan_scales_and_stays_alone(make_problem):
    problem = make_problem([3, 3], 64, 64, seed=7)
    clean, clean_tiles = fused(problem, np.ones(2))
    problem.hidden_scales[1] = 0x7F
    packed, tiles = fused(problem, np.ones(2))
    scales, clean_scales = (slot_scales(problem, t, 2) for t in (tiles, clean_tiles))
    assert (packed[1] == 0x77).all()
    assert (scales[1] == 0x7F).all()
    np.testing.assert_array_equal(np.delete(packed, 1, 0), np.delete(clean, 1, 0))
    np.testing.assert_array_equal(np.delete(scales, 1, 0), np.delete(clean_scales, 1, 0))


def test_hint_changes_nothing(make_problem):
    problem = make_problem([3, 3], 64, 64, seed=8)
    for hint in (0, 1, 600):
        for got, expected in zip(
            fused(problem, np.ones(2), estimated_total_m=hint),
            fused(problem, np.ones(2)),
            strict=True,
        ):
            np.testing.assert_array_equal(got, expected)
