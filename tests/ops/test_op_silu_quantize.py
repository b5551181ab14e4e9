"""P1, P3, P5-P8: activation with quantization equals the reference byte for byte."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nbmoe import ops
from nbmoe.activation import GatedActivation
from tests.ops.compare import assert_equals_reference, assert_same
from tests.ops.quantize_formats import MX_RULES, slot_shapes
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
from tests.strategies import VALUES, Slots, activations, factors, seeds, slots

quantize = ops.fused_silu_quantize
OAI = GatedActivation("swigluoai", alpha=1.702, limit=7.0)
GELU = GatedActivation("gelu_tanh")
TENTH = np.float32(0.1)


def squared_plus(gate: Any, up: Any) -> Any:
    """A caller's activation, in which a contraction would show."""
    return gate * gate + up * TENTH


SHIFT = np.float32(0.75)


def shifted(gate: Any, up: Any) -> Any:
    """Another, which differs from the one below by a global only."""
    return gate * up + SHIFT


OWN = GatedActivation(gated_activation_fn=squared_plus)
NAMED = [
    ("nvfp4", None),
    ("nvfp4", OAI),
    ("mxfp4", GELU),
    ("mxfp8", GatedActivation(limit=2.5)),
    ("mxfp8", OAI),
]
CASES = [*NAMED, ("mxfp8", OWN)]
FORMATS = [NAMED[0], NAMED[2], NAMED[3]]
Case = tuple[str, GatedActivation | None]

named = st.sampled_from(NAMED)
widths = st.sampled_from((32,) if SIMULATED else (32, 96, 160))


def quantizer(
    kernels: Any, case: Case, d: int, interleaved: bool, factors: Any, **arguments: Any
) -> Quantizer:
    """The operation for a format and an activation; NVFP4 has factors by slot."""
    name, activation = case

    def run(x: Any, slots: Slots, which: slice, **kwargs: Any) -> Any:
        own = None if name != "nvfp4" else factors[which].copy()
        options = {"activation": activation, "interleaved": interleaved, **arguments, **kwargs}
        metadata = slots.starts, slots.offsets, slots.ids
        return kernels(quantize, x, *metadata, own, format=name, **options)

    blocks = d // (16 if name == "nvfp4" else 32)
    return Quantizer(run, lambda rows, slots: slot_shapes(name, rows, slots, d), blocks)


@given(
    slots(max_rows=140),
    widths,
    st.sampled_from(VALUES),
    st.sampled_from(CASES),
    st.booleans(),
    seeds,
)
def test_equals_reference(
    kernels: Any,
    slots: Slots,
    d: int,
    kind: str,
    case: Case,
    interleaved: bool,
    seed: int,
) -> None:
    name, activation = case
    rng = np.random.default_rng(seed)
    x = activations(rng, slots.rows, 2 * d, kind)
    sf = factors(rng, len(slots.counts)) if name == "nvfp4" else None
    assert_equals_reference(
        kernels,
        quantize,
        slot_shapes(name, slots.rows, slots, d),
        *(x, slots.starts, slots.offsets, slots.ids, sf),
        format=name,
        activation=activation,
        interleaved=interleaved,
    )


@given(groups, widths, st.sampled_from(VALUES), named, st.booleans(), seeds)
@example(EDGES, 32, "nan rows", NAMED[0], True, 0)
@example(EDGES, WIDE, "infinite", NAMED[2], False, 1)
@example(EDGES, 32, "gauss", NAMED[4], True, 2)
def test_row_alone_equals_row_in_batch(
    kernels: Any, slots: Slots, d: int, kind: str, case: Case, interleaved: bool, seed: int
) -> None:
    """P3: also beside rows of NaN and infinity."""
    rng = np.random.default_rng(seed)
    x = activations(rng, slots.rows, 2 * d, kind)
    sf = factors(rng, len(slots.counts))
    check_rows_alone(quantizer(kernels, case, d, interleaved, sf), x, slots, rng)


