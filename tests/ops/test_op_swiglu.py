"""P1, P3-P8: the fused matmul + activation + quantize equals the reference and the chained ops."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nbmoe import codecs, layouts, ops
from nbmoe.activation import GatedActivation
from nbmoe.arrays import named_dtype
from nbmoe.backend import simulator_enabled
from nbmoe.formats import PAIRS
from nbmoe.reference.activation import gated_activation
from nbmoe.reference.quantize import quantize_blocks
from nbmoe_kernels import heuristics
from tests.ops.compare import assert_equals_reference, assert_same
from tests.ops.operands import PAIR_NAMES, Product, make_product, width_for
from tests.strategies import MANY, MOST, Slots, factors, seeds, slots

fused = ops.grouped_matmul_blocked_swiglu
SIMULATED = simulator_enabled()
BLOCKS = (1, 2) if SIMULATED else (1, 2, 3, 5, 9)
"""Blocks of the result: inside a scale tile, whole ones, and beyond a block of columns."""

BEYOND = max(BLOCKS)
groups = slots(max_rows=MOST)
FACTORS = (1e30,) if SIMULATED else (1e-30, 1e-3, 1.0, 1e6, 1e30, 3e38)

NVFP4_PAIR, MXFP4_PAIR, MXFP8_PAIR, W4A8 = PAIRS
OAI = GatedActivation("swigluoai", alpha=1.702, limit=7.0)
CLAMPED = GatedActivation(limit=0.5)
GELU = GatedActivation("gelu_tanh")
ACTIVATIONS = {NVFP4_PAIR: CLAMPED, MXFP4_PAIR: GELU, MXFP8_PAIR: OAI, W4A8: CLAMPED}
"""One a pair: a named activation is compiled into its kernel, a limit is not."""

pairs = st.sampled_from(PAIRS)
widths = st.integers(0, 34)
every_pair = pytest.mark.parametrize("pair", PAIRS, ids=PAIR_NAMES)


def make(seed: int, slots: Slots, blocks: int, width: int, pair: Any, **extras: bool) -> Product:
    moe_dim = blocks * pair[0].block
    return make_product(seed, slots, 2 * moe_dim, width_for(pair, width), pair=pair, **extras)


def shapes(p: Product) -> Any:
    fmt, moe_dim = p.a_format, p.n // 2
    tiles = (len(p.a_scales), layouts.ceil_div(moe_dim, fmt.tile_columns), 32, 4, 4)
    return (
        ((p.slots.rows, fmt.packed_k(moe_dim)), named_dtype(fmt.codes_dtype)),
        (tiles, named_dtype(fmt.scales_dtype)),
    )


def input_scales(p: Product) -> Any:
    """Inverse input scales of the down projection, which MX formats do not have."""
    count = len(p.slots.counts)
    return np.linspace(1, 100, count, dtype=np.float32) if p.a_format.has_tensor_scale else None


def factor_of(kwargs: dict[str, Any], slot: int) -> Any:
    """The factor of a slot's blocks."""
    scales = kwargs["c_input_scales"]
    return 1.0 if scales is None else scales[slot]


def scales_of(p: Product) -> dict[str, Any]:
    """Keyword arguments; the products are brought into a range where silu is not trivial."""
    size = np.float32(0.02 / p.blocks**0.5)
    return {
        **p.keywords,
        "expert_scales": p.expert_scales * size,
        "c_input_scales": input_scales(p),
        "activation": ACTIVATIONS[p.a_format, p.b_format],
        "estimated_total_m": 0,
    }


def run(kernels: Any, p: Product, **kwargs: Any) -> Any:
    codes, scales = kernels(fused, *p.operands, **(scales_of(p) | kwargs))
    return codes.view(np.uint8), scales.view(np.uint8)


def check(kernels: Any, p: Product, **kwargs: Any) -> Any:
    return assert_equals_reference(
        kernels, fused, shapes(p), *p.operands, **(scales_of(p) | kwargs)
    )


