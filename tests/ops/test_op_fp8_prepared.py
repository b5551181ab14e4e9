"""The FP8 matmuls of prepared operands equal the reference byte for byte, whatever the shape."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nbmoe import backend, errors, ops
from nbmoe.config import QuantConfig
from nbmoe.prepared.fp8 import (
    PreparedFp8Tokens,
    pack_fp8_tokens,
    pack_fp8_weights,
    unpack_fp8_tokens,
    unpack_fp8_weights,
)
from nbmoe.strategies import Fp8Strategy
from nbmoe_kernels import heuristics_fp8_sm90 as heuristics
from nbmoe_kernels.matmul_fp8_sm90_config import Fp8HopperConfig
from tests.fp8_operands import Fp8Problem, make_problem
from tests.ops.compare import assert_same

BF16 = ml_dtypes.bfloat16
by_block = ops.grouped_dynamic_scaled_fp8_matmul
by_row = ops.grouped_rowwise_dynamic_scaled_fp8_matmul
either = pytest.mark.parametrize("rowwise", [False, True], ids=["block", "row"])
in_simulator = backend.simulator_enabled()

NARROW = Fp8HopperConfig((8, 16), 1, 3, 4, None, max_slots=32)
PAIR = Fp8HopperConfig((24,), 2, 2, 1, (56, 224), max_slots=32)


@pytest.fixture
def shape(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the tile shape; the narrow one until then. The real ones take long to compile here."""

    def use(config: Fp8HopperConfig) -> None:
        monkeypatch.setattr(heuristics, "fp8_hopper_config", lambda *args: config)

    use(NARROW)
    return use


def prepared(problem: Fp8Problem) -> tuple[Any, ...]:
    """The arguments of the matmuls."""
    tokens = pack_fp8_tokens(problem.hidden, problem.a_scales, problem.starts)
    weights = pack_fp8_weights(problem.weight)
    return tokens, weights, None, problem.b_scales, problem.starts, problem.expert_ids


def assert_equals_reference(kernels: Any, problem: Fp8Problem, rowwise: bool, **kwargs: Any) -> Any:
    matmul = by_row if rowwise else by_block
    arguments = prepared(problem)
    expected = matmul(*arguments, backend="reference", **kwargs)
    shape = expected.shape
    got = kernels(matmul, *arguments, out=np.full(shape, 7, BF16), **kwargs)
    used = int(problem.starts[-1])
    assert_same(got[:used], expected[:used])
    assert (got[used:].view(BF16) == 7).all()
    return got