@given(groups, widths, named, st.booleans(), seeds)
@example(EDGES, 32, NAMED[1], True, 0)
@example(EDGES, WIDE, NAMED[2], False, 1)
@example(EDGES, 32, NAMED[3], True, 2)
def test_slots_are_isolated(
    kernels: Any, slots: Slots, d: int, case: Case, interleaved: bool, seed: int
) -> None:
    """P6."""
    rng = np.random.default_rng(seed)
    x = activations(rng, slots.rows, 2 * d, "gauss")
    sf = rng.uniform(0.5, 100, len(slots.counts)).astype(np.float32)
    check_isolation(quantizer(kernels, case, d, interleaved, sf), x, slots, rng)


@given(groups, widths, st.sampled_from(VALUES), named, st.booleans(), seeds)
@example(EDGES, 32, "nan rows", NAMED[0], False, 0)
@example(EDGES, WIDE, "heavy", NAMED[2], True, 1)
@example(EDGES, 32, "infinite", NAMED[4], False, 2)
def test_writes_are_complete_and_bounded(
    kernels: Any, slots: Slots, d: int, kind: str, case: Case, interleaved: bool, seed: int
) -> None:
    """P5, P7."""
    rng = np.random.default_rng(seed)
    x = activations(rng, slots.rows, 2 * d, kind)
    sf = factors(rng, len(slots.counts))
    check_writes(quantizer(kernels, case, d, interleaved, sf), x, slots, rng)


@pytest.mark.parametrize(("name", "rule"), [MX_RULES[1], MX_RULES[5]])
def test_scale_rules_equal_the_reference(kernels: Any, name: str, rule: str) -> None:
    slots = Slots((4, 7), (1, 0), 2, 0)
    x = activations(np.random.default_rng(4), 11, 128, "ties")
    args = (x, slots.starts, slots.offsets, slots.ids)
    shapes = slot_shapes(name, 11, slots, 64)
    assert_equals_reference(kernels, quantize, shapes, *args, format=name, scale_rule=rule)


def test_interleaved_columns_are_the_same_pairs(kernels: Any) -> None:
    slots = Slots((5, 3), (0, 1), 2, 0)
    x = activations(np.random.default_rng(5), 8, 96, "gauss")
    pairs = np.ascontiguousarray(x.reshape(8, 2, 48).swapaxes(1, 2)).reshape(8, 96)
    args = (slots.starts, slots.offsets, slots.ids, np.float32([0.5, 3]))
    assert_same(
        kernels(quantize, pairs, *args, interleaved=True), kernels(quantize, x, *args), "bytes"
    )


def test_functions_alike_but_for_a_global_do_not_share_a_kernel(kernels: Any) -> None:
    namespace = {"SHIFT": np.float32(-0.25)}
    other = type(shifted)(shifted.__code__, namespace, shifted.__name__)
    slots = Slots((3,), (0,), 1, 0)
    x = activations(np.random.default_rng(6), 3, 64, "gauss")
    args = (x, slots.starts, slots.offsets, slots.ids, np.float32([1]))
    results = []
    for fn in (shifted, other):
        activation = GatedActivation(gated_activation_fn=fn)
        got = kernels(quantize, *args, activation=activation)
        assert_same(got, quantize(*args, activation=activation, backend="reference"))
        results.append(got[0])
    assert (results[0] != results[1]).any()


@pytest.mark.parametrize("case", FORMATS, ids=lambda case: case[0])
@pytest.mark.parametrize("all_masked", [False, True])
def test_masked_and_empty_slots(kernels: Any, case: Case, all_masked: bool) -> None:
    """Factors of masked and of empty slots may be anything."""
    rng = np.random.default_rng(3)
    x = activations(rng, 6, 192, "gauss")
    sf = np.float32([np.nan, -1, np.nan if all_masked else 3, 0])
    op = quantizer(kernels, case, 96, False, sf, validate="shapes")
    check_masked(op, x, all_masked, rng)


@pytest.mark.parametrize("case", FORMATS, ids=lambda case: case[0])
def test_no_rows(kernels: Any, case: Case) -> None:
    """P8."""
    slots = Slots((0,), (0,), 1, 0)
    op = quantizer(kernels, case, 32, False, np.float32([1]))
    codes, scales = op.run(np.zeros((0, 64), np.uint16), slots, slice(None))
    assert codes.shape == (0, 32 if case[0] == "mxfp8" else 16)
    assert scales.shape == (0, 1, 32, 4, 4)
