"""The Hopper matmul of groups against the reference, byte by byte, in both epilogues.

The operations' tests go further with the narrowest tiles; the shapes here are theirs where one
kernel does for both, since each takes long to compile for the emulator.
"""

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numba import config as numba_config

from nbmoe import layouts, reference
from nbmoe.formats import FORMATS, MXFP4
from nbmoe.prepared import pack_tokens, pack_weights
from nbmoe.validate.product_prepared import reads_prepared
from nbmoe_kernels.heuristics_sm90 import (
    HOPPER_PAIRS,
    hopper_matmul_candidates,
    hopper_matmul_config,
)
from nbmoe_kernels.hopper_limits import cannot_run
from nbmoe_kernels.matmul_grouped_sm90 import launch_matmul_grouped_sm90
from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig
from tests.conftest import Kernels
from tests.kernels.test_matmul_kernels import launch
from tests.ops.operands import make_product
from tests.strategies import Slots, codes, scale_bytes, seeds

BF16 = ml_dtypes.bfloat16
SIMULATED = bool(numba_config.ENABLE_CUDASIM)
MIXED = Slots((5, 0, 17, 33, 9), (2, 0, 1, -1, 2), 3, spare_rows=3)
"""Prime and whole eights, one row more than those, none, masked, an expert twice."""
FEW = Slots((9, 0, 3), (1, -1, 0), 2, spare_rows=2)
POISON = 0xAAAA


def direct(a: str, b: str) -> HopperMatmulConfig:
    """What operations choose for few rows and short K."""
    return hopper_matmul_config(a, b, 8, 64, 1, 0)


def reallocated(a: str, b: str) -> HopperMatmulConfig:
    """Registers are reallocated, as for many rows; one ring of two stages."""
    return HopperMatmulConfig(a, b, (16,), 2, 2, 2, 1, (40, 232))


def by_groups(a: str, b: str) -> HopperMatmulConfig:
    """wgmma for few rows; stages that K does not fill."""
    return HopperMatmulConfig(a, b, (8,), 1, 4, 3, 4, None, 128)


def by_warps(a: str, b: str) -> HopperMatmulConfig:
    """Warps multiply by themselves, also two eights of tokens, in two warpgroups."""
    return HopperMatmulConfig(a, b, (8, 16), 2, 2, 3, 1, None, 128, warp_products=True)


CONFIGS = {
    **{"direct": direct, "by_groups": by_groups},
    **{"reallocated": reallocated, "by_warps": by_warps},
}


@dataclass(frozen=True)
class Problem:
    """Operands of a grouped matmul in numpy; ``starts`` is None without slots."""

    pair: tuple[str, str]
    hidden: Any
    weight: Any
    a_scales: Any
    b_scales: Any
    starts: Any
    offsets: Any
    ids: Any
    expert_scales: Any
    row_scales: Any
    bias: Any
    n: int
    k: int


