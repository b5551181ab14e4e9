"""P1, P3-P8: the grouped matmul equals the reference byte for byte, whatever the tile shape."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nbmoe import layouts, ops
from nbmoe.backend import simulator_enabled
from nbmoe.formats import NVFP4, PAIRS
from nbmoe_kernels import heuristics
from tests.ops.compare import assert_equals_reference, assert_same
from tests.ops.operands import PAIR_NAMES, Product, make_product, width_for
from tests.strategies import MANY, MOST, Slots, seeds, slots

matmul = ops.grouped_matmul_block_scaled
BF16 = ml_dtypes.bfloat16
NS = (8, 16, 24, 80, 128, 136, 264)
groups = slots(max_rows=MOST)
N = 24 if simulator_enabled() else 136

NVFP4_PAIR, MXFP4_PAIR, MXFP8_PAIR, W4A8 = PAIRS
pairs = st.sampled_from(PAIRS)
widths = st.integers(0, 34)
every_pair = pytest.mark.parametrize("pair", PAIRS, ids=PAIR_NAMES)


def run(kernels: Any, p: Product, **kwargs: Any) -> Any:
    """The smallest tile shape, unless a hint says otherwise: each shape is a kernel to compile."""
    return kernels(
        matmul, *p.operands, p.expert_scales, **{"estimated_total_m": 0, **p.keywords, **kwargs}
    )


def check(kernels: Any, p: Product, **kwargs: Any) -> Any:
    return assert_equals_reference(
        kernels,
        matmul,
        (((p.slots.rows, p.n), BF16),),
        *p.operands,
        p.expert_scales,
        **{"estimated_total_m": 0, **p.keywords, **kwargs},
    )


@given(groups, st.sampled_from(NS), pairs, widths, st.booleans(), st.booleans(), seeds)
@example(Slots((MANY, 0, 1), (2, 1, 0), 3, 0), N, NVFP4_PAIR, 3, True, False, 0)
@example(Slots((17, 3), (-1, 0), 2, 130), 24, NVFP4_PAIR, 0, False, True, 1)
@example(Slots((MANY, 0, 1), (2, 1, 0), 3, 0), N, MXFP4_PAIR, 1, False, True, 2)
@example(Slots((17, 3), (-1, 0), 2, 130), 24, MXFP8_PAIR, 0, False, False, 3)
@example(Slots((MANY, 0, 1), (2, 1, 0), 3, 0), N, MXFP8_PAIR, 4, False, True, 4)
@example(Slots((MANY, 0, 1), (2, 1, 0), 3, 0), N, W4A8, 3, False, True, 5)
def test_equals_reference(
    kernels: Any,
    slots: Slots,
    n: int,
    pair: Any,
    width: int,
    row_scales: bool,
    bias: bool,
    seed: int,
) -> None:
    k = width_for(pair, width)
    check(kernels, make_product(seed, slots, n, k, row_scales=row_scales, bias=bias, pair=pair))


@every_pair
def test_formats_may_be_told_by_element_types(kernels: Any, pair: Any) -> None:
    """Typed arrays name the formats; MX needs no factors. Numba's GPU arrays have no such types."""
    p = make_product(1, Slots((5, 3), (1, 0), 2, 0), 24, 96, pair=pair)
    operands = list(p.operands)
    for i, fmt in enumerate(pair):
        operands[i] = operands[i].view(getattr(ml_dtypes, fmt.codes_dtype, np.uint8))
        operands[i + 2] = operands[i + 2].view(getattr(ml_dtypes, fmt.scales_dtype, np.uint8))
    is_nvfp4 = pair[0] is NVFP4
    factors = p.expert_scales if is_nvfp4 else np.ones_like(p.expert_scales)
    expected = run(kernels, replace(p, expert_scales=factors))
    names = {"format": pair[0], "weight_format": pair[1]} if kernels.name == "gpu" else {}
    got = kernels(matmul, *operands, factors if is_nvfp4 else None, estimated_total_m=0, **names)
    assert_same(got, expected)


