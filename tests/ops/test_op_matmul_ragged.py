"""P1, P3-P8: matmuls of bfloat16 rows equal the reference, with either kind of weight."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from nbmoe import layouts, ops
from nbmoe.errors import (
    ArgTypeError,
    DTypeError,
    LayoutError,
    RoutingError,
    ScaleError,
    ShapeError,
    UnsupportedError,
)
from nbmoe.formats import MXFP4
from nbmoe_kernels import heuristics
from tests.conftest import Kernels
from tests.ops.compare import POISONS, assert_equals_reference, assert_same, poisoned
from tests.strategies import MANY, MOST, Slots, activations, codes, scale_bytes, seeds, slots

ragged, w4a16 = ops.grouped_matmul_ragged, ops.grouped_matmul_w4a16
BF16 = ml_dtypes.bfloat16
NS = (8, 24, 128, 136)
groups = slots(max_rows=MOST)
RAGGED_KS = (8, 40, 64, 72, 128)
MXFP4_KS = (32, 64, 96, 160)


def make(seed: int, slots: Slots, n: int, k: int, has_scales: bool) -> tuple[Any, Any]:
    """Operands of an operation, and a bias."""
    rng = np.random.default_rng(seed)
    hidden = activations(rng, slots.rows, k, "gauss")
    experts = slots.num_experts
    bias = rng.standard_normal((experts, n)).astype(BF16)
    if not has_scales:
        weight = [rng.standard_normal((experts, n, k)).astype(BF16)]
    else:
        scales = scale_bytes(rng, (experts, n, k // 32), MXFP4)
        weight = [codes(rng, (experts, n, k // 2), MXFP4), layouts.interleave_scales(scales)]
    return (hidden, *weight, slots.starts, slots.ids), bias


@given(groups, st.sampled_from(NS), st.sampled_from(RAGGED_KS), st.booleans(), seeds)
@example(Slots((MANY, 0, 1), (2, 1, 0), 3, 0), 24, 72, True, 0)
@example(Slots((17, 3), (-1, 0), 2, 13), 8, 8, False, 1)
def test_ragged_equals_reference(
    kernels: Any, slots: Slots, n: int, k: int, has_bias: bool, seed: int
) -> None:
    args, bias = make(seed, slots, n, k, has_scales=False)
    keywords = {"bias": bias if has_bias else None, "estimated_total_m": 0}
    assert_equals_reference(kernels, ragged, (((slots.rows, n), BF16),), *args, **keywords)


@given(groups, st.sampled_from(NS), st.sampled_from(MXFP4_KS), st.booleans(), seeds)
@example(Slots((MANY, 0, 1), (2, 1, 0), 3, 0), 24, 96, True, 0)
@example(Slots((17, 3), (-1, 0), 2, 13), 8, 32, False, 1)
def test_w4a16_equals_reference(
    kernels: Any, slots: Slots, n: int, k: int, has_bias: bool, seed: int
) -> None:
    args, bias = make(seed, slots, n, k, has_scales=True)
    keywords = {"bias": bias if has_bias else None, "estimated_total_m": 0}
    assert_equals_reference(kernels, w4a16, (((slots.rows, n), BF16),), *args, **keywords)


def test_w4a16_equals_dequantized_weights_and_ragged(kernels: Any) -> None:
    """Scales of every kind, at the ends of the range too, but NaN."""
    rng = np.random.default_rng(2)
    slots = Slots((5, 3), (1, 0), 2, 0)
    args, bias = make(2, slots, 24, 64, has_scales=True)
    hidden, packed, _, *routing = args
    rows = rng.integers(0, 255, (2, 24, 2), dtype=np.uint8)
    keywords = {"bias": bias, "estimated_total_m": 0}
    got = kernels(w4a16, hidden, packed, layouts.interleave_scales(rows), *routing, **keywords)
    weight = kernels(ops.mxfp4_dequant, packed, rows).view(np.uint16)
    assert_same(got, kernels(ragged, hidden, weight, *routing, **keywords))


def call(kernels: Any, args: Any, **keywords: Any) -> Any:
    """The operation that the operands belong to."""
    return kernels(ragged if len(args) == 4 else w4a16, *args, **keywords)


@pytest.mark.parametrize("has_scales", [False, True], ids=["bf16", "w4a16"])
def test_every_tile_shape_gives_the_same_bytes(kernels: Any, has_scales: bool) -> None:
    """P4: two row blocks of the smallest shape, a partial one of the largest, partial N and K."""
    slots = Slots((20, 0, 3), (2, 0, 1), 3, 0)
    args, bias = make(1, slots, 136, 160, has_scales)
    expected = call(Kernels("reference"), args, bias=bias)
    b_format = "mxfp4" if has_scales else "bf16"
    for config in heuristics.grouped_matmul_configs("bf16", b_format, 160):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(heuristics, "grouped_matmul_config", lambda *args, c=config: c)
            assert_same(call(kernels, args, bias=bias), expected, str(config))


@given(groups, st.booleans(), seeds)
def test_row_alone_equals_row_in_batch(
    kernels: Any, slots: Slots, has_scales: bool, seed: int
) -> None:
    """P3."""
    args, bias = make(seed, slots, 24, 96, has_scales)
    hidden, *weight, _, ids = args
    keywords = {"bias": bias, "estimated_total_m": 0}
    batch = call(kernels, args, **keywords)
    for slot, count in enumerate(slots.counts):
        if count and ids[slot] >= 0:
            row = slots.rows_of(slot).start + seed % count
            one = np.array([0, 1], np.uint32)
            single = (hidden[row : row + 1], *weight, one, ids[slot : slot + 1])
            assert_same(call(kernels, single, **keywords)[0], batch[row], f"slot {slot}")


@given(groups, st.booleans(), seeds)
def test_an_expert_changes_only_its_own_rows(
    kernels: Any, slots: Slots, has_scales: bool, seed: int
) -> None:
    """P6: its weights, scales and bias become NaN or noise."""
    args, bias = make(seed, slots, 24, 96, has_scales)
    keywords = {"estimated_total_m": 0, "validate": "shapes"}
    before = call(kernels, args, bias=bias, **keywords)
    slot = seed % len(slots.counts)
    expert = slots.expert_ids[slot]
    assume(expert >= 0)
    changed = [np.array(operand) for operand in (*args[1:-2], bias)]
    for operand in changed:
        operand[expert].view(np.uint8)[...] = 0xFF
    after = call(kernels, (args[0], *changed[:-1], *args[-2:]), bias=changed[-1], **keywords)
    own = np.zeros(slots.rows, bool)
    own[slots.rows_of(slot)] = True
    used = np.arange(slots.rows) < slots.starts[-1]
    assert_same(after[used & ~own], before[used & ~own])
    assert (after[own].view(np.uint16) == 0x7FFF).all()


@given(groups, st.sampled_from((0x00, 0x7F, 0xFF)), seeds)
def test_no_byte_depends_on_padding_scales(
    kernels: Any, slots: Slots, byte: int, seed: int
) -> None:
    """P5: scales of no row or no block of W4A16's weights."""
    (hidden, weight, tiles, *routing), bias = make(seed, slots, 24, 96, has_scales=True)
    keywords = {"bias": bias, "estimated_total_m": 0}
    scales = layouts.deinterleave_scales(tiles, 128, 4)
    scales[:, 24:], scales[:, :, 3:] = byte, byte
    spoilt = (hidden, weight, layouts.interleave_scales(scales), *routing)
    clean = call(kernels, (hidden, weight, tiles, *routing), **keywords)
    assert_same(call(kernels, spoilt, **keywords), clean)


