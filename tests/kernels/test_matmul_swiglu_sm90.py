"""The fused Hopper matmul whose spare warps finish tiles, and which shape it runs with.

The tests of the operation run it without spare warps, in all formats.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numba import config as numba_config

from nbmoe import backend, ops
from nbmoe.activation import GatedActivation
from nbmoe.arrays import named_dtype
from nbmoe.formats import MXFP8, NVFP4, PAIRS
from nbmoe.layouts import ceil_div
from nbmoe.prepared import pack_tokens, pack_weights
from nbmoe.prepared.tokens import panel_rows, token_shape
from nbmoe_kernels.heuristics_sm90 import hopper_matmul_config
from nbmoe_kernels.hopper_limits import lacks_memory
from nbmoe_kernels.matmul_grouped_swiglu_sm90 import (
    launch_matmul_grouped_swiglu_sm90,
    make_matmul_grouped_swiglu_sm90,
)
from nbmoe_kernels.matmul_sm90_swiglu_config import FusedMatmulConfig, fused_matmul_config
from tests.kernels.assemble import assemble
from tests.ops.compare import assert_same, poisoned
from tests.ops.operands import PAIR_NAMES, Product, make_product
from tests.strategies import Slots

LAYOUTS = ("packed", "prepared")
SILU = GatedActivation()
MIXED = Slots((17, 0, 3, 130, 1), (2, 4, -1, 0, 1), 5, 5)
needs_compiler = pytest.mark.skipif(
    numba_config.ENABLE_CUDASIM, reason="the simulator replaces the compiler"
)
no_simulator = pytest.mark.skipif(
    numba_config.ENABLE_CUDASIM, reason="tests of the operation run there"
)


def config_of(a: Any, b: Any = None, widths: Any = (8,), finishers: bool = False) -> Any:
    registers = (56, 224) if finishers else None
    warpgroups = 2 if finishers else 1
    b = (b or a).name
    return FusedMatmulConfig(
        a.name, b, widths, warpgroups, 2, 2, 1, registers, 32, stores_later=finishers
    )


def expected_of(p: Product, factors: Any, **keywords: Any) -> Any:
    """The reference's codes and scales in poisoned buffers."""
    fmt, moe_dim = p.a_format, p.n // 2
    tiles = (len(p.a_scales), ceil_div(moe_dim, fmt.tile_columns), 32, 4, 4)
    out = poisoned(
        (
            ((p.slots.rows, fmt.packed_k(moe_dim)), named_dtype(fmt.codes_dtype)),
            (tiles, named_dtype(fmt.scales_dtype)),
        ),
        0xAA,
    )
    return ops.grouped_matmul_blocked_swiglu(
        *p.operands,
        **p.keywords,
        expert_scales=p.expert_scales,
        c_input_scales=factors,
        out=out,
        validate="shapes",
        backend="reference",
        **keywords,
    )


def run(
    config: Any, p: Product, factors: Any, activation: Any, match_bf16: bool, layout: str
) -> tuple[Any, Any]:
    """The kernel's buffers, poisoned before: codes and scales, or prepared tokens and nothing."""
    s, fmt, moe_dim = p.slots, p.a_format, p.n // 2
    tokens = pack_tokens(p.hidden, p.a_scales, s.starts, s.offsets, format=fmt.name)
    weights = pack_weights(p.weight, p.b_scales, format=p.b_format.name)
    codes: Any = np.full((s.rows, fmt.packed_k(moe_dim)), 0xAA, np.uint8)
    shape = (len(p.a_scales), ceil_div(moe_dim, fmt.tile_columns), 32, 4, 4)
    scales = np.full(shape, 0xAA, np.uint8)
    if layout == "prepared":
        codes = np.full(token_shape(s.rows, len(s.counts), moe_dim), 0xAA, np.uint8)
    word = np.uint16 if layout == "packed" and fmt is not MXFP8 else np.uint32
    none = np.zeros(4, np.uint32)

    def flat(array: Any, dtype: Any) -> Any:
        return none.view(dtype) if array is None else array.reshape(-1).view(dtype)

    launch_matmul_grouped_swiglu_sm90(
        backend.executor("emulate"),
        codes.reshape(-1).view(word),
        scales.reshape(-1),
        tokens.data.reshape(-1),
        weights.data.reshape(-1),
        s.starts,
        s.offsets,
        s.ids,
        p.expert_scales,
        flat(factors, np.float32),
        flat(p.row_scales, np.uint16),
        flat(p.bias, np.uint16),
        num_active=len(s.counts),
        num_rows=s.rows,
        n=p.n,
        k=p.k,
        has_row_scales=p.row_scales is not None,
        has_expert_scales=True,
        has_bias=p.bias is not None,
        match_bf16=match_bf16,
        activation=activation.fused_activation,
        alpha=activation.alpha,
        limit=activation.limit,
        config=config,
        layout=layout,
    )
    return codes, scales


