"""P1, P3-P8: the grouped matmul equals the reference byte for byte, whatever the tile shape."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nbmoe import layouts, ops
from nbmoe_kernels import heuristics
from tests.ops.compare import assert_equals_reference, assert_same
from tests.ops.operands import Product, make_product
from tests.strategies import WIDTHS, Slots, seeds, slots

matmul = ops.grouped_matmul_block_scaled
BF16 = ml_dtypes.bfloat16
NS = (8, 16, 24, 80, 128, 136, 264)
NAN_SCALE = 0x7F


def run(kernels: Any, p: Product, **kwargs: Any) -> Any:
    return kernels(matmul, *p.operands, p.expert_scales, a_row_scales=p.row_scales, **kwargs)


@given(slots(), st.sampled_from(NS), st.sampled_from(WIDTHS), st.booleans(), seeds)
@example(Slots((129, 0, 1), (2, 1, 0), 3, 0), 136, 80, True, 0)
@example(Slots((17, 3), (-1, 0), 2, 130), 24, 16, False, 1)
def test_equals_reference(
    kernels: Any, slots: Slots, n: int, k: int, row_scales: bool, seed: int
) -> None:
    p = make_product(seed, slots, n, k, row_scales=row_scales)
    shapes = (((slots.rows, n), BF16),)
    args = (*p.operands, p.expert_scales)
    assert_equals_reference(kernels, matmul, shapes, *args, a_row_scales=p.row_scales)


@given(slots(), st.sampled_from(NS), st.sampled_from(WIDTHS), seeds)
def test_every_tile_shape_gives_the_same_bytes(
    kernels: Any, slots: Slots, n: int, k: int, seed: int
) -> None:
    """P4."""
    p = make_product(seed, slots, n, k)
    expected = matmul(*p.operands, p.expert_scales, backend="reference")
    for config in heuristics.grouped_matmul_configs(k):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(heuristics, "grouped_matmul_config", lambda *args, c=config: c)
            got = run(kernels, p, out=np.zeros_like(expected))
        assert_same(got, expected, str(config))


def test_hint_changes_no_byte(kernels: Any) -> None:
    """P4."""
    p = make_product(3, Slots((33, 100), (1, 0), 2, 0), 48, 80)
    expected = run(kernels, p)
    for hint in (0, 1, 133, 1330):
        assert_same(run(kernels, p, estimated_total_m=hint), expected, f"hint {hint}")


@given(slots(), st.sampled_from(WIDTHS), st.sampled_from((0x00, 0xFF, 0x7F, None)), seeds)
def test_no_byte_depends_on_padding(
    kernels: Any, slots: Slots, k: int, byte: int | None, seed: int
) -> None:
    """P5: NaN scales in padding rows, padding columns and unused tiles stay there."""
    p = make_product(seed, slots, 40, k)
    spoilt = p.with_padding(np.random.default_rng(seed), byte)
    out = np.zeros((slots.rows, 40), BF16)
    assert_same(run(kernels, spoilt, out=out), run(kernels, p, out=out.copy()))


@given(slots(), st.sampled_from(WIDTHS), seeds)
def test_row_alone_equals_row_in_batch(kernels: Any, slots: Slots, k: int, seed: int) -> None:
    """P3: any number of rows of a slot, computed alone."""
    rng = np.random.default_rng(seed)
    p = make_product(seed, slots, 24, k, row_scales=True)
    batch = run(kernels, p)
    for slot, count in enumerate(slots.counts):
        if count and slots.expert_ids[slot] >= 0:
            first = int(rng.integers(count))
            rows = slice(first, int(rng.integers(first, count)) + 1)
            alone = run(kernels, p.slot_alone(slot, rows))
            assert_same(alone, batch[slots.rows_of(slot)][rows], f"slot {slot}, {rows}")


@pytest.mark.parametrize("victim", range(3))
def test_experts_are_isolated(kernels: Any, victim: int) -> None:
    """P6: NaN weight scales and factors of one expert reach only its rows."""
    slots = Slots((100, 30, 129), (1, 2, 0), 3, 0)
    p = make_product(victim, slots, 40, 80)
    expert = slots.expert_ids[victim]
    b_scales, factors = p.b_scales.copy(), p.expert_scales.copy()
    b_scales[expert], factors[expert] = NAN_SCALE, np.nan
    spoilt = replace(p, b_scales=b_scales, expert_scales=factors)
    got, clean = run(kernels, spoilt, validate="shapes"), run(kernels, p)
    own = slots.rows_of(victim)
    rest = np.setdiff1d(np.arange(slots.rows), np.r_[own])
    assert_same(got[rest], clean[rest])
    assert (got[own].view(np.uint16) == 0x7FFF).all()


def test_nan_row_stays_in_its_row(kernels: Any) -> None:
    slots = Slots((128, 5), (0, 1), 2, 0)
    p = make_product(5, slots, 40, 80)
    plain = layouts.deinterleave_scales(p.a_scales, 128 * len(p.a_scales), p.blocks)
    plain[[17, 128 + 2], 3] = NAN_SCALE
    spoilt = replace(p, a_scales=layouts.interleave_scales(plain))
    got, clean = run(kernels, spoilt), run(kernels, p)
    rows = np.array([17, 128 + 2])
    rest = np.setdiff1d(np.arange(slots.rows), rows)
    assert_same(got[rest], clean[rest])
    assert (got[rows].view(np.uint16) == 0x7FFF).all()


def test_masked_slot_is_zero_whatever_its_row_scales(kernels: Any) -> None:
    p = make_product(1, Slots((5, 3), (-1, 0), 2, 0), 24, 48, row_scales=True)
    p.row_scales[:3] = (np.nan, np.inf, -1)
    assert_equals_reference(
        kernels,
        matmul,
        (((8, 24), BF16),),
        *p.operands,
        p.expert_scales,
        a_row_scales=p.row_scales,
    )


@pytest.mark.parametrize("pattern", range(16))
def test_every_pattern_of_empty_slots(kernels: Any, pattern: int) -> None:
    """P8."""
    slots = Slots(tuple(5 * (pattern >> s & 1) for s in range(4)), (3, 1, 2, 0), 4, 1)
    p = make_product(pattern, slots, 16, 48)
    shapes = (((slots.rows, 16), BF16),)
    assert_equals_reference(kernels, matmul, shapes, *p.operands, p.expert_scales)


def test_no_rows(kernels: Any) -> None:
    """P8: T = 0."""
    p = make_product(0, Slots((0, 0), (0, 1), 2, 0), 24, 48)
    assert run(kernels, p).shape == (0, 24)