def test_nan_and_infinity_stay_in_their_row(kernels: Any) -> None:
    slots = Slots((20,), (0,), 1, 0)
    args, _ = make(5, slots, 24, 72, has_scales=False)
    clean = kernels(ragged, *args, estimated_total_m=0)
    args[0][3, 5], args[0][4, 6] = np.nan, np.inf
    got = assert_equals_reference(kernels, ragged, (((20, 24), BF16),), *args, estimated_total_m=0)
    assert (got[3].view(np.uint16) == 0x7FFF).all()
    rest = np.setdiff1d(np.arange(20), (3, 4))
    assert_same(got[rest], clean[rest])


def test_no_rows(kernels: Any) -> None:
    """P8: T = 0."""
    args, _ = make(0, Slots((0, 0), (0, 1), 2, 0), 24, 64, has_scales=True)
    assert kernels(w4a16, *args).shape == (0, 24)


def bad(**changes: Any) -> dict[str, Any]:
    """Arguments of `grouped_matmul_w4a16`, some of them replaced."""
    (hidden, weight, b_scales, expert_start, expert_ids), bias = make(
        1, Slots((5, 3), (1, 0), 2, 0), 24, 64, has_scales=True
    )
    names = ("hidden", "weight", "b_scales", "expert_start", "expert_ids", "bias")
    given = (hidden, weight, b_scales, expert_start, expert_ids, bias)
    return dict(zip(names, given, strict=True)) | changes


