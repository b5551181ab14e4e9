"""P1, P3, P5-P8: grouped quantize equals the reference byte for byte."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nbmoe import layouts, ops
from tests.ops.compare import assert_equals_reference, assert_same
from tests.strategies import VALUES, WIDTHS, Slots, activations, factors, seeds, slots

quantize = ops.grouped_quantize_dynamic_block_scaled


def shapes(rows: int, slots: Slots, k: int) -> Any:
    tiles = layouts.activation_tiles(rows, len(slots.counts))
    return (
        ((rows, k // 2), np.uint8),
        ((tiles, layouts.ceil_div(k, 64), 32, 4, 4), np.uint8),
    )


@given(slots(), st.sampled_from(WIDTHS), st.sampled_from(VALUES), seeds)
@example(Slots((128, 0, 129), (2, 0, 1), 3, 0), 80, "ties", 0)
@example(Slots((1,), (0,), 1, 0), 16, "nan rows", 1)
def test_equals_reference(kernels: Any, slots: Slots, k: int, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = activations(rng, slots.rows, k, kind)
    args = (x, slots.starts, slots.offsets, slots.ids, factors(rng, slots.num_experts))
    assert_equals_reference(kernels, quantize, shapes(slots.rows, slots, k), *args)


@given(slots(), st.sampled_from(WIDTHS), st.integers(1, 4), st.integers(0, 2), seeds)
def test_gather_equals_reference(
    kernels: Any, slots: Slots, k: int, divisor: int, unused: int, seed: int
) -> None:
    """Output row i reads input row indices[i] // divisor; indices of no row are not followed."""
    rng = np.random.default_rng(seed)
    used, inputs = int(slots.starts[-1]), 1 + slots.rows // divisor
    x = activations(rng, inputs, k, "gauss")
    indices = np.full(used + unused, 2**32 - 1, np.uint32)
    indices[:used] = rng.integers(0, inputs * divisor, used)
    args = (x, slots.starts, slots.offsets, slots.ids, factors(rng, slots.num_experts))
    assert_equals_reference(
        kernels,
        quantize,
        shapes(len(indices), slots, k),
        *args,
        indices=indices,
        indices_divisor=divisor,
    )


@pytest.mark.parametrize("pattern", range(16))
def test_every_pattern_of_empty_slots(kernels: Any, pattern: int) -> None:
    """P8."""
    slots = Slots(tuple(130 * (pattern >> s & 1) for s in range(4)), (0, 1, 2, 3), 4, 1)
    rng = np.random.default_rng(pattern)
    x = activations(rng, slots.rows, 48, "gauss")
    args = (x, slots.starts, slots.offsets, slots.ids, factors(rng, 4))
    assert_equals_reference(kernels, quantize, shapes(slots.rows, slots, 48), *args)


@given(slots(), st.sampled_from(WIDTHS), seeds)
def test_row_alone_equals_row_in_batch(kernels: Any, slots: Slots, k: int, seed: int) -> None:
    """P3: also beside rows of NaN."""
    rng = np.random.default_rng(seed)
    x = activations(rng, slots.rows, k, "nan rows")
    sf = factors(rng, slots.num_experts)
    codes, scales = kernels(quantize, x, slots.starts, slots.offsets, slots.ids, sf)
    one = Slots((1,), (0,), 1, 0)
    for slot, expert in enumerate(slots.expert_ids):
        own = slots.rows_of(slot)
        if expert < 0 or own.start == own.stop:
            continue
        at = int(rng.integers(own.start, own.stop))
        alone = kernels(
            quantize, x[at : at + 1], one.starts, one.offsets, one.ids, sf[expert : expert + 1]
        )
        row = 128 * slots.tile_of(slot) + at - own.start
        plain = layouts.deinterleave_scales(scales, 128 * len(scales), k // 16)
        assert_same(codes[at], alone[0][0], "codes")
        assert_same(plain[row], layouts.deinterleave_scales(alone[1], 1, k // 16)[0], "scales")


def test_experts_are_isolated(kernels: Any) -> None:
    """P6: NaN rows and another factor of one expert change nothing of the others."""
    slots = Slots((100, 7, 40), (1, 2, 0), 3, 0)
    rng = np.random.default_rng(0)
    x = activations(rng, slots.rows, 80, "gauss")
    sf = factors(rng, 3)
    before = kernels(quantize, x, slots.starts, slots.offsets, slots.ids, sf)
    x[slots.rows_of(1)] = np.nan
    sf[2] *= 3
    after = kernels(quantize, x, slots.starts, slots.offsets, slots.ids, sf)
    others = np.r_[slots.rows_of(0), slots.rows_of(2)]
    assert_same(after[0][others], before[0][others], "codes")
    assert_same(after[1][[0, 2]], before[1][[0, 2]], "scales")
    assert (after[0][slots.rows_of(1)] != before[0][slots.rows_of(1)]).any()


def test_no_rows(kernels: Any) -> None:
    """P8: T = 0."""
    slots = Slots((0, 0), (0, 1), 2, 0)
    x = np.zeros((0, 48), np.uint16)
    codes, scales = kernels(
        quantize, x, slots.starts, slots.offsets, slots.ids, np.ones(2, np.float32)
    )
    assert codes.shape == (0, 24) and scales.shape == (0, 1, 32, 4, 4)