def check(
    config: Any,
    p: Product,
    *,
    activation: Any = SILU,
    match_bf16: bool = True,
    layouts: Any = LAYOUTS,
    factors: Any = None,
) -> None:
    count = len(p.slots.counts)
    if p.a_format is NVFP4 and factors is None:
        factors = np.random.default_rng(3).uniform(0.1, 9, count).astype(np.float32)
    codes, scales = expected_of(p, factors, activation=activation, match_bf16=match_bf16)
    for layout in layouts:
        got = run(config, p, factors, activation, match_bf16, layout)
        if layout == "packed":
            assert_same(got[0], codes.view(np.uint8), "codes")
            assert_same(got[1], scales.view(np.uint8), "scales")
            continue
        s = p.slots
        tokens = pack_tokens(codes, scales, s.starts, s.offsets, format=p.a_format.name).data
        rows = panel_rows(s.rows, s.starts)
        want = np.full_like(tokens, 0xAA)
        want[:, rows] = tokens[:, rows]
        assert_same(got[0], want, "tokens")
        assert (got[1] == 0xAA).all()


@no_simulator
@pytest.mark.parametrize("layout", LAYOUTS)
def test_spare_warps_finish_tiles(layout: str) -> None:
    """Masked, empty and odd slots, units and scale tiles that are partly columns, all epilogues."""
    config = config_of(NVFP4, finishers=True)
    for blocks in (1, 3, 4, 9):
        p = make_product(blocks, MIXED, 32 * blocks, 144, row_scales=blocks == 3, bias=blocks > 3)
        check(config, p, layouts=(layout,), activation=GatedActivation(limit=2.5 * (blocks == 4)))


@no_simulator
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_of_all_sizes(layout: str) -> None:
    """Gates that underflow, overflow and are NaN, under factors at the ends of float32."""
    config, p = config_of(NVFP4, finishers=True), make_product(3, MIXED, 96, 80)
    scales = p.a_scales.copy()
    # The scale of block 1 of rows 4 and 36 of the slot in the first tiles.
    scales[0, 0, 4, :2, 1] = p.nan_scale
    sizes = np.float32([1e-38, 1e30, 3e38, 1e3, 1e-3])
    factors = np.float32([1e-39, 3e38, 1, 1e-30, 1e24])
    wild = replace(p, a_scales=scales, expert_scales=p.expert_scales * sizes)
    check(config, wild, layouts=(layout,), factors=factors)


@pytest.mark.parametrize("slots", [1, 32, 128, 129, 257, 1024])
@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_NAMES)
def test_chosen_shape_fits(pair: Any, slots: int) -> None:
    formats = [fmt.name for fmt in pair]
    for rows in (0, 1, 4, 8, 20, 40, 100, 256, 5000, None):
        total = None if rows is None else rows * slots
        config = fused_matmul_config(*formats, 1536, 2048, slots, total)
        assert lacks_memory(config) == "" and config.max_slots >= slots
        plain = hopper_matmul_config(*formats, 1536, 2048, slots, total)
        assert (config.widths, config.stage_blocks) == (plain.widths, plain.stage_blocks)
        assert config.stores_later == (config.registers is not None)


def test_room_for_sums_costs_qwen_no_block() -> None:
    """Qwen3-30B at 128 tokens, by a hundred bytes."""
    config = fused_matmul_config("nvfp4", "nvfp4", 1536, 2048, 128, 1024)
    plain = hopper_matmul_config("nvfp4", "nvfp4", 1536, 2048, 128, 1024)
    assert (config.blocks_per_sm, config.stages) == (plain.blocks_per_sm, plain.stages)


@needs_compiler
@pytest.mark.parametrize("rows", [128, 1024])
def test_blocks_fit_on_an_sm(tmp_path: Any, rows: int) -> None:
    """One register more than 96 would cost one of four blocks, and a third of the speed."""
    config = fused_matmul_config("nvfp4", "nvfp4", 1536, 2048, 128, rows)
    assert config.warp_products == (rows == 128) and config.blocks_per_sm == 4
    report = assemble(make_matmul_grouped_swiglu_sm90(config, layout="prepared"), (9, 0), tmp_path)
    assert report.faults() == []
    # A warp's registers are given out by 256, on an SM of 65,536.
    warps = config.blocks_per_sm * config.threads // 32
    assert -(-32 * report.registers // 256) * 256 * warps <= 65536