NAN_SCALES = np.where(bad()["b_scales"] == 0, np.uint8(0), np.uint8(0xFF))
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"hidden": None}, ArgTypeError, "hidden: .* got None"),
    ({"hidden": np.zeros((8, 64), np.float16)}, UnsupportedError, "hidden: .* float16"),
    ({"hidden": np.zeros((8, 48), BF16)}, ShapeError, "K % 32 == 0, got K = 48"),
    ({"hidden": np.zeros((8, 96), BF16)}, ShapeError, "weight: .* K/2 = 48"),
    ({"weight": np.zeros((2, 32, 24), np.uint8)}, ShapeError, "K-major"),
    ({"weight": np.zeros((2, 12, 32), np.uint8)}, ShapeError, "N % 8 == 0"),
    ({"weight": np.zeros((2, 24, 32), np.int8)}, DTypeError, "int8"),
    ({"weight": np.zeros((1, 24, 32), np.uint8)}, ShapeError, "b_scales"),
    ({"b_scales": None}, ScaleError, "b_scales is required"),
    ({"b_scales": np.zeros((2, 24, 2), np.uint8)}, LayoutError, "row-major scales"),
    ({"b_scales": np.zeros((2, 1, 2, 32, 4, 4), np.uint8)}, ShapeError, "blocks of 32"),
    ({"b_scales": NAN_SCALES}, ScaleError, "NaN byte 0xff for expert 0, row 0, block 0"),
    ({"expert_start": np.uint32([0, 5])}, ShapeError, "expert_start"),
    ({"expert_start": np.uint32([0, 5, 9])}, RoutingError, "the rows of hidden"),
    ({"expert_ids": np.int32([0, 2])}, RoutingError, r"expert_ids\[1\] = 2"),
    ({"bias": np.zeros((2, 16), BF16)}, ShapeError, r"bias: expected \(E, N\) = \(2, 24\)"),
    ({"bias": np.zeros((2, 24), np.float32)}, DTypeError, "bias"),
    ({"estimated_total_m": 1.5}, ArgTypeError, "estimated_total_m"),
]


@pytest.mark.parametrize(("changes", "error", "text"), REFUSED)
def test_refused(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    out = poisoned((((8, 24), BF16),), POISONS[0])
    with pytest.raises(error, match=text):
        w4a16(**bad(**changes), out=out)
    assert (out.view(np.uint8) == POISONS[0]).all()


def test_refused_by_ragged() -> None:
    arguments = bad(weight=np.zeros((2, 24, 64), BF16))
    del arguments["b_scales"]
    arguments["hidden"] = np.zeros((8, 60), BF16)
    with pytest.raises(ShapeError, match="K % 8 == 0, got K = 60"):
        ragged(**arguments)
    arguments["hidden"] = np.zeros((8, 64), np.uint8)
    with pytest.raises(DTypeError, match="hidden"):
        ragged(**arguments)
