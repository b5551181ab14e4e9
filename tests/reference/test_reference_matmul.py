"""P1, P3, P5, P6, P8: the grouped matmul by its definition, near float64, free of its batch."""

import ml_dtypes
import numpy as np
import pytest

from nbmoe import layouts, reference
from nbmoe.reference import oracle
from nbmoe.reference.matmul import decode_operand
from nbmoe.reference.tensor_core import F16, fused_dot

BF16 = ml_dtypes.bfloat16
CODE_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
SHAPES = [
    ([5], 8, 64),
    ([3, 0, 130, 1], 24, 80),
    ([0, 0], 8, 16),
    ([1, 2], 136, 352),
    ([], 8, 64),
]


def run(problem, padding=0, **options):
    return reference.grouped_matmul_block_scaled(
        *problem.arguments(padding), problem.expert_scales, **options
    )


def values(packed, scales):
    """Dequantized float64 by table, unpacked by hand."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return CODE_VALUES[codes] * np.repeat(E4M3_VALUES[scales], 16, axis=-1)


def slow_element(problem, m, n):
    """One output by the definition: fused dots over k % 4 == j of each 64-block, then scales."""
    expert = problem.expert_ids[problem.slot_of_row[m]]
    a = values(problem.hidden[m], problem.hidden_scales[m]) * 2.0**-14
    b = values(problem.weight[expert, n], problem.weight_scales[expert, n]) * 2.0**-14
    padded = -(-a.size // 64) * 64
    operands = np.zeros((2, padded))
    operands[0, : a.size], operands[1, : b.size] = a, b
    half = operands.astype(np.float16)
    assert (half == operands).all()
    bits = half.view(np.uint16).tolist()
    acc = 0
    for block in range(0, padded, 64):
        for j in range(4):
            step = [block + j + 4 * i for i in range(16)]
            acc = fused_dot([bits[0][k] for k in step], [bits[1][k] for k in step], acc, F16)
    value = np.uint32(acc).view(np.float32) * np.float32(2.0**28)
    return (value * problem.expert_scales[expert]).astype(BF16)


@pytest.mark.parametrize(("counts", "n", "k"), SHAPES)
@pytest.mark.parametrize("wild_scales", [False, True])
def test_elements_follow_the_definition(make_problem, counts, n, k, wild_scales):
    problem = make_problem(counts, n, k, wild_scales=wild_scales)
    out = run(problem)
    assert out.shape == (sum(counts), n)
    assert out.dtype == BF16
    rng = np.random.default_rng(1)
    for _ in range(60 if out.size else 0):
        m, column = rng.integers(out.shape[0]), rng.integers(n)
        assert out[m, column] == slow_element(problem, m, column)


def test_every_code_and_scale_decodes_exactly():
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 4, axis=1)
    packed = np.tile(np.arange(0, 256, 8, dtype=np.uint8), (256, 1))
    packed[:, 1::2] += 7
    grouped = decode_operand(packed, scales)
    assert grouped.dtype == np.float16
    operand = layouts.ungroup_k(grouped.reshape(256, 1, 4, 16))
    np.testing.assert_array_equal(operand.astype(np.float64) * 2.0**14, values(packed, scales))
    assert set(np.unique(packed & 15)) | set(np.unique(packed >> 4)) == set(range(16))


def test_operand_of_a_partial_block_is_padded_with_zeros():
    packed = np.full((1, 40), 0x77, np.uint8)
    operand = layouts.ungroup_k(
        decode_operand(packed, np.full((1, 5), 0x38, np.uint8)).reshape(1, 2, 4, 16)
    )
    assert (operand[0, :80] == np.float16(6 * 2.0**-14)).all()
    assert (operand[0, 80:].view(np.uint16) == 0).all()


def bounds(problem, k):
    """Exact results, what the tensor core may cut (docs/formats.md), and that plus rounding."""
    magnitude = np.zeros((sum(problem.counts), problem.weight.shape[1]))
    exact = np.zeros_like(magnitude)
    for m, slot in enumerate(problem.slot_of_row):
        expert = problem.expert_ids[slot]
        a = values(problem.hidden[m], problem.hidden_scales[m])
        b = values(problem.weight[expert], problem.weight_scales[expert])
        scale = float(problem.expert_scales[expert])
        # A float16 operand below 2**-14, a value below 1, counts with the exponent of 1.
        largest_a, largest_b = (np.where(v == 0, 0, np.maximum(np.abs(v), 1)) for v in (a, b))
        magnitude[m] = largest_b @ largest_a * scale
        exact[m] = b @ a * scale
    steps = 4 * -(-k // 64)
    cuts = steps * (17 * 2.0**-25 + 2.0**-23) * magnitude
    return exact, cuts, np.abs(exact) * 2.0**-8 + cuts


@pytest.mark.parametrize("wild_scales", [False, True])
def test_error_against_float64_is_bounded(make_problem, wild_scales):
    problem = make_problem([7, 130], 72, 1168, wild_scales=wild_scales, seed=2)
    out = run(problem).astype(np.float64)
    exact, cuts, bound = bounds(problem, 1168)
    error = np.abs(out - exact)
    assert (error <= bound).all()
    assert np.linalg.norm(out - exact) < 3e-3 * np.linalg.norm(exact)
    same = (out == exact.astype(np.float32).astype(BF16)).mean()
    assert same > 0.98, same
    args = problem.arguments()
    ours = oracle.grouped_matmul(
        oracle.dequantize_groups(args[0], args[2], problem.start, problem.offsets),
        oracle.dequantize_nvfp4(problem.weight, problem.weight_scales),
        problem.start,
        problem.expert_ids,
        problem.expert_scales,
    )
    np.testing.assert_allclose(ours, exact, rtol=0, atol=1e-12 * np.abs(exact).max())
    assert cuts.max() > 0


def test_row_scales_multiply_in_float32(make_problem):
    problem = make_problem([4, 3], 16, 64, seed=3)
    row_scales = np.random.default_rng(4).uniform(0.5, 2, 7).astype(BF16)
    plain = reference.matmul.scaled_products(*problem.arguments(), problem.expert_scales)
    out = run(problem, a_row_scales=row_scales)
    np.testing.assert_array_equal(
        out, (plain * row_scales.astype(np.float32)[:, None]).astype(BF16)
    )
    bits = run(problem, a_row_scales=row_scales.view(np.uint16))
    np.testing.assert_array_equal(out, bits)
    exact = bounds(problem, 64)[0] * row_scales.astype(np.float64)[:, None]
    ours = oracle.grouped_matmul(
        values(problem.hidden, problem.hidden_scales),
        values(problem.weight, problem.weight_scales),
        problem.start,
        problem.expert_ids,
        problem.expert_scales,
        row_scales,
    )
    np.testing.assert_allclose(ours, exact, rtol=1e-12)


def test_expert_scale_goes_by_expert_id(make_problem):
    problem = make_problem([2, 2], 8, 64, expert_ids=[3, 1], seed=5)
    for m in range(4):
        for n in range(8):
            assert run(problem)[m, n] == slow_element(problem, m, n)


def test_masked_slots_are_zero_and_keep_their_rows(make_problem):
    problem = make_problem([3, 4, 5], 16, 64, seed=6)
    whole = run(problem)
    problem.expert_ids[1] = -1
    out = run(problem)
    assert (out[3:7].view(np.uint16) == 0).all()
    np.testing.assert_array_equal(np.delete(out, range(3, 7), 0), np.delete(whole, range(3, 7), 0))
    problem.expert_ids[:] = -1
    assert (run(problem).view(np.uint16) == 0).all()


def test_rows_behind_the_last_slot_are_zero(make_problem):
    problem = make_problem([3, 4], 16, 64, seed=7)
    args = list(problem.arguments())
    args[0] = np.concatenate([args[0], args[0][:2]])
    out = reference.grouped_matmul_block_scaled(*args, problem.expert_scales)
    np.testing.assert_array_equal(out[:7], run(problem))
    assert (out[7:].view(np.uint16) == 0).all()


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 127, 128, 129, 300])
def test_a_row_does_not_depend_on_its_batch(make_problem, rows):
    """P3: the same row alone and among others, some of them NaN."""
    problem = make_problem([rows, 3], 40, 96, seed=8)
    problem.hidden_scales[0] = 0x7F
    needle = rows - 1
    code, scales = problem.hidden[needle].copy(), problem.hidden_scales[needle].copy()
    alone = make_problem([1], 40, 96)
    alone.hidden[:], alone.hidden_scales[:] = code, scales
    alone.weight, alone.weight_scales = problem.weight[:1], problem.weight_scales[:1]
    alone.expert_scales = problem.expert_scales[:1]
    np.testing.assert_array_equal(
        run(problem)[needle].view(np.uint16), run(alone)[0].view(np.uint16)
    )


@pytest.mark.parametrize("padding", [0x7F, 0xFF, 0x55])
def test_padding_of_scale_tiles_is_not_read(make_problem, padding):
    problem = make_problem([3, 130, 0, 1], 24, 80, seed=9)
    np.testing.assert_array_equal(
        run(problem, padding).view(np.uint16), run(problem).view(np.uint16)
    )


def test_nan_scale_of_a_row_stays_in_the_row(make_problem):
    problem = make_problem([3, 3], 24, 80, seed=10)
    clean = run(problem)
    problem.hidden[1, :8] = 0  # NaN times zero is still NaN
    problem.hidden_scales[1, 0] = 0x7F
    out = run(problem).view(np.uint16)
    assert (out[1] == 0x7FFF).all()
    np.testing.assert_array_equal(np.delete(out, 1, 0), np.delete(clean.view(np.uint16), 1, 0))


def test_nan_in_one_expert_stays_in_its_rows(make_problem):
    problem = make_problem([3, 3], 24, 80, seed=11)
    clean = run(problem)
    problem.weight_scales[0, 5, 4] = 0xFF
    out = run(problem).view(np.uint16)
    assert (out[:3, 5] == 0x7FFF).all()
    out[:3, 5] = clean.view(np.uint16)[:3, 5]
    np.testing.assert_array_equal(out, clean.view(np.uint16))


def test_hint_changes_nothing(make_problem):
    problem = make_problem([3, 3], 24, 80, seed=12)
    for hint in (None, 0, 1, 6, 60):
        np.testing.assert_array_equal(run(problem, estimated_total_m=hint), run(problem))


def test_sigma_permuted_weights_permute_the_columns(make_problem):
    problem = make_problem([9, 2], 32, 80, seed=13)
    plain = run(problem)
    problem.weight = layouts.sigma_permute(problem.weight)
    problem.weight_scales = layouts.sigma_permute(problem.weight_scales)
    permuted = run(problem)
    np.testing.assert_array_equal(permuted[:, 0::2], plain[:, :16])
    np.testing.assert_array_equal(permuted[:, 1::2], plain[:, 16:])


def test_the_k_grouping_shows_in_the_bits(make_problem):
    """Consecutive 16s would be another specification: this data tells the two apart."""
    problem = make_problem([20], 200, 512, seed=14, wild_scales=True)
    a = values(problem.hidden, problem.hidden_scales) * 2.0**-14
    b = values(problem.weight[0], problem.weight_scales[0]) * 2.0**-14
    acc = reference.tensor_core.matmul(a.astype(np.float16), b.astype(np.float16))
    other = acc * np.float32(2.0**28) * problem.expert_scales[0]
    ours = reference.matmul.scaled_products(*problem.arguments(), problem.expert_scales)
    assert (other != ours).any()
