"""P1, P3, P5, P7, P8: row-scaled NVFP4 equals the reference byte for byte."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nbmoe import ops
from tests.ops.compare import Shapes, assert_equals_reference, assert_same
from tests.ops.quantize_formats import slot_shapes
from tests.strategies import VALUES, WIDTHS, Slots, activations, seeds, slots

quantize = ops.grouped_quantize_nvfp4_row_scaled


def shapes(rows: int, slots: Slots, k: int) -> Shapes:
    return (*slot_shapes("nvfp4", rows, slots, k), ((rows,), ml_dtypes.bfloat16))


@given(slots(), st.sampled_from(WIDTHS), st.sampled_from(VALUES), st.booleans(), seeds)
@example(Slots((33, 0, 3), (2, -1, 1), 3, 130), 272, "heavy", True, 0)
def test_equals_reference(
    kernels: Any, slots: Slots, k: int, kind: str, relu2: bool, seed: int
) -> None:
    x = activations(np.random.default_rng(seed), slots.rows, k, kind)
    args = (x, slots.starts, slots.offsets, slots.ids)
    assert_equals_reference(kernels, quantize, shapes(slots.rows, slots, k), *args, relu2=relu2)


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


def test_masked_slot_gets_zeros(kernels: Any) -> None:
    slots = Slots((2, 3), (-1, 5), 6, 0)
    x = activations(np.random.default_rng(2), 5, 32, "gauss")
    codes, scales, row_scales = kernels(quantize, x, slots.starts, slots.offsets, slots.ids)
    assert not codes[:2].any() and not scales[0].any() and not row_scales[:2].view(np.uint16).any()
    assert codes[2:].any() and scales[1].any() and row_scales[2:].view(np.uint16).all()


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
