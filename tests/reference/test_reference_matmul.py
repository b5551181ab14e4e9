"""P1, P3, P5, P6, P8: the grouped matmul by its definition, near float64, free of its batch."""

import ml_dtypes
import numpy as np
import pytest

from nbmoe import layouts, reference
from nbmoe.formats import MXFP4, MXFP8, NVFP4, PAIRS
from nbmoe.reference import oracle
from nbmoe.reference.matmul import decode_operand
from nbmoe.reference.tensor_core import BFLOAT16, F16, fused_dot

BF16 = ml_dtypes.bfloat16
CODE_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E8M0_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
MX_PAIRS = PAIRS[1:]
SHAPES = [
    ([5], 8, 64),
    ([3, 0, 130, 1], 24, 80),
    ([0, 0], 8, 16),
    ([1, 2], 136, 352),
    ([], 8, 64),
]


def run(problem, padding=0, **options):
    return reference.grouped_matmul_block_scaled(
        *problem.arguments(padding), problem.expert_scales, **problem.formats, **options
    )


def by_name(pair):
    return "x".join(fmt.name for fmt in pair)


every_pair = pytest.mark.parametrize("pair", PAIRS, ids=by_name)


def values(codes, scales, fmt=NVFP4):
    """Dequantized float64 by table, unpacked by hand."""
    if fmt is MXFP8:
        return E4M3_VALUES[codes] * np.repeat(E8M0_VALUES[scales], 32, axis=-1)
    codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    table = E4M3_VALUES if fmt is NVFP4 else E8M0_VALUES
    return CODE_VALUES[codes] * np.repeat(table[scales], fmt.block, axis=-1)