def make_problem(
    seed: int, slots: Slots, n: int, k: int, pair: tuple[str, str], *, row_scales: bool, bias: bool
) -> Problem:
    """Any pair of operands; bf16 rows have no scales of rows."""
    factors = {"row_scales": row_scales, "bias": bias}
    routing = slots.starts, slots.offsets, slots.ids
    if pair[0] != "bf16":
        formats = (FORMATS[pair[0]], FORMATS[pair[1]])
        p = make_product(seed, slots, n, k, pair=formats, **factors)
        operands = (p.hidden, p.weight, p.a_scales, p.b_scales)
        return Problem(
            pair, *operands, *routing, p.expert_scales, p.row_scales, p.bias, n, k
        )  # fmt: skip
    rng = np.random.default_rng(seed)
    experts = slots.num_experts
    hidden = rng.standard_normal((slots.rows, k)).astype(BF16)
    weight, tiles = rng.standard_normal((experts, n, k)).astype(BF16), None
    if pair[1] == "mxfp4":
        weight = codes(rng, (experts, n, k // 2), MXFP4)
        tiles = layouts.interleave_scales(scale_bytes(rng, (experts, n, k // 32), MXFP4))
    added = rng.standard_normal((experts, n)).astype(BF16) if bias else None
    return Problem(pair, hidden, weight, None, tiles, *routing, None, None, added, n, k)


def expected(p: Problem) -> Any:
    """The reference's output, of the rows that slots own."""
    keywords: dict[str, Any] = {"bias": p.bias}
    slots = (p.starts, p.ids)
    if p.pair == ("bf16", "bf16"):
        out = reference.grouped_matmul_ragged(p.hidden, p.weight, *slots, **keywords)
    elif p.pair[0] == "bf16":
        out = reference.grouped_matmul_w4a16(p.hidden, p.weight, p.b_scales, *slots, **keywords)
    else:
        out = reference.grouped_matmul_block_scaled(
            *(p.hidden, p.weight, p.a_scales, p.b_scales, p.starts, p.offsets, p.ids),
            expert_scales=p.expert_scales,
            a_row_scales=p.row_scales,
            format=FORMATS[p.pair[0]],
            weight_format=FORMATS[p.pair[1]],
            **keywords,
        )
    return np.asarray(out)[: int(p.starts[-1])].view(np.uint16)


def run(kernels: Any, config: HopperMatmulConfig, p: Problem, *, has_slots: bool = True) -> Any:
    """The kernel's output as u16, poisoned before."""
    routing = (p.starts, p.offsets) if has_slots else (None, None)
    m = len(p.hidden)
    tokens = pack_tokens(p.hidden, p.a_scales, *routing, format=p.pair[0])
    weights = pack_weights(p.weight, p.b_scales, format=p.pair[1])
    output = np.full((m, p.n), POISON, np.uint16)
    words = np.zeros(m * p.n // 2, np.uint32)
    words[:] = output.reshape(-1).view(np.uint32)

    def given(array: Any, dtype: Any) -> Any:
        return np.zeros(2, dtype) if array is None else array.reshape(-1).view(dtype)

    launch(
        kernels,
        launch_matmul_grouped_sm90,
        words,
        tokens.data.reshape(-1),
        weights.data.reshape(-1),
        p.starts,
        p.ids,
        given(p.expert_scales, np.float32),
        given(p.row_scales, np.uint16),
        given(p.bias, np.uint16),
        num_active=len(p.ids) if has_slots else 0,
        num_rows=m,
        n=p.n,
        k=p.k,
        has_row_scales=p.row_scales is not None,
        has_expert_scales=p.expert_scales is not None,
        has_bias=p.bias is not None,
        config=config,
    )
    return words.view(np.uint16).reshape(m, p.n)


def check(kernels: Any, config: HopperMatmulConfig, p: Problem) -> None:
    """Rows of slots have the reference's bytes, the others are not written."""
    got, used = run(kernels, config, p), int(p.starts[-1])
    np.testing.assert_array_equal(got[:used], expected(p))
    assert (got[used:] == POISON).all()


# What ends within a 64-block, after a 64-block that fills no stage, and with a stage; and N within
# a fragment's rows, a warpgroup's, and with a tile.
TAILS = [(24, 48), (72, 192), (136, 352), (128, 256)]
if SIMULATED:
    TAILS = TAILS[:1]


@pytest.mark.parametrize(("n", "k"), TAILS)
@pytest.mark.parametrize("config", CONFIGS)
def test_nvfp4_with_every_factor_and_tail(hopper_kernels: Any, config: str, n: int, k: int) -> None:
    """More tiles than blocks, so that stages, results and registers are used again and again."""
    slots, pair = FEW if SIMULATED else MIXED, ("nvfp4", "nvfp4")
    p = make_problem(n, slots, n, k, pair, row_scales=True, bias=True)
    check(hopper_kernels, CONFIGS[config](*pair), p)
    # Without any factor a shorter epilogue multiplies once.
    plain = replace(p, row_scales=None, bias=None)
    check(hopper_kernels, CONFIGS[config](*pair), plain)


@pytest.mark.parametrize("pair", HOPPER_PAIRS[1:], ids="x".join)
def test_other_pairs(hopper_kernels: Any, pair: tuple[str, str]) -> None:
    n, k = (24, 96) if SIMULATED else (72, 224)
    if pair == ("bf16", "bf16"):
        k += 8
    slots = FEW if SIMULATED else MIXED
    p = make_problem(3, slots, n, k, pair, row_scales=pair[0] != "bf16", bias=True)
    check(hopper_kernels, direct(*pair), p)


@pytest.mark.parametrize("config", CONFIGS)
def test_without_slots_all_rows_are_of_expert_0(hopper_kernels: Any, config: str) -> None:
    pair = ("nvfp4", "nvfp4")
    p = make_problem(4, Slots((13,), (0,), 1, 0), 24, 80, pair, row_scales=True, bias=True)
    got = run(hopper_kernels, CONFIGS[config](*pair), p, has_slots=False)
    np.testing.assert_array_equal(got, expected(p))


@pytest.mark.parametrize("factor", [2.0**99, 2.0**100, -(2.0**99), 3e38, np.inf, np.nan])
def test_factors_at_the_edge_of_one_product(hopper_kernels: Any, factor: float) -> None:
    """The short epilogue folds two factors into one where that rounds the same."""
    pair = ("nvfp4", "nvfp4")
    p = make_problem(5, FEW, 24, 48, pair, row_scales=False, bias=False)
    p = replace(p, expert_scales=np.array([factor, 1.0], np.float32))
    check(hopper_kernels, direct(*pair), p)


@st.composite
def many_slots(draw: st.DrawFn) -> Slots:
    """Up to 40 slots, most with few rows, some empty, some masked, some with the same expert."""
    counts = draw(st.lists(st.sampled_from((0, 0, 1, 2, 3, 7, 8, 9, 16, 17, 40)), max_size=40))
    ids = [draw(st.integers(-1, 2)) for _ in counts]
    return Slots(tuple(counts) or (0,), tuple(ids) or (0,), 3, draw(st.sampled_from((0, 1, 9))))


@given(many_slots(), seeds)
@example(Slots((0,) * 7 + (1,), (0,) * 7 + (1,), 3, 1), 0)
@example(Slots((3,) + (0,) * 7, (2,) + (1,) * 7, 3, 0), 0)
@settings(max_examples=2 if SIMULATED else 25)
def test_any_slots(hopper_kernels: Any, slots: Slots, seed: int) -> None:
    if sum(slots.counts) == 0:
        return
    pair = ("nvfp4", "nvfp4")
    p = make_problem(seed, slots, 8, 48, pair, row_scales=False, bias=False)
    check(hopper_kernels, direct(*pair), p)


def runnable() -> list[HopperMatmulConfig]:
    """Every shape that can be chosen for NVFP4, and the first of each set of widths for others."""
    found: dict[Any, HopperMatmulConfig] = {}
    for pair in HOPPER_PAIRS:
        for candidate in hopper_matmul_candidates(*pair, 1536, 2048, 5, 5 * 16):
            config = candidate.config
            key = config if pair == HOPPER_PAIRS[0] else (pair, config.widths)
            if not cannot_run(config, 5):
                found.setdefault(key, config)
    return list(found.values())


@pytest.mark.gpu
@pytest.mark.parametrize("config", runnable() if reads_prepared() else [], ids=lambda c: c.name)
def test_gpu_gives_the_same_bytes_in_every_shape(config: HopperMatmulConfig) -> None:
    slots = Slots((5, 0, 157, 33, 311), (2, 0, 1, -1, 2), 3, spare_rows=3)
    pair = (config.a_format, config.b_format)
    p = make_problem(6, slots, 264, 1120, pair, row_scales=pair[0] != "bf16", bias=True)
    check(Kernels("gpu"), config, p)
    check(Kernels("gpu"), config, replace(p, row_scales=None, bias=None))
