"""P3, P5, P7: the fused matmul gives the bytes of the kernels that it replaces, for every pair.

Three ways to the second matmul's operands, each with kernels only:

    fused        interleaved weights, activation and quantization in the matmul's epilogue
    interleaved  interleaved weights, bfloat16 products, then `fused_silu_quantize` of pairs
    halves       the same weights as a checkpoint has them, gate rows before up rows
"""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbmoe import layouts, ops
from nbmoe.activation import GatedActivation
from nbmoe.backend import simulator_enabled
from nbmoe.formats import PAIRS
from tests.ops.compare import POISONS, as_bytes, assert_same, poisoned
from tests.ops.operands import PAIR_NAMES, Product, make_product
from tests.ops.quantize_formats import slot_shapes
from tests.ops.slot_properties import plain_scales
from tests.strategies import MANY, MOST, Slots, seeds, slots

SIMULATED = simulator_enabled()
NVFP4_PAIR, MXFP4_PAIR, MXFP8_PAIR, W4A8 = PAIRS
ACTIVATIONS = {
    NVFP4_PAIR: GatedActivation(limit=2.5),
    MXFP4_PAIR: GatedActivation("gelu_tanh"),
    MXFP8_PAIR: GatedActivation("swigluoai", alpha=1.702, limit=7.0),
    W4A8: GatedActivation(limit=2.5),
}
EDGES = Slots((2, 0, 1, 1) if SIMULATED else (MANY, 0, 5, 3), (2, 1, -1, 0), 4, 2)
"""More rows than a scale tile, none, masked ones, few, and rows of nobody; ids out of order."""

widths = st.sampled_from((32,) if SIMULATED else (32, 64, 96))
groups = slots(2, 5) if SIMULATED else slots(max_rows=MOST)
every_pair = pytest.mark.parametrize("pair", PAIRS, ids=PAIR_NAMES)


def make(seed: int, slots: Slots, d: int, pair: Any) -> Product:
    """Weights as a checkpoint has them, with bias and, for NVFP4, row scales."""
    k = 80 if pair == NVFP4_PAIR else 96
    p = make_product(seed, slots, 2 * d, k, pair=pair, row_scales=True, bias=True)
    # Products of a size at which activations are not trivial.
    return replace(p, expert_scales=p.expert_scales * np.float32(0.01))


def interleaved(p: Product) -> Product:
    """The same weights, scales and bias with every gate row before its up row."""
    rows = layouts.deinterleave_scales(p.b_scales, p.n, p.k // p.b_format.block)
    return replace(
        p,
        weight=layouts.sigma_permute(p.weight),
        b_scales=layouts.interleave_scales(layouts.sigma_permute(rows)),
        bias=layouts.sigma_permute(p.bias, axis=-1),
    )


def factors(p: Product) -> Any:
    """Input scales of the next matmul, by slot, no two alike."""
    if not p.a_format.has_tensor_scale:
        return None
    return np.linspace(1, 100, len(p.slots.counts), dtype=np.float32)


def shapes(p: Product) -> Any:
    return slot_shapes(p.a_format.name, p.slots.rows, p.slots, p.n // 2)


def fused(kernels: Any, p: Product, byte: int) -> Any:
    """Codes and scales of one kernel, in buffers that held `byte`."""
    return kernels(
        ops.grouped_matmul_blocked_swiglu,
        *p.operands,
        expert_scales=p.expert_scales,
        c_input_scales=factors(p),
        activation=ACTIVATIONS[p.a_format, p.b_format],
        estimated_total_m=0,
        out=poisoned(shapes(p), byte),
        **p.keywords,
    )


def chained(kernels: Any, p: Product, byte: int, *, is_interleaved: bool) -> Any:
    """Codes and scales of two kernels; the products between them had a buffer of `byte` too."""
    products = kernels(
        ops.grouped_matmul_block_scaled,
        *p.operands,
        p.expert_scales,
        estimated_total_m=0,
        out=poisoned((((p.slots.rows, p.n), ml_dtypes.bfloat16),), byte),
        **p.keywords,
    )
    return kernels(
        ops.fused_silu_quantize,
        *(products.view(ml_dtypes.bfloat16), p.slots.starts, p.slots.offsets, p.slots.ids),
        factors(p),
        format=p.a_format,
        interleaved=is_interleaved,
        activation=ACTIVATIONS[p.a_format, p.b_format],
        out=poisoned(shapes(p), byte),
    )


def check(kernels: Any, plain: Product) -> Any:
    """Compares whole buffers, so what one way leaves alone the others leave alone."""
    pairs = interleaved(plain)
    results = []
    for byte in POISONS[:1] if SIMULATED else POISONS:
        got = fused(kernels, pairs, byte)
        assert_same(got, chained(kernels, pairs, byte, is_interleaved=True), "interleaved")
        assert_same(got, chained(kernels, plain, byte, is_interleaved=False), "halves")
        results.append(got)
    used = int(plain.slots.starts[-1])
    for result, byte in zip(results, POISONS, strict=False):
        assert (as_bytes(result[0][used:]) == byte).all(), "rows of no slot"
        assert_same(result[0][:used], results[0][0][:used], "poison")
    return results[0]


@every_pair
def test_three_ways_one_result(kernels: Any, pair: Any) -> None:
    d = 32 if SIMULATED else 96
    codes, scales = check(kernels, make(1, EDGES, d, pair))
    by_row = plain_scales(scales)
    for slot, expert in enumerate(EDGES.expert_ids):
        count, begin = EDGES.counts[slot], 128 * EDGES.tile_of(slot)
        own = as_bytes(codes[EDGES.rows_of(slot)])
        is_full = expert >= 0 and count > 0
        assert (np.unique(own).size > 2) == is_full, "codes of some values, or zeros"
        assert by_row[begin : begin + count].any() == is_full, "scales"


@given(groups, widths, st.sampled_from(PAIRS), seeds)
def test_three_ways_one_result_for_any_slots(
    kernels: Any, slots: Slots, d: int, pair: Any, seed: int
) -> None:
    check(kernels, make(seed, slots, d, pair))
