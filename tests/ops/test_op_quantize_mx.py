"""P1, P3, P5-P8: the quantizers of every format equal the reference byte for byte."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nbmoe import layouts, ops
from tests.ops.compare import assert_equals_reference, assert_same
from tests.ops.quantize_formats import (
    ALL_RULES,
    ARGUMENTS,
    MX_RULES,
    every_bf16,
    result_shapes,
    slot_shapes,
)
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
from tests.strategies import MX_WIDTHS, VALUES, Slots, activations, seeds, slots

grouped = ops.grouped_quantize_dynamic_block_scaled
rows_alone = ops.quantize_dynamic_block_scaled

targets = st.sampled_from(MX_RULES)
widths = st.sampled_from(MX_WIDTHS[:1] if SIMULATED else MX_WIDTHS)


def quantizer(kernels: Any, name: str, rule: str, k: int, sf: Any = None) -> Quantizer:
    """The grouped quantizer of a format; factors, if it has them, are by expert."""

    def run(x: Any, slots: Slots, which: slice, **kwargs: Any) -> Any:
        metadata = slots.starts, slots.offsets, slots.ids
        options = {**ARGUMENTS[name], "scale_rule": rule, **kwargs}
        return kernels(grouped, x, *metadata, sf, **options)

    blocks = k // (16 if name == "nvfp4" else 32)
    return Quantizer(run, lambda rows, slots: slot_shapes(name, rows, slots, k), blocks)


@given(
    slots(), st.sampled_from(MX_WIDTHS), st.sampled_from(VALUES), st.sampled_from(MX_RULES), seeds
)
@example(Slots((128, 0, 129), (2, 0, 1), 3, 0), 160, "ties", ("mxfp4", "even"), 0)
@example(Slots((1,), (0,), 1, 0), 32, "nan rows", ("mxfp8", "rceil"), 1)
def test_equals_reference(
    kernels: Any, slots: Slots, k: int, kind: str, target: tuple[str, str], seed: int
) -> None:
    name, rule = target
    x = activations(np.random.default_rng(seed), slots.rows, k, kind)
    assert_equals_reference(
        kernels,
        grouped,
        slot_shapes(name, slots.rows, slots, k),
        x,
        slots.starts,
        slots.offsets,
        slots.ids,
        **ARGUMENTS[name],
        scale_rule=rule,
    )


@given(groups, widths, st.sampled_from(VALUES), targets, seeds)
@example(EDGES, WIDE, "nan rows", ("mxfp4", "even"), 0)
@example(EDGES, 32, "gauss", ("mxfp8", "floor"), 1)
def test_row_alone_equals_row_in_batch(
    kernels: Any, slots: Slots, k: int, kind: str, target: tuple[str, str], seed: int
) -> None:
    """P3: also beside rows of NaN and infinity."""
    rng = np.random.default_rng(seed)
    x = activations(rng, slots.rows, k, kind)
    check_rows_alone(quantizer(kernels, *target, k), x, slots, rng)


@given(groups, widths, st.sampled_from(("gauss", "heavy")), targets, seeds)
@example(EDGES, WIDE, "gauss", ("mxfp4", "rceil"), 0)
@example(EDGES, 32, "heavy", ("mxfp8", "even"), 1)
def test_slots_are_isolated(
    kernels: Any, slots: Slots, k: int, kind: str, target: tuple[str, str], seed: int
) -> None:
    """P6."""
    rng = np.random.default_rng(seed)
    x = activations(rng, slots.rows, k, kind)
    check_isolation(quantizer(kernels, *target, k), x, slots, rng)


@given(groups, widths, st.sampled_from(VALUES), targets, seeds)
@example(EDGES, WIDE, "heavy", ("mxfp4", "floor"), 0)
@example(EDGES, 32, "nan rows", ("mxfp8", "rceil"), 1)
def test_writes_are_complete_and_bounded(
    kernels: Any, slots: Slots, k: int, kind: str, target: tuple[str, str], seed: int
) -> None:
    """P5, P7."""
    rng = np.random.default_rng(seed)
    x = activations(rng, slots.rows, k, kind)
    check_writes(quantizer(kernels, *target, k), x, slots, rng)


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("all_masked", [False, True])
def test_masked_and_empty_slots(kernels: Any, name: str, all_masked: bool) -> None:
    rng = np.random.default_rng(3)
    x = activations(rng, 6, 96, "gauss")
    sf = np.float32([7, 1, 3, 0.5]) if name == "nvfp4" else None
    check_masked(quantizer(kernels, name, "rceil", 96, sf), x, all_masked, rng)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_gather_equals_reference(kernels: Any, name: str) -> None:
    slots = Slots((3, 0, 130, 1), (7, -1, 3, 0), 8, 0)
    rng = np.random.default_rng(5)
    x = activations(rng, 50, 96, "gauss")
    indices = np.append(rng.integers(0, 150, 134), [2**32 - 1] * 2).astype(np.uint32)
    assert_equals_reference(
        kernels,
        grouped,
        slot_shapes(name, 136, slots, 96),
        *(x, slots.starts, slots.offsets, slots.ids),
        **ARGUMENTS[name],
        indices=indices,
        indices_divisor=3,
    )


@pytest.mark.parametrize("tensor_sf", [1.0, 0.43, 2688 / 3, 1e-3, 1.7e38, 2e-37, 1e-45, 3.4e38])
def test_every_bf16_in_nvfp4(kernels: Any, tensor_sf: float) -> None:
    check_every_bf16(kernels, "nvfp4", "rceil", np.float32([tensor_sf]))


@pytest.mark.parametrize(("name", "rule"), MX_RULES)
def test_every_bf16_in_mx(kernels: Any, name: str, rule: str) -> None:
    check_every_bf16(kernels, name, rule, None)


def check_every_bf16(kernels: Any, name: str, rule: str, factors: Any) -> None:
    x = every_bf16(16 if name == "nvfp4" else 32, kernels.name == "cudasim")
    starts = np.uint32([0, len(x)])
    args = (x, starts, np.zeros(1, np.uint32), np.zeros(1, np.int32), factors)
    options = {**ARGUMENTS[name], "scale_rule": rule}
    got = kernels(grouped, *args, **options)
    assert_same(got, grouped(*args, **options, backend="reference"))


@pytest.mark.parametrize(("name", "rule"), [ALL_RULES[0], ALL_RULES[1], ALL_RULES[5]])
@pytest.mark.parametrize("shape", [(1, 32), (128, 288), (131, 704), (2, 2880)])
def test_rows_without_slots_equal_the_reference(
    kernels: Any, name: str, rule: str, shape: tuple[int, int]
) -> None:
    if kernels.name == "cudasim":
        shape = (min(shape[0], 9), min(shape[1], 160))
    x = activations(np.random.default_rng(1), *shape, "heavy")
    shapes = result_shapes(name, *shape, layouts.ceil_div(shape[0], 128))
    options = {**ARGUMENTS[name], "scale_rule": rule}
    if name == "nvfp4":
        options["tensor_sf"] = 37.5
    assert_equals_reference(kernels, rows_alone, shapes, x, **options)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_a_group_equals_its_rows_without_slots(kernels: Any, name: str) -> None:
    """P3: payload and whole tiles, padding included."""
    slots = Slots((20, 130), (1, 0), 2, 0)
    x = activations(np.random.default_rng(2), slots.rows, 96, "gauss")
    sf = np.float32([3.0, 0.4]) if name == "nvfp4" else None
    metadata = slots.starts, slots.offsets, slots.ids
    codes, scales = kernels(grouped, x, *metadata, sf, **ARGUMENTS[name])
    for slot, factor, tiles in ((0, 0.4, slice(0, 1)), (1, 3.0, slice(1, 3))):
        own = slots.rows_of(slot)
        options = {"tensor_sf": factor} if name == "nvfp4" else {}
        alone = kernels(rows_alone, x[own], **ARGUMENTS[name], **options)
        assert_same(codes[own], alone[0], "codes")
        assert_same(scales[tiles], alone[1], "scales")


def test_rows_without_slots_need_no_metadata(kernels: Any) -> None:
    """P8: no rows, and every backend takes the call without a routing array."""
    for name, arguments in ARGUMENTS.items():
        codes, scales = kernels(rows_alone, np.zeros((0, 64), np.uint16), **arguments)
        assert (codes.shape[0], scales.shape) == (0, (0, 1, 32, 4, 4)), name
