"""P1, P7, P8 of the fused matmul with prepared operands: the bytes of the documented layouts.

The kernel has tests of its own; these hold the operation to both results and to what it may write.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nbmoe import ops
from nbmoe.activation import GatedActivation
from nbmoe.arrays import named_dtype
from nbmoe.formats import NVFP4, PAIRS
from nbmoe.layouts import activation_tiles, ceil_div
from nbmoe.prepared import pack_tokens
from nbmoe.prepared.tokens import panel_rows, token_shape
from tests.conftest import Kernels
from tests.ops.compare import POISONS, assert_same, poisoned
from tests.ops.operands import PAIR_NAMES, Product, make_product
from tests.ops.prepared_operands import prepared_product
from tests.strategies import MANY, MOST, Slots, seeds, slots

swiglu = ops.grouped_matmul_blocked_swiglu
FEW = Slots((9, 0, 3), (2, -1, 0), 3, 5)


def check(kernels: Any, p: Product, **keywords: Any) -> None:
    """Both layouts, on a backend and by the reference, against the documented operands.

    The emulator compiles one of them only, which takes long; the simulator runs both.
    """
    fmt, moe_dim, s = p.a_format, p.n // 2, p.slots
    keywords |= {**p.keywords, "expert_scales": p.expert_scales, "estimated_total_m": 0}
    if fmt is NVFP4:
        rng = np.random.default_rng(1)
        keywords["c_input_scales"] = rng.uniform(0.1, 9, len(s.counts)).astype(np.float32)
    tiles = activation_tiles(s.rows, len(s.counts))
    shapes = (
        ((s.rows, fmt.packed_k(moe_dim)), named_dtype(fmt.codes_dtype)),
        ((tiles, ceil_div(moe_dim, fmt.tile_columns), 32, 4, 4), named_dtype(fmt.scales_dtype)),
    )
    tokens, weights, *_ = prepared_product(p)
    packed = (tokens, weights, None, None, s.starts, s.offsets, s.ids)
    prepared = (tokens, weights, None, None, s.starts, None, s.ids)
    for byte in POISONS:
        wanted = swiglu(*p.operands, **keywords, out=poisoned(shapes, byte), backend="reference")
        for run in (kernels, lambda op, *args, **k: op(*args, backend="reference", **k)):
            if getattr(run, "name", "") != "emulate":
                got = run(swiglu, *packed, **keywords, out=poisoned(shapes, byte))
                assert_same(got, wanted)
            shape = token_shape(s.rows, len(s.counts), moe_dim)
            out = poisoned(((shape, np.uint8),), byte)
            got = run(swiglu, *prepared, **keywords, layout="prepared", out=out)
            assert (got.format, got.num_rows, got.k) == (fmt.name, s.rows, moe_dim)
            rows = panel_rows(s.rows, s.starts)
            made = pack_tokens(*wanted, s.starts, s.offsets, format=fmt.name).data
            expected = np.full(shape, byte, np.uint8)
            expected[:, rows] = made[:, rows]
            assert_same(got.data, expected, "prepared")


@given(slots(max_rows=MOST), st.sampled_from((16, 48, 80)), st.booleans(), st.booleans(), seeds)
@example(Slots((MANY, 0, 1), (2, 1, 0), 3, 0), 48, True, False, 0)
def test_nvfp4_equals_reference(
    hopper_kernels: Any, slots: Slots, moe_dim: int, row_scales: bool, bias: bool, seed: int
) -> None:
    p = make_product(seed, slots, 2 * moe_dim, 80, row_scales=row_scales, bias=bias)
    check(hopper_kernels, p)


@pytest.fixture
def quick_kernels(hopper_kernels: Kernels) -> Kernels:
    """On the host the reference: these kernels take long to compile, and have their own tests."""
    return hopper_kernels if hopper_kernels.name == "gpu" else Kernels("reference")


@pytest.mark.parametrize("pair", PAIRS[1:], ids=PAIR_NAMES[1:])
def test_other_pairs_equal_reference(quick_kernels: Any, pair: Any) -> None:
    check(quick_kernels, make_product(1, FEW, 192, 96, bias=True, pair=pair))


def test_another_activation_without_rounding(quick_kernels: Any) -> None:
    activation = GatedActivation("swigluoai", alpha=1.702, limit=7.0)
    p = make_product(2, FEW, 96, 80, bias=True)
    check(quick_kernels, p, activation=activation, match_bf16=False)


def test_no_rows(hopper_kernels: Any) -> None:
    p = make_product(0, Slots((0, 0), (0, 1), 2, 0), 64, 64)
    check(hopper_kernels, p)