def slow_element(problem, m, n):
    """One output by the definition: fused dots over k % 4 == j of each 64-block, then scales."""
    expert = problem.expert_ids[problem.slot_of_row[m]]
    a = values(problem.hidden[m], problem.hidden_scales[m], problem.a_format)
    b = values(problem.weight[expert, n], problem.weight_scales[expert, n], problem.b_format)
    padded = -(-a.size // 64) * 64
    operands = np.zeros((2, padded))
    operands[0, : a.size], operands[1, : b.size] = a, b
    is_nvfp4 = problem.a_format is NVFP4
    dtype, operand, shift = (np.float16, F16, -14) if is_nvfp4 else (BF16, BFLOAT16, 0)
    half = (operands * 2.0**shift).astype(dtype)
    assert (half.astype(np.float64) * 2.0**-shift == operands).all()
    bits = half.view(np.uint16).tolist()
    acc = 0
    for block in range(0, padded, 64):
        for j in range(4):
            step = [block + j + 4 * i for i in range(16)]
            acc = fused_dot([bits[0][k] for k in step], [bits[1][k] for k in step], acc, operand)
    value = np.uint32(acc).view(np.float32) * np.float32(2.0 ** (-2 * shift))
    return (value * problem.expert_scales[expert]).astype(BF16)


@pytest.mark.parametrize(("counts", "n", "k"), SHAPES)
@pytest.mark.parametrize("wild_scales", [False, True])
@every_pair
def test_elements_follow_the_definition(make_problem, counts, n, k, wild_scales, pair):
    k = max(k, 32) // pair[0].block * pair[0].block
    problem = make_problem(counts, n, k, wild_scales=wild_scales, pair=pair)
    out = run(problem)
    assert out.shape == (sum(counts), n)
    assert out.dtype == BF16
    rng = np.random.default_rng(1)
    for _ in range(60 if out.size else 0):
        m, column = rng.integers(out.shape[0]), rng.integers(n)
        assert out[m, column] == slow_element(problem, m, column)


def test_every_nvfp4_code_and_scale_decodes_exactly():
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 4, axis=1)
    packed = np.tile(np.arange(0, 256, 8, dtype=np.uint8), (256, 1))
    packed[:, 1::2] += 7
    grouped = decode_operand(packed, scales, NVFP4)
    assert grouped.dtype == np.float16
    operand = layouts.ungroup_k(grouped.reshape(256, 1, 4, 16))
    np.testing.assert_array_equal(operand.astype(np.float64) * 2.0**14, values(packed, scales))
    assert set(np.unique(packed & 15)) | set(np.unique(packed >> 4)) == set(range(16))


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8], ids=lambda fmt: fmt.name)
def test_every_mx_code_and_scale_decodes_to_the_nearest_bfloat16(fmt):
    """Against ml_dtypes' tables and its rounding, which goes through an exact float32."""
    k = 256 * fmt.per_byte
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], k // 32, axis=1)
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    grouped = decode_operand(codes, scales, fmt)
    assert grouped.dtype == BF16
    operand = layouts.ungroup_k(grouped.reshape(256, k // 64, 4, 16))
    with np.errstate(over="ignore"):
        expected = values(codes, scales, fmt).astype(np.float32).astype(BF16)
    nan = np.isnan(expected.astype(np.float32))
    assert nan[255].all()
    assert (operand.view(np.uint16)[nan] == 0x7FFF).all()
    np.testing.assert_array_equal(operand.view(np.uint16)[~nan], expected.view(np.uint16)[~nan])
    # Rounding is at the ends of the exponent range only.
    exact = operand.astype(np.float64) == values(codes, scales, fmt)
    assert exact[10:246][~nan[10:246]].all()
    assert not exact[[0, 254]].all()


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4, MXFP8], ids=lambda fmt: fmt.name)
def test_operand_of_a_partial_block_is_padded_with_zeros(fmt):
    k = 80 if fmt is NVFP4 else 96
    code, one = (0x7E, 0x7F) if fmt is MXFP8 else (0x77, 0x38 if fmt is NVFP4 else 0x7F)
    codes = np.full((1, k // fmt.per_byte), code, np.uint8)
    grouped = decode_operand(codes, np.full((1, k // fmt.block), one, np.uint8), fmt)
    operand = layouts.ungroup_k(grouped.reshape(1, 2, 4, 16))
    value = fmt.max_value * (2.0**-14 if fmt is NVFP4 else 1)
    assert (operand[0, :k].astype(np.float64) == value).all()
    assert (operand[0, k:].view(np.uint16) == 0).all()


def bounds(problem, k):
    """Exact results, what the tensor core may cut (docs/formats.md), and that plus rounding."""
    magnitude = np.zeros((sum(problem.counts), problem.weight.shape[1]))
    exact = np.zeros_like(magnitude)
    for m, slot in enumerate(problem.slot_of_row):
        expert = problem.expert_ids[slot]
        a = values(problem.hidden[m], problem.hidden_scales[m], problem.a_format)
        b = values(problem.weight[expert], problem.weight_scales[expert], problem.b_format)
        scale = float(problem.expert_scales[expert])
        # A float16 operand below 2**-14, a value below 1, counts with the exponent of 1.
        least = 1 if problem.a_format is NVFP4 else 0
        largest_a, largest_b = (np.where(v == 0, 0, np.maximum(np.abs(v), least)) for v in (a, b))
        magnitude[m] = largest_b @ largest_a * scale
        exact[m] = b @ a * scale
    steps = 4 * -(-k // 64)
    cuts = steps * (17 * 2.0**-25 + 2.0**-23) * magnitude
    return exact, cuts, np.abs(exact) * 2.0**-8 + cuts


@pytest.mark.parametrize("wild_scales", [False, True])
@every_pair
def test_error_against_float64_is_bounded(make_problem, wild_scales, pair):
    k = 1168 if pair[0] is NVFP4 else 1184
    problem = make_problem([7, 130], 72, k, wild_scales=wild_scales, seed=2, pair=pair)
    out = run(problem).astype(np.float64)
    exact, cuts, bound = bounds(problem, k)
    error = np.abs(out - exact)
    assert (error <= bound).all()
    assert np.linalg.norm(out - exact) < 3e-3 * np.linalg.norm(exact)
    same = (out == exact.astype(np.float32).astype(BF16)).mean()
    assert same > 0.98, same
    args = problem.arguments()
    ours = oracle.grouped_matmul(
        oracle.dequantize_groups(args[0], args[2], problem.start, problem.offsets, pair[0]),
        oracle.dequantize(problem.weight, problem.weight_scales, pair[1]),
        problem.start,
        problem.expert_ids,
        problem.expert_scales,
    )
    np.testing.assert_allclose(ours, exact, rtol=0, atol=1e-12 * np.abs(exact).max())
    assert cuts.max() > 0


@every_pair
def test_bias_adds_in_float32_after_the_factors(make_problem, pair):
    problem = make_problem([4, 3], 16, 64, seed=3, expert_ids=[1, 0], pair=pair)
    plain = reference.matmul.scaled_products(
        *problem.arguments(), problem.expert_scales, **problem.formats
    )
    bias = np.random.default_rng(5).standard_normal((2, 16)).astype(BF16)
    expected = plain + bias.astype(np.float32)[[1, 0]][problem.slot_of_row]
    np.testing.assert_array_equal(run(problem, bias=bias), expected.astype(BF16))
    np.testing.assert_array_equal(run(problem, bias=bias.view(np.uint16)), expected.astype(BF16))


def test_formats_are_told_by_element_types(make_problem):
    for pair in PAIRS:
        problem = make_problem([4, 3], 16, 64, seed=3, pair=pair)
        args = list(problem.arguments())
        for i, fmt in ((0, pair[0]), (1, pair[1])):
            args[i] = args[i].view(getattr(ml_dtypes, fmt.codes_dtype, np.uint8))
            args[i + 2] = args[i + 2].view(getattr(ml_dtypes, fmt.scales_dtype, np.uint8))
        out = reference.grouped_matmul_block_scaled(*args, problem.expert_scales)
        np.testing.assert_array_equal(out, run(problem))


def test_mx_needs_no_expert_scales(make_problem):
    problem = make_problem([4, 3], 16, 64, seed=3, pair=(MXFP8, MXFP4))
    problem.expert_scales[:] = 1
    out = reference.grouped_matmul_block_scaled(*problem.arguments(), **problem.formats)
    np.testing.assert_array_equal(out, run(problem))


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
@every_pair
def test_a_row_does_not_depend_on_its_batch(make_problem, rows, pair):
    """P3: the same row alone and among others, some of them NaN."""
    problem = make_problem([rows, 3], 40, 96, seed=8, pair=pair)
    problem.hidden_scales[0] = 0x7F if pair[0] is NVFP4 else 0xFF
    needle = rows - 1
    code, scales = problem.hidden[needle].copy(), problem.hidden_scales[needle].copy()
    alone = make_problem([1], 40, 96, pair=pair)
    alone.hidden[:], alone.hidden_scales[:] = code, scales
    alone.weight, alone.weight_scales = problem.weight[:1], problem.weight_scales[:1]
    alone.expert_scales = problem.expert_scales[:1]
    np.testing.assert_array_equal(
        run(problem)[needle].view(np.uint16), run(alone)[0].view(np.uint16)
    )


@pytest.mark.parametrize("padding", [0x7F, 0xFF, 0x55])
@every_pair
def test_padding_of_scale_tiles_is_not_read(make_problem, padding, pair):
    problem = make_problem([3, 130, 0, 1], 24, 96, seed=9, pair=pair)
    np.testing.assert_array_equal(
        run(problem, padding).view(np.uint16), run(problem).view(np.uint16)
    )


@every_pair
def test_nan_scale_of_a_row_stays_in_the_row(make_problem, pair):
    problem = make_problem([3, 3], 24, 96, seed=10, pair=pair)
    clean = run(problem)
    problem.hidden[1, :8] = 0  # NaN times zero is still NaN
    problem.hidden_scales[1, 0] = 0x7F if pair[0] is NVFP4 else 0xFF
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