def zeros(p: Product) -> Any:
    return tuple(np.zeros(shape, dtype) for shape, dtype in shapes(p))


@given(groups, st.sampled_from(BLOCKS), pairs, widths, st.booleans(), st.booleans(), seeds)
@example(Slots((MANY, 0, 1), (2, 1, 0), 3, 0), BEYOND, NVFP4_PAIR, 3, True, True, 0)
@example(Slots((17, 3), (-1, 0), 2, 130), 1, NVFP4_PAIR, 0, False, False, 1)
@example(Slots((MANY, 5, 1), (2, 1, 0), 3, 0), 2, MXFP4_PAIR, 1, False, True, 2)
@example(Slots((4, 1, 1, 1), (3, 1, -1, 0), 5, 130), BEYOND, MXFP8_PAIR, 1, False, True, 3)
@example(Slots((MANY, 5, 1), (2, 1, 0), 3, 0), 1, W4A8, 3, False, False, 4)
def test_equals_reference(
    kernels: Any,
    slots: Slots,
    blocks: int,
    pair: Any,
    width: int,
    row_scales: bool,
    bias: bool,
    seed: int,
) -> None:
    check(kernels, make(seed, slots, blocks, width, pair, row_scales=row_scales, bias=bias))


@given(groups, st.sampled_from(BLOCKS), pairs, widths, st.booleans(), seeds)
@example(Slots((MANY, 5, 1), (0, 1, 2), 3, 0), 2, NVFP4_PAIR, 2, True, 0)
@example(Slots((4, 1, 1, 1), (0, 1, 2, 3), 4, 0), 2, MXFP8_PAIR, 2, True, 1)
@example(Slots((MANY, 5, 1), (0, 1, 2), 3, 0), 2, MXFP8_PAIR, 3, False, 2)
@example(Slots((MANY, 5, 1), (2, 1, 0), 3, 0), 1, W4A8, 1, True, 3)
def test_equals_the_chained_operations(
    kernels: Any, slots: Slots, blocks: int, pair: Any, width: int, bias: bool, seed: int
) -> None:
    """Fused equals matmul in bfloat16, activation and quantize, one after the other."""
    p = make(seed, slots, blocks, width, pair, bias=bias)
    kwargs, fmt = scales_of(p), pair[0]
    codes, scales = run(kernels, p, out=zeros(p))
    product = kernels(
        ops.grouped_matmul_block_scaled,
        *p.operands,
        kwargs["expert_scales"],
        estimated_total_m=0,
        **p.keywords,
    )
    values = codecs.decode_bf16(product.view(np.uint16))
    z = gated_activation(values[:, ::2], values[:, 1::2], kwargs["activation"])
    for slot, expert in enumerate(slots.expert_ids):
        own, count = slots.rows_of(slot), slots.counts[slot]
        if expert < 0 or not count:
            continue
        want = quantize_blocks(z[own], fmt, factor_of(kwargs, slot))
        begin = slots.tile_of(slot)
        tiles = scales[begin : begin + layouts.ceil_div(count, 128)]
        assert_same(codes[own], want[0], "codes")
        assert_same(tiles, layouts.interleave_scales(want[1]), "scales")


