"""P1, P3-P8: the fused matmul + SwiGLU + quantize equals the reference and the chained ops."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nbmoe import codecs, layouts, ops
from nbmoe.reference.quantize import quantize_nvfp4
from nbmoe.reference.swiglu import swiglu
from nbmoe_kernels import heuristics
from tests.ops.compare import assert_equals_reference, assert_same
from tests.ops.operands import Product, make_product
from tests.strategies import WIDTHS, Slots, factors, seeds, slots

fused = ops.grouped_matmul_blocked_swiglu
MOE_DIMS = (16, 48, 64, 80, 144)
NAN_SCALE = 0x7F


def shapes(p: Product) -> Any:
    moe_dim = p.n // 2
    return (
        ((p.slots.rows, moe_dim // 2), np.uint8),
        ((len(p.a_scales), layouts.ceil_div(moe_dim, 64), 32, 4, 4), np.uint8),
    )


def scales_of(p: Product) -> dict[str, Any]:
    """Keyword arguments; the products are brought into a range where SwiGLU is not trivial."""
    size = np.float32(0.02 / p.blocks**0.5)
    return {
        "expert_scales": p.expert_scales * size,
        "c_input_scales": np.linspace(1, 100, len(p.slots.counts), dtype=np.float32),
        "a_row_scales": p.row_scales,
    }


def run(kernels: Any, p: Product, **kwargs: Any) -> Any:
    return kernels(fused, *p.operands, **(scales_of(p) | kwargs))


def zeros(p: Product) -> Any:
    return tuple(np.zeros(shape, dtype) for shape, dtype in shapes(p))


@given(
    slots(), st.sampled_from(MOE_DIMS), st.sampled_from(WIDTHS), st.booleans(), st.booleans(), seeds
)
@example(Slots((129, 0, 1), (2, 1, 0), 3, 0), 80, 80, True, True, 0)
@example(Slots((17, 3), (-1, 0), 2, 130), 16, 16, False, False, 1)
def test_equals_reference(
    kernels: Any, slots: Slots, moe_dim: int, k: int, row_scales: bool, match: bool, seed: int
) -> None:
    p = make_product(seed, slots, 2 * moe_dim, k, row_scales=row_scales)
    assert_equals_reference(
        kernels, fused, shapes(p), *p.operands, **scales_of(p), match_bf16=match
    )


@given(slots(), st.sampled_from(MOE_DIMS), st.sampled_from(WIDTHS), seeds)
def test_equals_the_chained_operations(
    kernels: Any, slots: Slots, moe_dim: int, k: int, seed: int
) -> None:
    """Fused equals matmul in bfloat16, SwiGLU and quantize, one after the other."""
    p = make_product(seed, slots, 2 * moe_dim, k)
    kwargs = scales_of(p)
    codes, scales = run(kernels, p, out=zeros(p))
    product = kernels(ops.grouped_matmul_block_scaled, *p.operands, kwargs["expert_scales"])
    values = codecs.decode_bf16(product.view(np.uint16))
    z = swiglu(values[:, ::2], values[:, 1::2])
    for slot, expert in enumerate(slots.expert_ids):
        own, count = slots.rows_of(slot), slots.counts[slot]
        if expert < 0 or not count:
            continue
        want = quantize_nvfp4(z[own], kwargs["c_input_scales"][slot])
        begin = slots.tile_of(slot)
        tiles = scales[begin : begin + layouts.ceil_div(count, 128)]
        assert_same(codes[own], want[0], "codes")
        assert_same(tiles, layouts.interleave_scales(want[1]), "scales")


@given(slots(), st.sampled_from(MOE_DIMS), st.sampled_from(WIDTHS), seeds)
def test_every_tile_shape_gives_the_same_bytes(
    kernels: Any, slots: Slots, moe_dim: int, k: int, seed: int
) -> None:
    """P4."""
    p = make_product(seed, slots, 2 * moe_dim, k)
    expected = fused(*p.operands, **scales_of(p), backend="reference")
    for config in heuristics.grouped_matmul_configs(k):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(heuristics, "grouped_matmul_config", lambda *args, c=config: c)
            got = run(kernels, p, out=zeros(p))
        assert_same(got, expected, str(config))


@given(slots(), st.sampled_from(WIDTHS), st.sampled_from((0x00, 0xFF, 0x7F, None)), seeds)
def test_no_byte_depends_on_padding(
    kernels: Any, slots: Slots, k: int, byte: int | None, seed: int
) -> None:
    """P5."""
    p = make_product(seed, slots, 96, k)
    spoilt = p.with_padding(np.random.default_rng(seed), byte)
    assert_same(run(kernels, spoilt, out=zeros(p)), run(kernels, p, out=zeros(p)))


@given(slots(), seeds)
def test_row_alone_equals_row_in_batch(kernels: Any, slots: Slots, seed: int) -> None:
    """P3."""
    rng = np.random.default_rng(seed)
    p = make_product(seed, slots, 96, 80)
    kwargs = scales_of(p)
    codes, scales = run(kernels, p)
    plain = layouts.deinterleave_scales(scales, 128 * len(scales), 3)
    for slot, count in enumerate(slots.counts):
        if count and slots.expert_ids[slot] >= 0:
            at = int(rng.integers(count))
            one = p.slot_alone(slot, slice(at, at + 1))
            own_factor = kwargs["c_input_scales"][slot : slot + 1]
            alone = run(kernels, one, c_input_scales=own_factor)
            row = 128 * slots.tile_of(slot) + at
            assert_same(codes[slots.rows_of(slot)][at], alone[0][0], "codes")
            assert_same(plain[row], layouts.deinterleave_scales(alone[1], 1, 3)[0], "scales")


@pytest.mark.parametrize("victim", range(3))
def test_experts_are_isolated(kernels: Any, victim: int) -> None:
    """P6: a NaN expert has codes 7 and NaN scales; the others do not notice."""
    slots = Slots((100, 30, 129), (1, 2, 0), 3, 0)
    p = make_product(victim, slots, 96, 80)
    b_scales = p.b_scales.copy()
    b_scales[slots.expert_ids[victim]] = NAN_SCALE
    spoilt = replace(p, b_scales=b_scales)
    (codes, scales), clean = run(kernels, spoilt, validate="shapes"), run(kernels, p)
    own, begin = slots.rows_of(victim), slots.tile_of(victim)
    tiles = np.arange(begin, begin + layouts.ceil_div(slots.counts[victim], 128))
    # Tiles after the last used one belong to nobody and are not written.
    used = sum(layouts.ceil_div(count, 128) for count in slots.counts)
    rest = np.setdiff1d(np.arange(slots.rows), np.r_[own])
    other = np.setdiff1d(np.arange(used), tiles)
    assert_same(codes[rest], clean[0][rest], "codes")
    assert_same(scales[other], clean[1][other], "scales")
    assert (codes[own] == 0x77).all()
    rows = layouts.deinterleave_scales(scales[tiles], slots.counts[victim], 3)
    assert (rows == NAN_SCALE).all()


def test_extreme_gates(kernels: Any) -> None:
    """exp is clamped: gates of any size give finite or properly infinite results."""
    p = make_product(9, Slots((40,), (0,), 1, 0), 96, 80)
    for factor in (1e-30, 1e-3, 1.0, 1e6, 1e30):
        kwargs = {**scales_of(p), "expert_scales": np.float32([factor])}
        assert_equals_reference(kernels, fused, shapes(p), *p.operands, **kwargs)


@pytest.mark.parametrize("factor", [1, 0, np.inf, np.nan])
def test_masked_slot_is_zero_whatever_its_factors(kernels: Any, factor: float) -> None:
    p = make_product(1, Slots((5, 3), (-1, 0), 2, 0), 96, 48, row_scales=True)
    p.row_scales[:3] = (np.nan, np.inf, -1)
    kwargs = {**scales_of(p), "c_input_scales": np.float32([factor, 2]), "validate": "shapes"}
    codes, scales = assert_equals_reference(kernels, fused, shapes(p), *p.operands, **kwargs)
    assert not codes[:5].any() and not scales[0].any()


@given(slots(), seeds)
def test_extreme_factors(kernels: Any, slots: Slots, seed: int) -> None:
    """Inverses and products that leave float32's normal range follow the same rules."""
    rng = np.random.default_rng(seed)
    p = make_product(seed, slots, 96, 80)
    kwargs = {
        "expert_scales": factors(rng, slots.num_experts),
        "c_input_scales": factors(rng, len(slots.counts)),
    }
    assert_equals_reference(kernels, fused, shapes(p), *p.operands, **kwargs)


def test_no_rows(kernels: Any) -> None:
    """P8: T = 0."""
    p = make_product(0, Slots((0, 0), (0, 1), 2, 0), 32, 48)
    codes, scales = run(kernels, p)
    assert codes.shape == (0, 8) and scales.shape == (0, 1, 32, 4, 4)
