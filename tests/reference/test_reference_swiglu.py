"""P1: the fused epilogue equals the chained ops byte for byte, and float64 within its rounding."""

import ml_dtypes
import numpy as np
import pytest

from nbmoe import layouts, reference
from nbmoe.activation import GatedActivation
from nbmoe.errors import ConfigError, ScaleError
from nbmoe.formats import MXFP8, NVFP4, PAIRS
from nbmoe.reference import oracle
from nbmoe.reference.activation import gated_activation
from nbmoe.reference.quantize import quantize_blocks

BF16 = ml_dtypes.bfloat16


def fused(problem, c_input_scales, **options):
    """Runs on sigma-permuted weights; `problem` has gate rows then up rows."""
    args = list(problem.arguments())
    args[1] = layouts.sigma_permute(problem.weight)
    args[3] = layouts.interleave_scales(layouts.sigma_permute(problem.weight_scales))
    return reference.grouped_matmul_blocked_swiglu(
        *args,
        expert_scales=problem.expert_scales,
        c_input_scales=None if c_input_scales is None else np.asarray(c_input_scales, np.float32),
        **problem.formats,
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


ACTIVATIONS = (
    None,
    GatedActivation(limit=0.5),
    GatedActivation("swigluoai", alpha=1.702, limit=7.0),
    GatedActivation("gelu_tanh"),
    GatedActivation(gated_activation_fn=lambda gate, up: max(gate, np.float32(0)) * up),
)


@pytest.mark.parametrize(
    ("counts", "d", "k"), [([4, 1, 1], 64, 96), ([129, 0, 3], 96, 64), ([2], 32, 32)]
)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "x".join(fmt.name for fmt in pair))
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a and a.fused_activation)
@pytest.mark.parametrize("extras", [False, True])
def test_fused_equals_chained(make_problem, counts, d, k, pair, activation, extras):
    problem = make_problem(counts, 2 * d, k, seed=1, pair=pair)
    rng, fmt = np.random.default_rng(2), pair[0]
    sf = np.linspace(0.5, 2, len(counts))
    options = {}
    if extras:
        options["bias"] = rng.standard_normal((len(counts), 2 * d)).astype(BF16)
        if fmt is NVFP4:
            options["a_row_scales"] = np.linspace(0.5, 2, sum(counts)).astype(BF16)
    permuted = {
        name: layouts.sigma_permute(x, axis=-1) if name == "bias" else x
        for name, x in options.items()
    }
    given = sf if fmt is NVFP4 else None
    codes, tiles = fused(problem, given, activation=activation, **permuted)
    assert (codes.dtype.name, tiles.dtype.name) == (fmt.codes_dtype, fmt.scales_dtype)
    chained = reference.grouped_matmul_block_scaled(
        *problem.arguments(), problem.expert_scales, **problem.formats, **options
    ).astype(np.float32)
    z = gated_activation(chained[:, :d], chained[:, d:], activation)
    codes, scales = codes.view(np.uint8), slot_scales(problem, tiles.view(np.uint8), d // fmt.block)
    for slot in range(len(counts)):
        rows = problem.slot_of_row == slot
        expected, expected_scales = quantize_blocks(z[rows], fmt, np.float32(sf[slot]))
        np.testing.assert_array_equal(codes[rows], expected.view(np.uint8))
        np.testing.assert_array_equal(scales[rows], expected_scales.view(np.uint8))
    assert codes.any()


@pytest.mark.parametrize(
    ("pair", "scales", "error"),
    [((MXFP8, MXFP8), [1, 1], ConfigError), ((NVFP4, NVFP4), None, ScaleError)],
)
def test_input_scales_of_the_down_projection_are_for_nvfp4(make_problem, pair, scales, error):
    problem = make_problem([3, 2], 64, 64, seed=3, pair=pair)
    with pytest.raises(error, match="c_input_scales: expected"):
        fused(problem, scales)


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
    z = gated_activation(chained[:, :16], chained[:, 16:])
    np.testing.assert_array_equal(packed[:3], quantize_blocks(z[:3], NVFP4, np.float32(1))[0])
    np.testing.assert_array_equal(packed[3:], quantize_blocks(z[3:], NVFP4, np.float32(2))[0])
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
        oracle.dequantize(problem.hidden, problem.hidden_scales),
        oracle.dequantize(problem.weight, problem.weight_scales),
        problem.start,
        problem.expert_ids,
        problem.expert_scales,
    )
    z = oracle.gated_activation(exact[:, :64], exact[:, 64:])
    sf = 2688 / np.abs(z).max()
    ideal = oracle.fake_quantize(z, NVFP4, sf)

    def disagreement(match_bf16):
        packed, tiles = fused(problem, np.full(2, sf), match_bf16=match_bf16)
        scales = slot_scales(problem, tiles, 4)
        got = oracle.dequantize(packed, scales, NVFP4, 1 / float(np.float32(sf)))
        assert np.linalg.norm(got - z) < 0.12 * np.linalg.norm(z)
        return np.linalg.norm(got - ideal) / np.linalg.norm(z)

    assert disagreement(False) < disagreement(True) < 0.05


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