@every_pair
def test_interleaved_weights_are_the_same_weights(kernels: Any, pair: Any) -> None:
    """Plain rows, then silu of [gate | up], equal interleaved rows and their fused epilogue."""
    blocks, slots = 2, Slots((MANY, 5, 1), (2, 0, 1), 3, 0)
    plain = make(21, slots, blocks, 1, pair, bias=True)
    rows = layouts.deinterleave_scales(plain.b_scales, plain.n, plain.k // pair[1].block)
    interleaved = replace(
        plain,
        weight=layouts.sigma_permute(plain.weight),
        b_scales=layouts.interleave_scales(layouts.sigma_permute(rows)),
        bias=layouts.sigma_permute(plain.bias, axis=-1),
    )
    kwargs = scales_of(plain)
    matmul = {"estimated_total_m": 0, "expert_scales": kwargs["expert_scales"]}
    products = [
        kernels(ops.grouped_matmul_block_scaled, *p.operands, **matmul, **p.keywords)
        for p in (plain, interleaved)
    ]
    moe_dim = plain.n // 2
    assert_same(products[1][:, 0::2], products[0][:, :moe_dim])
    assert_same(products[1][:, 1::2], products[0][:, moe_dim:])
    values = codecs.decode_bf16(products[0].view(np.uint16))
    z = gated_activation(values[:, :moe_dim], values[:, moe_dim:], kwargs["activation"])
    codes, _ = run(kernels, interleaved, out=zeros(interleaved))
    for slot in range(3):
        own = slots.rows_of(slot)
        want, _ = quantize_blocks(z[own], pair[0], factor_of(kwargs, slot))
        assert_same(codes[own], want)


def check_every_tile_shape(kernels: Any, p: Product) -> None:
    """P4: all legal tile shapes give the reference's bytes."""
    expected = fused(*p.operands, **scales_of(p), backend="reference")
    for config in heuristics.grouped_matmul_configs(p.a_format.name, p.b_format.name, p.k):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(heuristics, "grouped_matmul_config", lambda *args, c=config: c)
            got = run(kernels, p, out=zeros(p))
        assert_same(got, tuple(e.view(np.uint8) for e in expected), str(config))


@given(groups, st.sampled_from(BLOCKS), widths, seeds)
@pytest.mark.parametrize("pair", [NVFP4_PAIR, MXFP8_PAIR], ids=["nvfp4", "mxfp8"])
def test_every_tile_shape_gives_the_same_bytes(
    kernels: Any, pair: Any, slots: Slots, blocks: int, width: int, seed: int
) -> None:
    check_every_tile_shape(kernels, make(seed, slots, blocks, width, pair))


@pytest.mark.parametrize("pair", PAIRS[1::2], ids=PAIR_NAMES[1::2])
def test_every_tile_shape_of_the_other_pairs(kernels: Any, pair: Any) -> None:
    slots = Slots((20, 0, 3), (2, 0, 1), 3, 0)
    check_every_tile_shape(kernels, make(1, slots, 3, 2, pair, bias=True))


@given(groups, pairs, widths, st.sampled_from((0x00, 0xFF, 0x7F, None)), seeds)
def test_no_byte_depends_on_padding(
    kernels: Any, slots: Slots, pair: Any, width: int, byte: int | None, seed: int
) -> None:
    """P5."""
    p = make(seed, slots, 1, width, pair)
    spoilt = p.with_padding(np.random.default_rng(seed), byte)
    assert_same(run(kernels, spoilt, out=zeros(p)), run(kernels, p, out=zeros(p)))


@given(groups, pairs, seeds)
def test_row_alone_equals_row_in_batch(kernels: Any, slots: Slots, pair: Any, seed: int) -> None:
    """P3."""
    rng = np.random.default_rng(seed)
    p = make(seed, slots, 1, 3, pair, bias=True)
    kwargs = scales_of(p)
    codes, scales = run(kernels, p)
    plain = layouts.deinterleave_scales(scales, 128 * len(scales), 1)
    for slot, count in enumerate(slots.counts):
        if count and slots.expert_ids[slot] >= 0:
            at = int(rng.integers(count))
            one = p.slot_alone(slot, slice(at, at + 1))
            scales_of_all = kwargs["c_input_scales"]
            own_factor = None if scales_of_all is None else scales_of_all[slot : slot + 1]
            alone = run(kernels, one, c_input_scales=own_factor)
            row = 128 * slots.tile_of(slot) + at
            assert_same(codes[slots.rows_of(slot)][at], alone[0][0], "codes")
            assert_same(plain[row], layouts.deinterleave_scales(alone[1], 1, 1)[0], "scales")


@every_pair
def test_experts_are_isolated(kernels: Any, pair: Any) -> None:
    """P6: a NaN expert has NaN codes and NaN scales; the others do not notice."""
    slots = Slots((5, 3, MANY), (1, 2, 0), 3, 0)
    p = make(7, slots, 1, 3, pair)
    clean = run(kernels, p)
    nan_code = 0x77 if pair[0].per_byte == 2 else 0x7F
    # Tiles after the last used one belong to nobody and are not written.
    used = sum(layouts.ceil_div(count, 128) for count in slots.counts)
    for victim in (0,) if SIMULATED else (0, 1, 2):
        b_scales = p.b_scales.copy()
        b_scales[slots.expert_ids[victim]] = p.nan_scale
        codes, scales = run(kernels, replace(p, b_scales=b_scales), validate="shapes")
        own, begin = slots.rows_of(victim), slots.tile_of(victim)
        tiles = np.arange(begin, begin + layouts.ceil_div(slots.counts[victim], 128))
        rest = np.setdiff1d(np.arange(slots.rows), np.r_[own])
        other = np.setdiff1d(np.arange(used), tiles)
        assert_same(codes[rest], clean[0][rest], "codes")
        assert_same(scales[other], clean[1][other], "scales")
        assert (codes[own] == nan_code).all()
        rows = layouts.deinterleave_scales(scales[tiles], slots.counts[victim], 1)
        assert (rows == p.nan_scale).all()


@every_pair
def test_extreme_gates(kernels: Any, pair: Any) -> None:
    """exp is clamped: gates of any size give finite or properly infinite results."""
    p = make(9, Slots((16,), (0,), 1, 0), 1, 1, pair)
    for factor in FACTORS:
        check(kernels, p, expert_scales=np.float32([factor]))


@pytest.mark.parametrize("pair", [NVFP4_PAIR, MXFP8_PAIR], ids=["nvfp4", "mxfp8"])
def test_without_the_bf16_rounding(kernels: Any, pair: Any) -> None:
    """The rounding changes some bytes, and the reference knows which."""
    rows, blocks = (40, 4) if pair is NVFP4_PAIR else (15, 1)
    slots = Slots((rows, 2), (1, 0), 2, 0)
    p = make(3, slots, blocks, 1, pair, row_scales=pair is NVFP4_PAIR, bias=True)
    codes, _ = check(kernels, p, match_bf16=False)
    rounded, _ = run(kernels, p)
    assert (codes.view(np.uint8) != rounded).any()


@pytest.mark.parametrize("factor", [1, 0, np.inf, np.nan])
@pytest.mark.parametrize("pair", [NVFP4_PAIR, MXFP8_PAIR], ids=["nvfp4", "mxfp8"])
def test_masked_slot_is_zero_whatever_its_factors(kernels: Any, pair: Any, factor: float) -> None:
    p = make(1, Slots((5, 3), (-1, 0), 2, 0), 1, 1, pair, row_scales=True, bias=True)
    if p.row_scales is not None:
        p.row_scales[:3] = (np.nan, np.inf, -1)
    factors = np.float32([factor, 2]) if pair is NVFP4_PAIR else None
    codes, scales = check(kernels, p, c_input_scales=factors, validate="shapes")
    assert not codes[:5].view(np.uint8).any() and not scales[0].view(np.uint8).any()


@given(groups, seeds)
def test_extreme_factors(kernels: Any, slots: Slots, seed: int) -> None:
    """Inverses and products that leave float32's normal range follow the same rules."""
    rng = np.random.default_rng(seed)
    p = make(seed, slots, 3, 3, NVFP4_PAIR)
    kwargs = {
        "expert_scales": factors(rng, slots.num_experts),
        "c_input_scales": factors(rng, len(slots.counts)),
    }
    check(kernels, p, **kwargs)


@every_pair
def test_no_rows(kernels: Any, pair: Any) -> None:
    """P8: T = 0."""
    p = make(0, Slots((0, 0), (0, 1), 2, 0), 1, 1, pair)
    codes, scales = run(kernels, p)
    assert codes.shape == (0, pair[0].block // pair[0].per_byte)
    assert scales.shape == (0, 1, 32, 4, 4)