def check_every_tile_shape(kernels: Any, p: Product) -> None:
    """P4: all legal tile shapes give the reference's bytes."""
    expected = matmul(*p.operands, p.expert_scales, **p.keywords, backend="reference")
    for config in heuristics.grouped_matmul_configs(p.a_format.name, p.b_format.name, p.k):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(heuristics, "grouped_matmul_config", lambda *args, c=config: c)
            got = run(kernels, p, out=np.zeros_like(expected))
        assert_same(got, expected, str(config))


@given(groups, st.sampled_from(NS), widths, seeds)
@pytest.mark.parametrize("pair", [NVFP4_PAIR, W4A8], ids=["nvfp4", "w4a8"])
def test_every_tile_shape_gives_the_same_bytes(
    kernels: Any, pair: Any, slots: Slots, n: int, width: int, seed: int
) -> None:
    check_every_tile_shape(kernels, make_product(seed, slots, n, width_for(pair, width), pair=pair))


@pytest.mark.parametrize("pair", PAIRS[1:3], ids=PAIR_NAMES[1:3])
def test_every_tile_shape_of_the_other_pairs(kernels: Any, pair: Any) -> None:
    """Two row blocks of the smallest shape, a partial one of the largest, N and K not whole."""
    slots = Slots((20, 0, 3), (2, 0, 1), 3, 0)
    check_every_tile_shape(kernels, make_product(1, slots, 136, 160, bias=True, pair=pair))


def test_hint_changes_no_byte(kernels: Any) -> None:
    """P4."""
    p = make_product(3, Slots((3, 20), (1, 0), 2, 0), 24, 80)
    expected = run(kernels, p)
    for hint in (0, 1, 23, 230, None):
        assert_same(run(kernels, p, estimated_total_m=hint), expected, f"hint {hint}")


@given(groups, pairs, widths, st.sampled_from((0x00, 0xFF, 0x7F, None)), seeds)
def test_no_byte_depends_on_padding(
    kernels: Any, slots: Slots, pair: Any, width: int, byte: int | None, seed: int
) -> None:
    """P5: NaN scales in padding rows, padding columns and unused tiles stay there."""
    p = make_product(seed, slots, 40, width_for(pair, width), pair=pair)
    spoilt = p.with_padding(np.random.default_rng(seed), byte)
    out = np.zeros((slots.rows, 40), BF16)
    assert_same(run(kernels, spoilt, out=out), run(kernels, p, out=out.copy()))


@given(groups, pairs, widths, seeds)
def test_row_alone_equals_row_in_batch(
    kernels: Any, slots: Slots, pair: Any, width: int, seed: int
) -> None:
    """P3: any number of rows of a slot, computed alone."""
    rng = np.random.default_rng(seed)
    k = width_for(pair, width)
    p = make_product(seed, slots, 24, k, row_scales=True, bias=True, pair=pair)
    batch = run(kernels, p)
    for slot, count in enumerate(slots.counts):
        if count and slots.expert_ids[slot] >= 0:
            first = int(rng.integers(count))
            rows = slice(first, int(rng.integers(first, count)) + 1)
            alone = run(kernels, p.slot_alone(slot, rows))
            assert_same(alone, batch[slots.rows_of(slot)][rows], f"slot {slot}, {rows}")


@every_pair
def test_experts_are_isolated(kernels: Any, pair: Any) -> None:
    """P6: NaN weight scales and factors of one expert reach only its rows."""
    slots = Slots((20, 3, MANY), (1, 2, 0), 3, 0)
    p = make_product(7, slots, 24, 96, pair=pair)
    clean = run(kernels, p)
    for victim in (0,) if simulator_enabled() else (0, 1, 2):
        expert = slots.expert_ids[victim]
        b_scales, factors = p.b_scales.copy(), p.expert_scales.copy()
        b_scales[expert], factors[expert] = p.nan_scale, np.nan
        got = run(kernels, replace(p, b_scales=b_scales, expert_scales=factors), validate="shapes")
        own = slots.rows_of(victim)
        rest = np.setdiff1d(np.arange(slots.rows), np.r_[own])
        assert_same(got[rest], clean[rest])
        assert (got[own].view(np.uint16) == 0x7FFF).all()


