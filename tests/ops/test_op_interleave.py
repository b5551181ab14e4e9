"""P1, P5: tiled scales equal the layout's definition, padding included."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nbmoe import layouts, ops
from tests.ops.compare import assert_equals_reference, assert_same


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 6), (300, 9), (2, 129, 5), (3, 8, 12)])
def test_equals_reference(kernels: Any, shape: tuple[int, ...]) -> None:
    scales = np.random.default_rng(0).integers(1, 256, shape, dtype=np.uint8)
    down, across = layouts.tile_counts(*shape[-2:])
    tiles = (*shape[:-2], down, across, 32, 4, 4)
    got = assert_equals_reference(
        kernels, ops.block_scales_interleave, ((tiles, np.uint8),), scales
    )
    assert_same(layouts.deinterleave_scales(got, *shape[-2:]), scales)
    assert np.count_nonzero(got) == scales.size


@pytest.mark.parametrize(
    ("size", "dtype"), [(16, ml_dtypes.float8_e4m3fn), (32, ml_dtypes.float8_e8m0fnu)]
)
def test_element_types_are_kept(kernels: Any, size: int, dtype: Any) -> None:
    scales = np.arange(24, dtype=np.uint8).reshape(4, 6)
    got = kernels(ops.block_scales_interleave, scales.view(dtype), size)
    assert_same(got, layouts.interleave_scales(scales))


def test_no_experts(kernels: Any) -> None:
    scales = np.zeros((0, 8, 2), np.uint8)
    assert kernels(ops.block_scales_interleave, scales).shape == (0, 1, 1, 32, 4, 4)
