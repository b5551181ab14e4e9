"""P1, P3, P5-P8 with prepared operands: the bytes of the documented layouts, on every backend.

Tile shapes (P4) have their tests with the kernel.
"""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nbmoe import layouts, ops
from nbmoe.formats import MXFP4, NVFP4, PAIRS
from nbmoe.prepared.tokens import panel_rows
from tests.ops.compare import POISONS, assert_same, poisoned
from tests.ops.operands import PAIR_NAMES, Product, make_product, width_for
from tests.ops.prepared_operands import prepared_product, prepared_rows
from tests.strategies import MANY, MOST, Slots, activations, codes, scale_bytes, seeds, slots

matmul = ops.grouped_matmul_block_scaled
BF16 = ml_dtypes.bfloat16
groups = slots(max_rows=MOST)
NS = (8, 24, 72, 128, 136)
FEW = Slots((17, 0, 3), (2, -1, 0), 3, 5)


def run(kernels: Any, p: Product, **kwargs: Any) -> Any:
    """The prepared call with the narrowest tiles: each shape is a kernel to compile."""
    keywords = {**p.keywords, "estimated_total_m": 0, **kwargs}
    return kernels(matmul, *prepared_product(p), p.expert_scales, **keywords)


def check(kernels: Any, p: Product, **kwargs: Any) -> None:
    """The prepared call equals the reference's documented one, on the backend and on it."""
    expert_scales = p.expert_scales
    for byte in POISONS:
        out = poisoned((((p.slots.rows, p.n), BF16),), byte)
        keywords = {**p.keywords, "estimated_total_m": 0, **kwargs}
        expected = matmul(
            *p.operands, expert_scales, **keywords, out=out.copy(), backend="reference"
        )
        operands = prepared_product(p)
        got = matmul(*operands, expert_scales, **keywords, out=out.copy(), backend="reference")
        assert_same(got, expected, "reference")
        got = kernels(matmul, *operands, expert_scales, **keywords, out=out)
        assert_same(got, expected)


@given(groups, st.sampled_from(NS), st.integers(0, 34), st.booleans(), st.booleans(), seeds)
@example(Slots((MANY, 0, 1), (2, 1, 0), 3, 0), 72, 3, True, False, 0)
@example(Slots((17, 3), (-1, 0), 2, 13), 24, 0, False, True, 1)
def test_nvfp4_equals_reference(
    hopper_kernels: Any, slots: Slots, n: int, width: int, row_scales: bool, bias: bool, seed: int
) -> None:
    k = width_for((NVFP4, NVFP4), width)
    check(hopper_kernels, make_product(seed, slots, n, k, row_scales=row_scales, bias=bias))


@pytest.mark.parametrize("pair", PAIRS[1:], ids=PAIR_NAMES[1:])
def test_other_pairs_equal_reference(hopper_kernels: Any, pair: Any) -> None:
    """Masked, empty and partial slots, spare rows, N and K not whole."""
    check(hopper_kernels, make_product(1, FEW, 72, 96, bias=True, pair=pair))


@pytest.mark.parametrize("values", ["gauss", "nan rows", "infinite"])
@pytest.mark.parametrize("has_scales", [False, True], ids=["bf16", "w4a16"])
def test_matmuls_of_bfloat16_rows_equal_reference(
    hopper_kernels: Any, has_scales: bool, values: str
) -> None:
    rng = np.random.default_rng(4)
    n, k = 72, 96 if has_scales else 104
    hidden = activations(rng, FEW.rows, k, values)
    bias = rng.standard_normal((FEW.num_experts, n)).astype(BF16)
    weight, tiles = rng.standard_normal((FEW.num_experts, n, k)).astype(BF16), None
    routing = (FEW.starts, FEW.ids)
    keywords = {"bias": bias, "estimated_total_m": 0}
    op, scales = ops.grouped_matmul_ragged, ()
    if has_scales:
        op = ops.grouped_matmul_w4a16
        weight = codes(rng, (FEW.num_experts, n, k // 2), MXFP4)
        tiles = scale_bytes(rng, (FEW.num_experts, 1, 1, 32, 4, 4), MXFP4)
        scales = (tiles,)
    tokens, weights = prepared_rows(hidden, weight, tiles, FEW)
    none = (None,) if has_scales else ()
    for byte in POISONS:
        out = poisoned((((FEW.rows, n), BF16),), byte)
        expected = op(
            hidden, weight, *scales, *routing, **keywords, out=out.copy(), backend="reference"
        )
        prepared = (tokens, weights, *none, *routing)
        got = op(*prepared, **keywords, out=out.copy(), backend="reference")
        assert_same(got, expected, "reference")
        assert_same(hopper_kernels(op, *prepared, **keywords, out=out), expected)


@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_NAMES)
def test_experts_are_isolated(hopper_kernels: Any, pair: Any) -> None:
    """P6: NaN weight scales and factors of one expert reach only its rows."""
    slots = Slots((9, 3, MANY), (1, 2, 0), 3, 0)
    p = make_product(7, slots, 24, 96, pair=pair)
    clean = run(hopper_kernels, p)
    expert = slots.expert_ids[1]
    b_scales, factors = p.b_scales.copy(), p.expert_scales.copy()
    b_scales[expert], factors[expert] = p.nan_scale, np.nan
    got = run(
        hopper_kernels, replace(p, b_scales=b_scales, expert_scales=factors), validate="shapes"
    )
    own = slots.rows_of(1)
    rest = np.setdiff1d(np.arange(slots.rows), np.r_[own])
    assert_same(got[rest], clean[rest])
    assert (got[own].view(np.uint16) == 0x7FFF).all()


@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_NAMES)
def test_nan_row_stays_in_its_row(hopper_kernels: Any, pair: Any) -> None:
    slots = Slots((MANY - 1, 5), (0, 1), 2, 0)
    p = make_product(5, slots, 24, 96, pair=pair)
    plain = layouts.deinterleave_scales(p.a_scales, 128 * len(p.a_scales), p.blocks)
    plain[[15, 128 + 2], 2] = p.nan_scale
    spoilt = replace(p, a_scales=layouts.interleave_scales(plain))
    got, clean = run(hopper_kernels, spoilt), run(hopper_kernels, p)
    rows = np.array([15, MANY - 1 + 2])
    rest = np.setdiff1d(np.arange(slots.rows), rows)
    assert_same(got[rest], clean[rest])
    assert (got[rows].view(np.uint16) == 0x7FFF).all()


