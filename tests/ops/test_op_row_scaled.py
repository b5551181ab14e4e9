"""P1, P3, P5-P8: row-scaled NVFP4 equals the reference byte for byte."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nbmoe import ops
from tests.ops.compare import Shapes, assert_equals_reference, assert_same
from tests.ops.quantize_formats import slot_shapes
from tests.ops.slot_properties import (
    EDGES,
    SIMULATED,
    WIDE,
    Quantizer,
    check_isolation,
    check_masked,
    check_rows_alone,
    check_writes,
    groups,
)
from tests.strategies import VALUES, WIDTHS, Slots, activations, seeds, slots

quantize = ops.grouped_quantize_nvfp4_row_scaled
widths = st.sampled_from(WIDTHS[:2] if SIMULATED else WIDTHS)


def shapes(rows: int, slots: Slots, k: int) -> Shapes:
    return (*slot_shapes("nvfp4", rows, slots, k), ((rows,), ml_dtypes.bfloat16))


def quantizer(kernels: Any, k: int, relu2: bool) -> Quantizer:
    def run(x: Any, slots: Slots, which: slice, **kwargs: Any) -> Any:
        metadata = slots.starts, slots.offsets, slots.ids
        return kernels(quantize, x, *metadata, relu2=relu2, **kwargs)

    return Quantizer(run, lambda rows, slots: shapes(rows, slots, k), k // 16)


@given(slots(), st.sampled_from(WIDTHS), st.sampled_from(VALUES), st.booleans(), seeds)
@example(Slots((33, 0, 3), (2, -1, 1), 3, 130), 272, "heavy", True, 0)
def test_equals_reference(
    kernels: Any, slots: Slots, k: int, kind: str, relu2: bool, seed: int
) -> None:
    x = activations(np.random.default_rng(seed), slots.rows, k, kind)
    args = (x, slots.starts, slots.offsets, slots.ids)
    assert_equals_reference(kernels, quantize, shapes(slots.rows, slots, k), *args, relu2=relu2)


@given(groups, widths, st.sampled_from(VALUES), st.booleans(), seeds)
@example(EDGES, 48, "nan rows", False, 0)
@example(EDGES, WIDE, "gauss", True, 1)
def test_row_alone_equals_row_in_batch(
    kernels: Any, slots: Slots, k: int, kind: str, relu2: bool, seed: int
) -> None:
    """P3: its row scale too, also beside rows of NaN and infinity."""
    rng = np.random.default_rng(seed)
    x = activations(rng, slots.rows, k, kind)
    check_rows_alone(quantizer(kernels, k, relu2), x, slots, rng)


@given(groups, widths, st.sampled_from(("gauss", "heavy")), st.booleans(), seeds)
@example(EDGES, 48, "gauss", False, 0)
@example(EDGES, WIDE, "heavy", True, 1)
def test_slots_are_isolated(
    kernels: Any, slots: Slots, k: int, kind: str, relu2: bool, seed: int
) -> None:
    """P6."""
    rng = np.random.default_rng(seed)
    x = activations(rng, slots.rows, k, kind)
    check_isolation(quantizer(kernels, k, relu2), x, slots, rng)


@given(groups, widths, st.sampled_from(VALUES), st.booleans(), seeds)
@example(EDGES, 48, "heavy", False, 0)
@example(EDGES, WIDE, "nan rows", True, 1)
def test_writes_are_complete_and_bounded(
    kernels: Any, slots: Slots, k: int, kind: str, relu2: bool, seed: int
) -> None:
    """P5, P7, P8: row scales too."""
    rng = np.random.default_rng(seed)
    x = activations(rng, slots.rows, k, kind)
    check_writes(quantizer(kernels, k, relu2), x, slots, rng)


@pytest.mark.parametrize("relu2", [False, True])
def test_gather_without_ids(kernels: Any, relu2: bool) -> None:
    used = 8 if kernels.name == "cudasim" else 131
    slots = Slots((used - 1, 0, 1), (0, 1, 2), 3, 0)
    rng = np.random.default_rng(1)
    x = activations(rng, 44, 64, "gauss")
    indices = np.append(rng.integers(0, 132, used), [2**32 - 1] * 2).astype(np.uint32)
    got = assert_equals_reference(
        kernels,
        quantize,
        shapes(used + 2, slots, 64),
        *(x, slots.starts, slots.offsets),
        indices=indices,
        indices_divisor=3,
        relu2=relu2,
    )
    plain = kernels(quantize, x[indices[:used] // 3], slots.starts, slots.offsets, relu2=relu2)
    assert_same(got[2][:used], plain[2], "row scales")
    assert_same(got[0][:used], plain[0], "codes")


@pytest.mark.parametrize("all_masked", [False, True])
def test_masked_and_empty_slots(kernels: Any, all_masked: bool) -> None:
    rng = np.random.default_rng(2)
    x = activations(rng, 6, 48, "gauss")
    check_masked(quantizer(kernels, 48, False), x, all_masked, rng)


def test_row_scale_of_known_rows(kernels: Any) -> None:
    """amax / 2688 rounded to bf16, at least 1e-30; infinity and NaN stay visible."""
    x = np.zeros((6, 16), np.float32)
    x[:5, 3] = [2688, -5376, 1, np.inf, np.nan]
    x = x.astype(ml_dtypes.bfloat16)
    row_scales = kernels(quantize, x, np.uint32([0, 6]), np.zeros(1, np.uint32))[2]
    want = np.float32([1, 2, 1 / 2688, np.inf, np.nan, 1e-30]).astype(ml_dtypes.bfloat16)
    want.view(np.uint16)[4] = 0x7FFF
    np.testing.assert_array_equal(row_scales.view(np.uint16), want.view(np.uint16))


def test_no_rows(kernels: Any) -> None:
    codes, scales, row_scales = kernels(
        quantize, np.zeros((0, 48), np.uint16), np.zeros(3, np.uint32), np.zeros(2, np.uint32)
    )
    assert (codes.shape, scales.shape, row_scales.shape) == ((0, 24), (0, 1, 32, 4, 4), (0,))
