"""P1, P5, P7: activation with quantization equals the reference, and the fused matmul, in bytes."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbmoe import ops
from nbmoe.activation import GatedActivation
from nbmoe.formats import PAIRS
from tests.ops.compare import assert_equals_reference, assert_same
from tests.ops.operands import make_product
from tests.ops.quantize_formats import MX_RULES, slot_shapes
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
CASES = [
    ("nvfp4", None),
    ("nvfp4", OAI),
    ("mxfp4", GELU),
    ("mxfp8", GatedActivation(limit=2.5)),
    ("mxfp8", OWN),
]


@given(
    slots(max_rows=140),
    st.sampled_from((32, 96, 160)),
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
    case: tuple[str, GatedActivation | None],
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


@pytest.mark.parametrize("pair", PAIRS[:3], ids=lambda pair: pair[0].name)
def test_after_a_matmul_it_equals_the_fused_matmul(kernels: Any, pair: Any) -> None:
    """P3: the same bytes in one kernel and in two, whatever the rows' tiles."""
    slots = Slots((9, 0, 17), (2, -1, 0), 3, 1)
    p = make_product(3, slots, 128, 64, pair=pair)
    factors = np.float32([0.5, 2, 8])
    inverse = np.float32([3, 1, 0.25]) if pair[0].has_tensor_scale else None
    gate_up = kernels(ops.grouped_matmul_block_scaled, *p.operands, factors, **p.keywords)
    codes, scales = kernels(
        quantize,
        gate_up,
        *(slots.starts, slots.offsets, slots.ids, inverse),
        format=pair[0].name,
        interleaved=True,
        activation=OAI,
    )
    fused = kernels(
        ops.grouped_matmul_blocked_swiglu,
        *p.operands,
        expert_scales=factors,
        c_input_scales=inverse,
        activation=OAI,
        **p.keywords,
    )
    assert_same(codes[: slots.starts[-1]], fused[0][: slots.starts[-1]], "codes")
    assert_same(scales, fused[1], "scales")


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


def test_masked_slot_and_no_rows(kernels: Any) -> None:
    """P8, and the rows of -1 get zeros even if they are NaN."""
    x = np.full((2, 64), np.nan, np.float32).astype(ml_dtypes.bfloat16)
    starts, offsets = np.uint32([0, 2]), np.zeros(1, np.uint32)
    codes, scales = kernels(quantize, x, starts, offsets, np.int32([-1]), format="mxfp8")
    assert not codes.view(np.uint8).any() and not scales.view(np.uint8).any()
    codes, scales = kernels(quantize, x[:0], starts * 0, offsets, np.int32([0]), format="mxfp8")
    assert (codes.shape, scales.shape) == ((0, 32), (0, 1, 32, 4, 4))
