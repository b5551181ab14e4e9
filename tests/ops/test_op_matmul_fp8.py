"""P1, P3-P8: the FP8 matmuls equal the reference byte for byte, whatever the tile shape."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from nbmoe import backend, ops
from nbmoe_kernels import heuristics
from tests.fp8_operands import Fp8Problem, make_problem
from tests.ops.compare import POISONS, assert_equals_reference, assert_same, poisoned
from tests.strategies import Slots, seeds, slots

by_block = ops.grouped_dynamic_scaled_fp8_matmul
by_row = ops.grouped_rowwise_dynamic_scaled_fp8_matmul
batched = ops.batched_dynamic_scaled_fp8_matmul
BF16 = ml_dtypes.bfloat16
NS = (8, 24, 128, 136, 264)
KS = (8, 16, 64, 128, 136, 192, 352)
either = pytest.mark.parametrize("rowwise", [False, True], ids=["block", "row"])
few_slots = slots(max_slots=3, max_rows=140)
# The simulator takes a second for a tile: it gets the examples that are written down.
in_simulator = backend.simulator_enabled()
examples_of = settings(phases=[Phase.explicit]) if in_simulator else settings()


def problem_of(
    slots: Slots, n: int, k: int, rowwise: bool, scales_type: Any = np.float32, seed: int = 0
) -> Fp8Problem:
    """A problem with scales that are 0, subnormal or far away among the others."""
    return make_problem(
        list(slots.counts),
        n,
        k,
        expert_ids=list(slots.expert_ids),
        rowwise=rowwise,
        scales_type=scales_type,
        odd_scales=True,
        spare_rows=slots.spare_rows,
        seed=seed,
    )


def run(kernels: Any, problem: Fp8Problem, rowwise: bool, **kwargs: Any) -> Any:
    """The smallest tile shape, unless a hint says otherwise: each shape is a kernel to compile."""
    matmul = by_row if rowwise else by_block
    return kernels(matmul, *problem.arguments(), **{"estimated_total_m": 0, **kwargs})


@examples_of
@given(few_slots, st.sampled_from(NS), st.sampled_from(KS), st.booleans(), st.booleans(), seeds)
@pytest.mark.parametrize("scales_type", [np.float32, BF16], ids=["f32", "bf16"])
@either
@example(Slots((3, 0, 2, 1), (-1, 1, 2, 0), 3, 2), 24, 136, True, False, 0)
@example(Slots((1,), (0,), 1, 0), 8, 8, False, True, 1)
def test_equals_reference(
    kernels: Any,
    rowwise: bool,
    scales_type: Any,
    slots: Slots,
    n: int,
    k: int,
    bias: bool,
    nan: bool,
    seed: int,
) -> None:
    problem = problem_of(slots, n, k, rowwise, scales_type, seed)
    if nan:
        problem.hidden[:: max(1, slots.rows // 3), k // 2] = 0x7F
        problem.weight[0, 0, 0] = 0xFF
    assert_equals_reference(
        kernels,
        by_row if rowwise else by_block,
        (((slots.rows, n), BF16),),
        *problem.arguments(),
        estimated_total_m=0,
        bias=problem.bias if bias else None,
    )


# gpt-oss, Gemma-4, DeepSeek-V3 over 8 and over 32 GPUs (1536 / 8, 2048 / 32), Kimi-K2's down.
REAL = [(2880, 264), (704, 1408), (192, 256), (64, 384), (2048, 72)]


@pytest.mark.parametrize(("k", "n"), [(136, 24)] if in_simulator else REAL)
def test_widths_of_models(kernels: Any, k: int, n: int) -> None:
    """Neither K nor N is a multiple of the block of 128 in most of them."""
    problem = problem_of(Slots((2, 0, 1), (1, 0, 2), 3, 0), n, k, False)
    shapes = (((3, n), BF16),)
    assert_equals_reference(kernels, by_block, shapes, *problem.arguments(), estimated_total_m=0)


@either
def test_every_tile_shape_gives_the_same_bytes(kernels: Any, rowwise: bool) -> None:
    """P4."""
    problem = problem_of(Slots((33, 0, 5), (1, 0, 2), 3, 1), 24, 136, rowwise)
    expected = (by_row if rowwise else by_block)(*problem.arguments(), backend="reference")
    for config in heuristics.grouped_matmul_configs("e4m3", "e4m3", 136):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(heuristics, "grouped_matmul_config", lambda *args, c=config: c)
            got = run(kernels, problem, rowwise, out=np.zeros_like(expected))
        assert_same(got, expected, str(config))


@examples_of
@given(few_slots, seeds)
@either
@example(Slots((17, 1), (1, 0), 2, 0), 0)
def test_row_alone_equals_row_in_batch(
    kernels: Any, rowwise: bool, slots: Slots, seed: int
) -> None:
    """P3: also beside rows of NaN."""
    problem = problem_of(slots, 24, 192, rowwise, seed=seed)
    rng = np.random.default_rng(seed)
    for rows, expert in problem.slots():
        at = int(rng.integers(rows.start, rows.stop))
        others = np.arange(slots.rows) != at
        problem.hidden[others & (rng.random(slots.rows) < 0.2)] = 0x7F
        out = run(kernels, problem, rowwise)
        alone = make_problem([1], 24, 192, rowwise=rowwise)
        alone.hidden, alone.weight = problem.hidden[[at]], problem.weight[[expert]]
        alone.a_scales = problem.a_scales[[at]] if rowwise else problem.a_scales[:, [at]].copy()
        alone.b_scales = problem.b_scales[[expert]]
        assert_same(run(kernels, alone, rowwise)[0], out[at])


@either
def test_experts_are_isolated(kernels: Any, rowwise: bool) -> None:
    """P6: codes of NaN and other scales of one expert change nothing of the others."""
    slots = Slots((6, 7, 4), (1, 2, 0), 3, 0)
    problem = problem_of(slots, 24, 136, rowwise)
    before = run(kernels, problem, rowwise)
    problem.weight[2] = 0x7F
    problem.b_scales[2] *= 3
    problem.hidden[slots.rows_of(1)] = 0xFF
    after = run(kernels, problem, rowwise)
    others = np.r_[slots.rows_of(0), slots.rows_of(2)]
    assert_same(after[others], before[others])
    assert np.isnan(after[slots.rows_of(1)].view(BF16).astype(np.float32)).all()


def test_rows_from_the_last_start_on_are_not_written(kernels: Any) -> None:
    """P7: their codes and scales, here NaN, are nobody's; masked rows are 0."""
    problem = problem_of(Slots((3, 2), (-1, 0), 2, 4), 8, 128, False)
    problem.hidden[5:] = 0x7F
    problem.hidden[:3] = 0x7F
    problem.a_scales[:, :3] = np.inf
    for byte in POISONS:
        out = run(kernels, problem, False, out=poisoned((((9, 8), np.uint16),), byte))
        assert (out[5:] == byte * 0x101).all() and not out[:3].any()


