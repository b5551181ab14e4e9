"""MXFP4 weights with their scales folded into e4m3, times FP8 tokens with a scale a row."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from nbmoe import backend, codecs, errors, layouts, ops, reference
from nbmoe.prepared.fp8 import pack_fp8_tokens
from nbmoe.prepared.w4a8 import PreparedW4A8Weights, folded_codes, pack_w4a8_weights
from nbmoe_kernels import heuristics_fp8_sm90 as heuristics
from nbmoe_kernels.matmul_fp8_sm90_config import Fp8HopperConfig
from tests.fp8_operands import make_problem
from tests.ops.compare import assert_same

BF16 = ml_dtypes.bfloat16
matmul = ops.grouped_rowwise_dynamic_scaled_fp8_matmul
in_simulator = backend.simulator_enabled()
PAIR = Fp8HopperConfig((16,), 2, 2, 1, (40, 232), max_slots=32, b_format="mxfp4")


def random_weights(
    experts: int, n: int, k: int, low: int = 120, high: int = 134
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Codes (E, N, K) and scale bytes (E, N, K/32) from low to high."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (experts, n, k), dtype=np.uint8)
    return codes, rng.integers(low, high + 1, (experts, n, k // 32), dtype=np.uint8)


def packed(codes: Any, scales: Any) -> tuple[Any, Any]:
    return codecs.pack_nibbles(codes), layouts.interleave_scales(scales)


def odd_weights(n: int, k: int) -> tuple[Any, Any]:
    """Also a NaN scale, zeros under a tiny scale, a row of -0, and both ends of e8m0's range."""
    codes, scales = random_weights(4, n, k)
    scales[0, 0, 0] = 0xFF
    codes[0, 1, :32], scales[0, 1, 0] = 0, 3
    codes[1, 3] = 8
    scales[1, 2], scales[1, 4] = scales[1, 2] - 120, scales[1, 4] + 120
    return codes, scales


def test_folding_is_exact(kernels: Any) -> None:
    codes, scales = odd_weights(136, 224)
    weights = kernels(ops.prepare_w4a8_weights, *packed(codes, scales))
    want = pack_w4a8_weights(*packed(codes, scales))
    assert_same(weights.data, want.data)
    assert_same(weights.scales, want.scales)
    assert (np.frexp(want.scales)[0] == 0.5).all(), "powers of two"
    powers = scales.astype(np.float64).repeat(32, axis=-1) - 127
    values = codecs.decode_e2m1(codes) * np.exp2(powers)
    folded = codecs.decode_e4m3(folded_codes(want)).astype(np.float64) * want.scales
    is_nan = scales.repeat(32, axis=-1) == 0xFF
    assert np.isnan(folded[is_nan]).all()
    np.testing.assert_array_equal(folded[~is_nan], values[~is_nan])