@pytest.mark.parametrize("pair", PAIRS[1:], ids=PAIR_NAMES[1:])
def test_every_mx_scale_and_code(hopper_kernels: Any, pair: Any) -> None:
    """Scales at the ends of their range, with codes that underflow, overflow and are NaN."""
    p = make_product(11, Slots((7, 4), (1, 0), 2, 0), 64, 64, pair=pair)
    rng = np.random.default_rng(12)
    far = np.uint8([0, 1, 2, 3, 120, 127, 130, 252, 253, 254])
    rows = rng.choice(far, (128 * len(p.a_scales), p.blocks))
    weights = rng.choice(far, (len(p.weight), p.n, p.blocks))
    tiles = [layouts.interleave_scales(scales) for scales in (rows, weights)]
    check(hopper_kernels, replace(p, a_scales=tiles[0], b_scales=tiles[1]))
    wild = replace(
        p,
        hidden=rng.integers(0, 256, p.hidden.shape, dtype=np.uint8),
        weight=rng.integers(0, 256, p.weight.shape, dtype=np.uint8),
        a_scales=rng.integers(0, 256, p.a_scales.shape, dtype=np.uint8),
        b_scales=rng.integers(0, 256, p.b_scales.shape, dtype=np.uint8),
    )
    check(hopper_kernels, wild, validate="shapes")


@given(groups, seeds)
def test_row_alone_equals_row_in_batch(hopper_kernels: Any, slots: Slots, seed: int) -> None:
    """P3: any number of rows of a slot, computed alone."""
    rng = np.random.default_rng(seed)
    p = make_product(seed, slots, 24, 80, row_scales=True, bias=True)
    batch = run(hopper_kernels, p)
    for slot, count in enumerate(slots.counts):
        if count and slots.expert_ids[slot] >= 0:
            first = int(rng.integers(count))
            rows = slice(first, int(rng.integers(first, count)) + 1)
            alone = run(hopper_kernels, p.slot_alone(slot, rows))
            assert_same(alone, batch[slots.rows_of(slot)][rows], f"slot {slot}, {rows}")


def test_rows_of_no_slot_and_rows_past_n_are_never_read(hopper_kernels: Any) -> None:
    """P5: what prepared operands hold between slots and behind rows changes no byte."""
    p = make_product(2, FEW, 72, 80, row_scales=True)
    tokens, weights, *rest = prepared_product(p)
    keywords = {**p.keywords, "estimated_total_m": 0}
    clean = hopper_kernels(matmul, tokens, weights, *rest, p.expert_scales, **keywords)
    noise = np.full_like(tokens.data, 0xFF)
    rows = panel_rows(tokens.num_rows, FEW.starts)
    noise[:, rows] = tokens.data[:, rows]
    units = weights.data.reshape(3, 2, 2, -1).copy()
    # The second unit down has rows 64 to 71 of 72: the first four pairs of its first warp.
    units[:, 1, :, 256:2048] = 0xFF
    units[:, 1, :, 2048 + 32 :] = 0xFF
    spoilt = replace(tokens, data=noise), replace(weights, data=units.reshape(-1))
    assert_same(hopper_kernels(matmul, *spoilt, *rest, p.expert_scales, **keywords), clean)


@pytest.mark.parametrize("pattern", range(16))
def test_every_pattern_of_empty_slots(hopper_kernels: Any, pattern: int) -> None:
    """P8; pattern 0 has no rows but one of no slot."""
    slots = Slots(tuple(5 * (pattern >> s & 1) for s in range(4)), (3, 1, 2, 0), 4, 1)
    pair = PAIRS[pattern % len(PAIRS)]
    check(hopper_kernels, make_product(pattern, slots, 16, 64, bias=True, pair=pair))


def test_no_rows(hopper_kernels: Any) -> None:
    """P8: T = 0."""
    p = make_product(0, Slots((0, 0), (0, 1), 2, 0), 24, 64)
    assert run(hopper_kernels, p).shape == (0, 24)
