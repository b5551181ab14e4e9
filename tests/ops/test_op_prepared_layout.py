"""Quantizers with layout="prepared" give what `prepare_tokens` makes of their packed results."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nbmoe import errors, ops
from nbmoe.prepared.tokens import token_shape
from tests.ops.compare import assert_equals_reference, assert_same
from tests.ops.quantize_formats import ARGUMENTS
from tests.strategies import (
    MANY,
    MX_WIDTHS,
    VALUES,
    WIDTHS,
    Slots,
    activations,
    factors,
    seeds,
    slots,
)

quantize, activate = ops.grouped_quantize_dynamic_block_scaled, ops.fused_silu_quantize
MASKED = Slots((MANY, 0, 9, 1), (2, 0, -1, 3), 4, 1)


def data_of(op: Any) -> Any:
    """An operation with the array of its prepared result."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args, layout="prepared", **kwargs).data

    return call


def check(kernels: Any, op: Any, slots: Slots, k: int, name: str, *args: Any, **kw: Any) -> None:
    """The prepared result equals the reference's, and that of the two operations one by one."""
    shape = token_shape(slots.rows, len(slots.counts), k)
    assert_equals_reference(kernels, data_of(op), ((shape, np.uint8),), *args, **kw)
    prepared = kernels(op, *args, layout="prepared", **kw)
    packed = kernels(op, *args, **kw)
    prepare = (*packed, slots.starts, slots.offsets)
    expected = kernels(ops.prepare_tokens, *prepare, format=name)
    assert_same(prepared.data, expected.data)
    for field in ("format", "num_rows", "num_slots", "k"):
        assert getattr(prepared, field) == getattr(expected, field)


@pytest.mark.parametrize("format", ARGUMENTS)
@given(slots(), st.sampled_from(range(5)), st.sampled_from(VALUES), seeds)
@example(MASKED, 1, "nan rows", 0)
def test_quantize(
    hopper_kernels: Any, format: str, slots: Slots, width: int, values: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    is_nvfp4 = format == "nvfp4"
    k = (WIDTHS if is_nvfp4 else MX_WIDTHS)[width]
    x = activations(rng, slots.rows, k, values)
    scale = factors(rng, slots.num_experts) if is_nvfp4 else None
    args = (x, slots.starts, slots.offsets, slots.ids, scale)
    check(hopper_kernels, quantize, slots, k, format, *args, **ARGUMENTS[format])


def test_gather(hopper_kernels: Any) -> None:
    rng = np.random.default_rng(0)
    x = activations(rng, 7, 80, "gauss")
    indices = rng.integers(0, 14, MASKED.rows).astype(np.uint32)
    args = (x, MASKED.starts, MASKED.offsets, MASKED.ids, factors(rng, 4))
    check(hopper_kernels, quantize, MASKED, 80, "nvfp4", *args, indices=indices, indices_divisor=2)


@pytest.mark.parametrize("format", ARGUMENTS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_silu_quantize(hopper_kernels: Any, format: str, interleaved: bool) -> None:
    rng = np.random.default_rng(1)
    is_nvfp4 = format == "nvfp4"
    d = 80 if is_nvfp4 else 96
    x = activations(rng, MASKED.rows, 2 * d, "nan rows")
    scale = factors(rng, 4) if is_nvfp4 else None
    args = (x, MASKED.starts, MASKED.offsets, MASKED.ids, scale)
    check(
        hopper_kernels, activate, MASKED, d, format, *args, format=format, interleaved=interleaved
    )


def test_refuses_other_layouts() -> None:
    x = np.zeros((1, 16), np.uint16)
    one = Slots((1,), (0,), 1, 0)
    args = (x, one.starts, one.offsets, one.ids, np.ones(1, np.float32))
    for layout, error in (("tiled", errors.ConfigError), (None, errors.ArgTypeError)):
        with pytest.raises(error, match="layout"):
            quantize(*args, layout=layout, backend="reference")
    with pytest.raises(errors.ShapeError, match="R, 128"):
        out = np.zeros((1, 8, 128), np.uint8)
        quantize(*args, layout="prepared", out=out, backend="reference")