@either
@pytest.mark.parametrize("config", [NARROW, PAIR], ids=["narrow", "pair"])
def test_equals_reference(kernels: Any, shape: Any, config: Any, rowwise: bool) -> None:
    """Empty and masked slots, primes, partial blocks of N and K, several segments, odd scales."""
    if config is PAIR and (in_simulator or rowwise):
        pytest.skip("a kernel more to compile, of parts that the others have")
    shape(config)
    counts = [3, 0, 1, 5] if in_simulator else [3, 0, 17, 1, 37, 2]
    ids = [2, 1, -1, 0, 3, 4][: len(counts)]
    n, k = (72, 136) if in_simulator else (200, 328)
    kind = BF16 if config is NARROW and not rowwise else np.float32
    options = {"rowwise": rowwise, "scales_type": kind, "odd_scales": True, "spare_rows": 2}
    problem = make_problem(counts, n, k, expert_ids=ids, **options)
    problem.hidden[1, k // 2] = 0x7F
    problem.weight[0, 3, 0] = 0xFF
    assert_equals_reference(kernels, problem, rowwise, bias=problem.bias)


@pytest.mark.skipif(in_simulator, reason="the compiled kernels say the same")
def test_one_scale_for_all(kernels: Any, shape: Any) -> None:
    problem = make_problem([3, 2], 24, 136, rowwise=True)
    problem.a_scales, problem.b_scales = np.float32([0.37]), np.float32([1.5, 2.5])
    assert_equals_reference(kernels, problem, True)


@pytest.mark.skipif(in_simulator, reason="the compiled kernels say the same")
def test_row_alone_equals_row_in_batch(kernels: Any, shape: Any) -> None:
    """Beside rows of NaN, in another segment, of another width."""
    problem = make_problem([33, 4], 24, 256, scales_type=BF16)
    out = kernels(by_block, *prepared(problem))
    for at, expert in ((20, 0), (34, 1)):
        alone = make_problem([1], 24, 256, scales_type=BF16)
        alone.hidden, alone.weight = problem.hidden[[at]], problem.weight[[expert]]
        alone.a_scales = problem.a_scales[:, [at]].copy()
        alone.b_scales = problem.b_scales[[expert]]
        assert_same(kernels(by_block, *prepared(alone))[0], out[at])
    problem.hidden[np.arange(37) != 20] = 0x7F
    assert_same(kernels(by_block, *prepared(problem))[20], out[20])


def test_numerics_differ_from_packed_operands() -> None:
    """14 bits of sums against 24: close, but other bytes."""
    problem = make_problem([9], 64, 512)
    packed = by_block(*problem.arguments(), backend="reference").astype(np.float32)
    exact = by_block(*prepared(problem), backend="reference").astype(np.float32)
    assert (packed != exact).any()
    assert np.abs(packed - exact).max() < 2e-3 * np.abs(packed).max()


@pytest.mark.parametrize("slots", [True, False], ids=["slots", "rows"])
@pytest.mark.parametrize("rowwise", [False, True], ids=["block", "row"])
def test_prepare_equals_numpy(kernels: Any, slots: bool, rowwise: bool) -> None:
    problem = make_problem([3, 0, 9, 1], 136, 200, rowwise=rowwise, scales_type=BF16)
    starts = problem.starts if slots else None
    a_scales = problem.a_scales
    tokens = kernels(ops.prepare_fp8_tokens, problem.hidden, a_scales, starts)
    want = pack_fp8_tokens(problem.hidden, a_scales, starts)
    assert_same(tokens.data, want.data)
    assert_same(tokens.scales, want.scales)
    codes, scales = unpack_fp8_tokens(want, starts)
    assert_same(codes, problem.hidden)
    values = a_scales.astype(np.float32)
    assert_same(scales, values.reshape(1, -1) if rowwise else values[:, :13])
    weights = kernels(ops.prepare_fp8_weights, problem.weight)
    assert_same(weights.data, pack_fp8_weights(problem.weight).data)
    assert_same(unpack_fp8_weights(weights), problem.weight)


def test_prepare_keeps_one_scale(kernels: Any) -> None:
    one = np.float32([0.25])
    tokens = kernels(ops.prepare_fp8_tokens, np.zeros((2, 16), np.uint8), one)
    assert_same(tokens.scales, one)


def test_quantize_prepared_equals_quantize_and_prepare(kernels: Any) -> None:
    """With a NaN, an infinity, zeros and rows that no slot owns."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((15, 200)) * np.exp2(rng.integers(-9, 9, (15, 1)))).astype(BF16)
    x[1, 5], x[2, 7], x[3] = np.nan, np.inf, 0
    starts = np.uint32([0, 3, 3, 12, 13])
    options = {"group_size_or_per_token": 128, "row_offsets": starts}
    quantize = ops.quantize_dynamic_scaled_float8
    codes, scales = quantize(x, **options, backend="reference")
    want = pack_fp8_tokens(codes, scales, starts)
    for name in ("kernels", "reference"):
        if name == "kernels":
            got = kernels(quantize, x, layout="prepared", **options)
        else:
            got = quantize(x, layout="prepared", backend="reference", **options)
        assert isinstance(got, PreparedFp8Tokens)
        assert_same(got.data, want.data)
        assert_same(got.scales.view(np.uint32), want.scales.view(np.uint32))


def test_one_operand_without_the_other() -> None:
    problem = make_problem([3], 8, 128)
    tokens, weights, *rest = prepared(problem)
    with pytest.raises(errors.ArgTypeError, match="prepare_fp8_weights"):
        by_block(tokens, problem.weight, *rest)
    with pytest.raises(errors.ArgTypeError, match="prepare_fp8_tokens"):
        by_block(problem.hidden, weights, *rest)
    with pytest.raises(errors.ConfigError, match="a_scales: expected None"):
        by_block(tokens, weights, problem.a_scales, *rest[1:])
    with pytest.raises(errors.ShapeError, match="scales of"):
        by_row(pack_fp8_tokens(problem.hidden, np.zeros((2, 8), np.float32)), weights, *rest)


@pytest.mark.skipif(in_simulator, reason="the compiled kernels say the same")
@pytest.mark.parametrize("kind", ["block", "row", "tensor"])
def test_strategy_multiplies_prepared_operands(shape: Any, kind: str) -> None:
    """The activation, its quantization and the product equal those of the reference."""
    names = {"block": "blockscaled_fp8", "row": "rowwise_fp8", "tensor": "tensor_fp8"}
    # bfloat16 as in the other tests, whose kernel this is.
    options = {"scale_dtype": "bfloat16"} if kind == "block" else {}
    config = getattr(QuantConfig, names[kind])(**options)
    gate_up = np.random.default_rng(0).standard_normal((6, 288)).astype(BF16)
    scales_type = BF16 if kind == "block" else np.float32
    problem = make_problem(
        [3, 0, 2], 24, 144, rowwise=kind != "block", scales_type=scales_type, spare_rows=1
    )
    scales = problem.b_scales[:, 0, 0].copy() if kind == "tensor" else problem.b_scales
    weight = pack_fp8_weights(problem.weight)
    routing = (problem.starts, problem.expert_ids, None)
    results = []
    for name in ("emulate", "reference"):
        strategy = Fp8Strategy(config, backend=name)
        inputs = (problem.hidden, problem.a_scales, *routing)
        tokens = strategy.fused_silu_quantize(
            gate_up, None, inputs, layout="prepared", validate="metadata"
        )
        results.append(strategy.grouped_matmul(weight, scales, None, (tokens, None, *routing))[:5])
    assert_same(*results)
