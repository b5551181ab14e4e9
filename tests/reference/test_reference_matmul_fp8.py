"""P1, P3, P5, P6, P8: the FP8 matmuls by their definition, near float64, free of their batch."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from nbmoe import layouts, reference
from nbmoe.reference.matmul_fp8 import block_products, decode_fp8, row_products
from nbmoe.reference.tensor_core import E4M3, F16, fused_dot
from tests.fp8_operands import E4M3_VALUES, exact_result, make_problem

BF16 = ml_dtypes.bfloat16
by_block = reference.grouped_dynamic_scaled_fp8_matmul
by_row = reference.grouped_rowwise_dynamic_scaled_fp8_matmul
batched = reference.batched_dynamic_scaled_fp8_matmul
SHAPES = [
    ([5], 8, 128),
    ([3, 0, 130, 1], 136, 192),
    ([2, 1], 24, 64),
    ([1, 2], 256, 704),
    ([0, 0], 8, 16),
]
either = pytest.mark.parametrize("rowwise", [False, True], ids=["block", "row"])


def run(problem, rowwise, **options):
    return (by_row if rowwise else by_block)(*problem.arguments(), **options)


def fused_fma(a, b, c):
    """a * b + c rounded once to float32, through integers."""
    from fractions import Fraction

    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = np.float32(float(exact))
    candidates = [
        near,
        np.nextafter(near, np.float32(-np.inf)),
        np.nextafter(near, np.float32(np.inf)),
    ]
    return min(
        candidates,
        key=lambda v: (abs(Fraction(float(v)) - exact), int(np.float32(v).view(np.uint32)) & 1),
    )


def slow_element(problem, m, n, rowwise):
    """One output by the definition: fused dots over k % 4 == j of each 64-block, then scales."""
    expert = next(e for rows, e in problem.slots() if rows.start <= m < rows.stop)
    k = problem.hidden.shape[1]
    padded = -(-k // 64) * 64
    operands = np.zeros((2, padded))
    operands[0, :k] = E4M3_VALUES[problem.hidden[m]]
    operands[1, :k] = E4M3_VALUES[problem.weight[expert, n]]
    half = operands.astype(np.float16)
    assert (half == operands).all()
    bits = half.view(np.uint16).tolist()

    def dot(blocks):
        acc = 0
        for block in blocks:
            for j in range(4):
                step = [64 * block + j + 4 * i for i in range(16)]
                acc = fused_dot([bits[0][s] for s in step], [bits[1][s] for s in step], acc, F16)
        return np.uint32(acc).view(np.float32)

    blocks = range(padded // 64)
    if rowwise:
        return dot(blocks) * problem.a_scales[m, 0] * problem.b_scales[expert, n, 0]
    acc = np.float32(0)
    for block in range(-(-k // 128)):
        scales = problem.a_scales[block, m], problem.b_scales[expert, n // 128, block]
        scale = np.float32(scales[0]) * np.float32(scales[1])
        acc = fused_fma(dot(blocks[2 * block : 2 * block + 2]), scale, acc)
    return acc


def slow_e4m3_element(problem, m, n, rowwise):
    """One output by the definition of "e4m3": fused dots over 32 neighbours, from 0 each 128."""
    expert = next(e for rows, e in problem.slots() if rows.start <= m < rows.stop)
    k = problem.hidden.shape[1]
    codes = np.zeros((2, -(-k // 128) * 128), np.uint8)
    codes[0, :k], codes[1, :k] = problem.hidden[m], problem.weight[expert, n]
    acc = np.float32(0)
    for begin in range(0, codes.shape[1], 128):
        bits = 0
        for step in range(begin, begin + 128, 32):
            bits = fused_dot(*codes[:, step : step + 32].tolist(), bits, E4M3)
        sums = np.uint32(bits).view(np.float32)
        if rowwise:
            acc = acc + sums
        else:
            block = begin // 128
            scales = problem.a_scales[block, m], problem.b_scales[expert, n // 128, block]
            acc = fused_fma(sums, np.float32(scales[0]) * np.float32(scales[1]), acc)
    if rowwise:
        return acc * problem.a_scales[m, 0] * problem.b_scales[expert, n, 0]
    return acc


@either
def test_elements_follow_the_definition_of_e4m3(rowwise):
    problem = make_problem([5, 0, 2], 136, 328, rowwise=rowwise, odd_scales=True)
    out = run(problem, rowwise, numerics="e4m3")
    rng = np.random.default_rng(2)
    for _ in range(60):
        m, column = int(rng.integers(7)), int(rng.integers(136))
        assert out[m, column] == slow_e4m3_element(problem, m, column, rowwise).astype(BF16)


@either
def test_e4m3_is_near_float64(rowwise):
    """A step cuts 33 addends 2**-13 below the largest and the sum to 14 bits."""
    problem = make_problem([40], 136, 1024, rowwise=rowwise)
    out = run(problem, rowwise, numerics="e4m3").astype(float)
    exact, _ = exact_result(problem)
    magnitude, _ = exact_result(magnitudes(problem))
    bound = magnitude * (4 * 33 * 2.0**-13 + 2.0**-13) + np.abs(exact) * 2.0**-8
    assert (np.abs(out - exact) <= bound).all()
    # And much nearer than that on average.
    assert np.abs(out - exact).mean() < 2e-3 * magnitude.mean()


def magnitudes(problem):
    """The problem of absolute values."""
    hidden, weight = problem.hidden & 0x7F, problem.weight & 0x7F
    return replace(problem, hidden=hidden, weight=weight)


@pytest.mark.parametrize(("counts", "n", "k"), SHAPES)
@pytest.mark.parametrize("odd_scales", [False, True])
@either
def test_elements_follow_the_definition(counts, n, k, odd_scales, rowwise):
    problem = make_problem(counts, n, k, rowwise=rowwise, odd_scales=odd_scales)
    out = run(problem, rowwise)
    assert out.shape == (sum(counts), n) and out.dtype == BF16
    rng = np.random.default_rng(1)
    for rows, expert in problem.slots():
        a, b = decode_fp8(problem.hidden[rows]), decode_fp8(problem.weight[expert])
        if rowwise:
            scales = problem.a_scales[rows, 0], problem.b_scales[expert, :, 0]
            sums = row_products(a, b, *scales)
        else:
            sums = block_products(a, b, problem.a_scales[:, rows], problem.b_scales[expert])
        for _ in range(20):
            m, column = int(rng.integers(rows.start, rows.stop)), int(rng.integers(n))
            expected = slow_element(problem, m, column, rowwise)
            assert sums[m - rows.start, column] == expected  # to the last bit of float32
            assert out[m, column] == expected.astype(BF16)


def test_every_code_decodes_exactly():
    operand = layouts.ungroup_k(decode_fp8(np.arange(256, dtype=np.uint8)[None]).reshape(4, 4, 16))
    np.testing.assert_array_equal(operand.ravel().astype(np.float64), E4M3_VALUES)


@pytest.mark.parametrize(("counts", "n", "k"), SHAPES)
@pytest.mark.parametrize("scales_type", [np.float32, BF16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_near_float64(counts, n, k, scales_type, with_bias):
    for rowwise in (False, True):
        problem = make_problem(counts, n, k, rowwise=rowwise, scales_type=scales_type, seed=3)
        out = run(problem, rowwise, bias=problem.bias if with_bias else None).astype(float)
        exact, bound = exact_result(problem, with_bias)
        assert (np.abs(out - exact) <= bound + (np.abs(exact) + bound) * 2.0**-8).all()


@either
def test_integers_are_exact(rowwise):
    """Small integers and scales that are powers of two: every order of sums gives the same."""
    problem = make_problem([4, 3], 16, 320, rowwise=rowwise)
    small = np.uint8([0x38, 0x40, 0xB8, 0x00])  # 1, 2, -1, 0
    rng = np.random.default_rng(0)
    problem.hidden = rng.choice(small, problem.hidden.shape)
    problem.weight = rng.choice(small, problem.weight.shape)
    problem.a_scales = np.exp2(rng.integers(-3, 3, problem.a_scales.shape)).astype(np.float32)
    problem.b_scales = np.exp2(rng.integers(-3, 3, problem.b_scales.shape)).astype(np.float32)
    exact, _ = exact_result(problem)
    np.testing.assert_array_equal(run(problem, rowwise), exact.astype(np.float32).astype(BF16))


@pytest.mark.parametrize("scale", [1e-23, 1e-39, 1e-45, 0.0])
@either
def test_no_nan_from_a_weight_of_tiny_scale(scale, rowwise):
    problem = make_problem([3, 2], 128, 256, rowwise=rowwise)
    problem.b_scales[0] = scale
    out = run(problem, rowwise).astype(np.float32)
    assert np.isfinite(out).all() and np.abs(out[:3]).max() < 1e-15
    assert np.abs(out[3:]).max() > 1


@either
def test_nan_code_stays_in_its_row_and_column(rowwise):
    problem = make_problem([3, 2], 16, 256, rowwise=rowwise)
    before = run(problem, rowwise)
    problem.hidden[1, 200] = 0xFF
    problem.weight[1, 5, 3] = 0x7F
    after = run(problem, rowwise)
    assert (after[1].view(np.uint16) == 0x7FFF).all()
    assert (after[3:, 5].view(np.uint16) == 0x7FFF).all()
    after[1], after[3:, 5] = before[1], before[3:, 5]
    assert after.tobytes() == before.tobytes()


@either
def test_masked_and_unowned_rows_are_zero(rowwise):
    problem = make_problem([3, 2, 4], 8, 128, expert_ids=[2, -1, 0], rowwise=rowwise, spare_rows=2)
    out = run(problem, rowwise)
    assert (out[3:5].view(np.uint16) == 0).all() and (out[9:].view(np.uint16) == 0).all()
    assert (out[:3] != 0).any() and (out[5:9] != 0).any()
    masked = problem.hidden.copy()
    masked[3:5] = 0x7F
    problem.hidden = masked
    assert run(problem, rowwise).tobytes() == out.tobytes()


@either
def test_row_alone_equals_row_in_batch(rowwise):
    problem = make_problem([17, 3], 24, 192, rowwise=rowwise)
    out = run(problem, rowwise)
    for m, expert in ((4, 0), (18, 1)):
        alone = make_problem([1], 24, 192, rowwise=rowwise)
        alone.hidden, alone.weight = problem.hidden[[m]], problem.weight[[expert]]
        alone.a_scales = problem.a_scales[[m]] if rowwise else problem.a_scales[:, [m]]
        alone.b_scales = problem.b_scales[[expert]]
        assert run(alone, rowwise)[0].tobytes() == out[m].tobytes()


def test_scales_of_one_block_equal_scales_of_rows_without_rounding():
    """K of one block and powers of two: fma from 0 and two products are the same."""
    problem = make_problem([5], 128, 128)
    problem.a_scales[:] = 2.0**-4
    problem.b_scales[:] = 2.0**3
    expected = by_block(*problem.arguments())
    for shape in ((5, 1), (1, 8), (1,), (1, 1)):
        problem.a_scales = np.full(shape, 2.0**-4, np.float32)
        for of_weight in ((1, 128, 1), (1, 1, 1), (1,)):
            problem.b_scales = np.full(of_weight, 2.0**3, np.float32)
            assert by_row(*problem.arguments()).tobytes() == expected.tobytes()


def test_batched_equals_a_matmul_each():
    problem = make_problem([6, 6, 6], 136, 192)
    a = problem.hidden.reshape(3, 6, 192)
    a_scales = np.stack([problem.a_scales[:, 6 * i : 6 * i + 6] for i in range(3)])
    out = batched(a, problem.weight, a_scales, problem.b_scales)
    assert out.reshape(18, 136).tobytes() == by_block(*problem.arguments()).tobytes()