def test_scales_that_do_not_fold_are_refused(kernels: Any) -> None:
    codes, scales = random_weights(2, 8, 128, 127, 127)
    codes[1, 5, 40] = 1
    scales[1, 5] = (120, 134, 134, 134)
    codes[1, 5, :32] = 1
    kernels(ops.prepare_w4a8_weights, *packed(codes, scales))
    scales[1, 5, 0] = 119
    with pytest.raises(errors.ScaleError, match=r"row 5 of expert 1.*prepare_weights"):
        kernels(ops.prepare_w4a8_weights, *packed(codes, scales))
    with pytest.raises(errors.ScaleError, match=r"within 2\^14"):
        ops.prepare_w4a8_weights(*packed(codes, scales), backend="reference")
    codes[1, 5, :32] = 8  # -0
    kernels(ops.prepare_w4a8_weights, *packed(codes, scales))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small shape: each is a kernel to compile."""
    monkeypatch.setattr(heuristics, "fp8_hopper_config", lambda *args: PAIR)


@pytest.mark.usefixtures("small")
def test_equals_reference(kernels: Any) -> None:
    n, k = (72, 160) if in_simulator else (136, 288)
    counts = [3, 0, 1] if in_simulator else [3, 0, 19, 30]
    problem = make_problem(counts, n, k, rowwise=True, expert_ids=[0, 1, 2, -1][: len(counts)])
    weights = pack_w4a8_weights(*packed(*odd_weights(n, k)))
    tokens = pack_fp8_tokens(problem.hidden, problem.a_scales, problem.starts)
    arguments = (tokens, weights, None, None, problem.starts, problem.expert_ids)
    bias = problem.bias if len(problem.bias) == 4 else np.resize(problem.bias, (4, n))
    expected = matmul(*arguments, bias=bias, backend="reference")
    assert np.isnan(expected.astype(np.float32)).any() and np.isfinite(expected[0, 1])
    assert_same(kernels(matmul, *arguments, bias=bias), expected)
    # The same as e4m3 weights with a scale a row.
    operands = (problem.hidden, folded_codes(weights), problem.a_scales, weights.scales)
    same = reference.grouped_rowwise_dynamic_scaled_fp8_matmul(
        *operands, problem.starts, problem.expert_ids, bias=bias, numerics="e4m3"
    )
    assert_same(expected, same)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("k", [96, 128, 160, 256, 288])
def test_any_number_of_blocks(kernels: Any, k: int) -> None:
    """Half a stage of one block, of two, and what is left after whole stages."""
    problem = make_problem([2, 9], 72, k, rowwise=True, expert_ids=[1, 0])
    weights = pack_w4a8_weights(*packed(*random_weights(2, 72, k)))
    tokens = pack_fp8_tokens(problem.hidden, problem.a_scales, problem.starts)
    arguments = (tokens, weights, None, None, problem.starts, problem.expert_ids)
    assert_same(kernels(matmul, *arguments), matmul(*arguments, backend="reference"))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("powers", [range(15), range(3, 15), [14, 2], [14, 14, 14, 0]])
def test_each_code_at_each_power(kernels: Any, powers: Any) -> None:
    """Tokens of one 1 show a column of weights each: code times scale, with no rounding at all."""
    powers = list(powers)
    k, columns = 32 * len(powers), [32 * b + c for b in range(len(powers)) for c in range(16)]
    if in_simulator:
        columns = columns[::7]
    codes = np.zeros((1, 8, k), np.uint8)
    codes[0] = (np.arange(k) + np.arange(8)[:, np.newaxis]) % 16
    scales = np.broadcast_to(np.array(powers, np.uint8) + 120, (1, 8, len(powers))).copy()
    ones = np.zeros((len(columns), k), np.uint8)
    ones[np.arange(len(columns)), columns] = 0x38
    starts = np.array([0, len(columns)], np.uint32)
    tokens = pack_fp8_tokens(ones, np.ones((1, len(columns)), np.float32), starts)
    weights = kernels(ops.prepare_w4a8_weights, *packed(codes, scales))
    got = kernels(matmul, tokens, weights, None, None, starts, np.zeros(1, np.int32))
    want = codecs.decode_e2m1(codes[0]) * np.exp2(scales[0].repeat(32, axis=-1) - 127.0)
    np.testing.assert_array_equal(got.view(BF16).astype(np.float64), want[:, columns].T)


def test_misuse() -> None:
    problem = make_problem([3], 8, 128, rowwise=True)
    tokens = pack_fp8_tokens(problem.hidden, problem.a_scales, problem.starts)
    weights = pack_w4a8_weights(*packed(*random_weights(1, 8, 128)))
    routing = (problem.starts, problem.expert_ids)
    with pytest.raises(errors.ConfigError, match="b_scales: expected None"):
        matmul(tokens, weights, None, problem.b_scales, *routing)
    with pytest.raises(errors.ConfigError, match="rowwise"):
        ops.grouped_dynamic_scaled_fp8_matmul(tokens, weights, None, None, *routing)
    with pytest.raises(errors.ShapeError, match="K = 128"):
        matmul(tokens, replace(weights, k=256), None, None, *routing)
    with pytest.raises(errors.ShapeError, match="K % 32"):
        ops.prepare_w4a8_weights(np.zeros((1, 8, 8), np.uint8), np.zeros((1,) * 6, np.uint8))
    assert isinstance(weights, PreparedW4A8Weights)