@every_pair
def test_nan_row_stays_in_its_row(kernels: Any, pair: Any) -> None:
    slots = Slots((MANY - 1, 5), (0, 1), 2, 0)
    p = make_product(5, slots, 24, 96, pair=pair)
    plain = layouts.deinterleave_scales(p.a_scales, 128 * len(p.a_scales), p.blocks)
    plain[[15, 128 + 2], 2] = p.nan_scale
    spoilt = replace(p, a_scales=layouts.interleave_scales(plain))
    got, clean = run(kernels, spoilt), run(kernels, p)
    rows = np.array([15, MANY - 1 + 2])
    rest = np.setdiff1d(np.arange(slots.rows), rows)
    assert_same(got[rest], clean[rest])
    assert (got[rows].view(np.uint16) == 0x7FFF).all()


@pytest.mark.parametrize("pair", [MXFP4_PAIR, MXFP8_PAIR, W4A8], ids=PAIR_NAMES[1:])
def test_every_mx_scale_and_code(kernels: Any, pair: Any) -> None:
    """Scales at the ends of their range, with codes that underflow, overflow and are NaN."""
    p = make_product(11, Slots((16, 9), (1, 0), 2, 0), 64, 64, pair=pair)
    rng = np.random.default_rng(12)
    tiles = [rng.integers(0, 256, x.shape, dtype=np.uint8) for x in (p.a_scales, p.b_scales)]
    far = np.uint8([0, 1, 2, 3, 120, 127, 130, 252, 253, 254])
    rows = rng.choice(far, (128 * len(p.a_scales), p.blocks))
    weights = rng.choice(far, (len(p.weight), p.n, p.blocks))
    wild = replace(
        p,
        hidden=rng.integers(0, 256, p.hidden.shape, dtype=np.uint8),
        weight=rng.integers(0, 256, p.weight.shape, dtype=np.uint8),
    )
    check(
        kernels,
        replace(
            p,
            a_scales=layouts.interleave_scales(rows),
            b_scales=layouts.interleave_scales(weights),
        ),
    )
    check(kernels, replace(wild, a_scales=tiles[0], b_scales=tiles[1]), validate="shapes")


def test_masked_slot_is_zero_whatever_its_row_scales(kernels: Any) -> None:
    p = make_product(1, Slots((5, 3), (-1, 0), 2, 0), 24, 48, row_scales=True)
    p.row_scales[:3] = (np.nan, np.inf, -1)
    check(kernels, p)


@pytest.mark.parametrize("pattern", range(16))
def test_every_pattern_of_empty_slots(kernels: Any, pattern: int) -> None:
    """P8."""
    slots = Slots(tuple(5 * (pattern >> s & 1) for s in range(4)), (3, 1, 2, 0), 4, 1)
    pair = PAIRS[pattern % len(PAIRS)]
    check(kernels, make_product(pattern, slots, 16, 64, bias=True, pair=pair))


@every_pair
def test_no_rows(kernels: Any, pair: Any) -> None:
    """P8: T = 0."""
    p = make_product(0, Slots((0, 0), (0, 1), 2, 0), 24, 64, pair=pair)
    assert run(kernels, p).shape == (0, 24)


def test_sizes_of_real_layers(kernels: Any) -> None:
    """2880 of gpt-oss and 704 of Gemma, scaled down: no multiple of a tile in any direction."""
    sizes = ((48, 160, W4A8), (88, 96, MXFP4_PAIR), (48, 288, MXFP8_PAIR))
    for n, k, pair in sizes[:1] if simulator_enabled() else sizes:
        check(kernels, make_product(n, Slots((4, 1, 1, 1), (3, 1, 2, 0), 5, 0), n, k, pair=pair))