@pytest.mark.parametrize("scale", [1e-23, 1e-39, 1e-45])
def test_no_nan_from_a_weight_of_tiny_scale(kernels: Any, scale: float) -> None:
    problem = make_problem([3, 2], 128, 256)
    problem.b_scales[0] = scale
    out = run(kernels, problem, False).view(BF16).astype(np.float32)
    assert np.isfinite(out).all() and np.abs(out[3:]).max() > 1
    assert_same(run(kernels, problem, False), by_block(*problem.arguments(), backend="reference"))


def test_one_scale_serves_all_rows_without_a_copy(kernels: Any) -> None:
    """Scales of tensors, and of rows as the quantizer lays them out, equal scales of rows."""
    slots = Slots((5, 0, 2), (2, 0, 1), 3, 1)
    problem = problem_of(slots, 24, 136, True)
    a_scale, b_scales = np.float32([0.37]), np.float32([1.5, 0.0, 7.7])
    problem.a_scales = np.full((slots.rows, 1), a_scale)
    problem.b_scales = np.repeat(b_scales, 24).reshape(3, 24, 1)
    out = np.zeros((slots.rows, 24), BF16)
    expected = run(kernels, problem, True, out=out)
    padded = np.full((1, 12), np.nan, np.float32)
    padded[:, : slots.rows] = a_scale
    for of_rows in (a_scale, a_scale.reshape(1, 1), padded):
        for of_weight in (b_scales, b_scales.reshape(3, 1, 1)):
            problem.a_scales, problem.b_scales = of_rows, of_weight
            assert_same(run(kernels, problem, True, out=out.copy()), expected)
            assert_same(by_row(*problem.arguments(), backend="reference"), expected)


@pytest.mark.parametrize(("batch", "m", "n", "k"), [(3, 5, 136, 136), (1, 17, 8, 64)])
def test_batched_equals_reference(kernels: Any, batch: int, m: int, n: int, k: int) -> None:
    problem = make_problem([m] * batch, n, k, odd_scales=True)
    a = problem.hidden.reshape(batch, m, k)
    a_scales = np.full((batch, -(-k // 128), m + 3), np.nan, np.float32)
    for i in range(batch):
        a_scales[i, :, :m] = problem.a_scales[:, i * m : (i + 1) * m]
    operands = (a, problem.weight, a_scales, problem.b_scales)
    got = assert_equals_reference(kernels, batched, (((batch, m, n), BF16),), *operands)
    assert_same(got.reshape(-1, n), run(kernels, problem, False))


def test_no_rows(kernels: Any) -> None:
    """P8."""
    empty = make_problem([0, 0], 8, 128)
    assert run(kernels, empty, False).shape == (0, 8)
    scales = np.zeros((2, 1, 0), np.float32), np.ones((2, 1, 1), np.float32)
    out = kernels(batched, np.zeros((2, 0, 128), np.uint8), empty.weight, *scales)
    assert out.shape == (2, 0, 8)
