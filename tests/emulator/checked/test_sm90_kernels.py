"""The Hopper matmuls have no findings, and in any order of their threads the reference's bytes."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nbmoe import codecs, layouts, ops
from nbmoe.activation import GatedActivation
from nbmoe.formats import FORMATS
from nbmoe.prepared.fp8 import pack_fp8_tokens, pack_fp8_weights
from nbmoe.prepared.w4a8 import pack_w4a8_weights
from nbmoe_kernels import heuristics_fp8_sm90, mega_ffn_sm90_producer
from nbmoe_kernels.catalog_sm90 import (
    ffn_variants,
    fp8_variants,
    fused_variants,
    plain_configs,
)
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig
from nbmoe_kernels.mega_ffn_counters import counted
from nbmoe_kernels.mega_ffn_sm90 import make_mega_ffn_sm90
from tests.emulator.checked import shipped
from tests.emulator.checked.shipped import checking
from tests.fp8_operands import make_problem as make_fp8_problem
from tests.kernels import test_matmul_sm90 as plain_tests
from tests.kernels import test_matmul_swiglu_sm90 as fused_tests
from tests.kernels import test_mega_ffn_sm90 as ffn_tests
from tests.ops.operands import make_product
from tests.strategies import Slots

Run = Callable[[], Any]
"""Launches a kernel; with ``compare`` it also compares the bytes with the reference's."""

SLOTS = Slots((5, 0, 11), (-1, 1, 0), 3, 1)
"""A masked one; none; two segments of narrow tiles, the second in part."""
N, K = 72, 352
"""A warpgroup's rows and a part; more of K than a stage holds, and not a multiple of 64."""
EMULATED: Any = SimpleNamespace(name="emulate")
OAI = GatedActivation("swigluoai", 1.702, 7.0)
SCHEDULES = {"fifo": True, "random:1": True, "pct:3:1": False}
"""And whether the routing is declared done, so that kernels read it before they wait."""


def plain(config: HopperMatmulConfig, compare: bool = False) -> None:
    pair = (config.a_format, config.b_format)
    has_scales = pair[0] != "bf16"
    p = plain_tests.make_problem(1, SLOTS, N, K, pair, row_scales=has_scales, bias=True)
    (plain_tests.check if compare else plain_tests.run)(EMULATED, config, p)


def fused(
    config: Any, match_bf16: bool, activation: str, layout: str, compare: bool = False
) -> None:
    formats = (FORMATS[config.a_format], FORMATS[config.b_format])
    p = make_product(2, SLOTS, 128, 288, row_scales=True, bias=True, pair=formats)
    factors = np.float32([0.5, 2, 1]) if config.a_format == "nvfp4" else None
    chosen = OAI if activation == "swigluoai" else GatedActivation(activation)
    if compare:
        keywords: Any = {"activation": chosen, "match_bf16": match_bf16, "factors": factors}
        fused_tests.check(config, p, layouts=(layout,), **keywords)
    else:
        fused_tests.run(config, p, factors, chosen, match_bf16, layout)


def ffn(config: Any, match_bf16: bool, activation: str, compare: bool = False) -> None:
    a, b = FORMATS[config.a_format], FORMATS[config.b_format]
    p = ffn_tests.problem(
        4, a, 96, 64, 24, SLOTS, weight_format=b, bias=True, row_scales=a.name == "nvfp4",
        activation=OAI if activation == "swigluoai" else GatedActivation(activation),
        match_bf16=match_bf16,
    )  # fmt: skip
    (ffn_tests.check if compare else ffn_tests.run)(config, p)


def fp8(config: Any, scaling: str, scale_type: str, compare: bool = False) -> None:
    types: Any = {"rowwise": scaling == "rowwise", "scales_type": "bfloat16"}
    if scale_type == "f32":
        types["scales_type"] = np.float32
    p = make_fp8_problem([5, 0, 11], N, 264, expert_ids=[-1, 1, 0], spare_rows=1, **types)
    weights: Any = pack_fp8_weights(p.weight)
    b_scales: Any = p.b_scales
    if config.b_format == "mxfp4":
        rng = np.random.default_rng(3)
        codes = codecs.pack_nibbles(rng.integers(0, 16, (3, N, 288), np.uint8))
        scales = layouts.interleave_scales(rng.integers(120, 134, (3, N, 9), np.uint8))
        weights, b_scales = pack_w4a8_weights(codes, scales), None
        p = make_fp8_problem([5, 0, 11], N, 288, expert_ids=[-1, 1, 0], spare_rows=1, **types)
    tokens = pack_fp8_tokens(p.hidden, p.a_scales, p.starts)
    op: Any = ops.grouped_dynamic_scaled_fp8_matmul
    if scaling == "rowwise":
        op = ops.grouped_rowwise_dynamic_scaled_fp8_matmul
    call = partial(op, tokens, weights, None, b_scales, p.starts, p.expert_ids, bias=p.bias)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heuristics_fp8_sm90, "fp8_hopper_config", lambda *args: config)
        got = call(backend="emulate")
    if compare:
        used = int(p.starts[-1])
        wanted = call(backend="reference")
        assert got[:used].tobytes() == wanted[:used].tobytes()


def runs() -> dict[str, Callable[..., None]]:
    """All of the catalog's."""
    return {
        **{f"plain_{config.name}": partial(plain, config) for config in plain_configs()},
        **{f"fused_{v[0].name}": partial(fused, *v) for v in fused_variants()},
        **{f"ffn_{v[0].name}": partial(ffn, *v) for v in ffn_variants()},
        **{f"fp8_{v[0].name}": partial(fp8, *v) for v in fp8_variants()},
    }


CALLS = runs()


@pytest.mark.parametrize("name", CALLS)
def test_no_finding_and_the_references_bytes(name: str) -> None:
    for schedule, routed_before in SCHEDULES.items():
        with checking(routed_before, schedules=[schedule]) as executor:
            CALLS[name](compare=True)
        assert executor.reports, "nothing was launched"
        assert not executor.findings, str(executor.findings[0])


@pytest.mark.parametrize("kind", ["plain", "fused", "ffn", "fp8"])
def test_only_a_declared_routing_is_read_at_once(kind: str, monkeypatch: Any) -> None:
    """Kernels that are told nothing but read as if the routing were declared."""
    name = next(n for n in CALLS if n.startswith(kind))
    monkeypatch.setattr(shipped, "READ_BEFORE_THE_WAIT", set())
    with checking(True, schedules=["fifo"]) as executor:
        CALLS[name]()
    found = {(f.id, f.variable) for f in executor.findings}
    assert {("RACE_RAW", "expert_start"), ("RACE_RAW", "expert_ids")} <= found


def test_lanes_that_each_look_at_a_counter_are_found(monkeypatch: Any) -> None:
    """Lanes of the MegaFFN's producer that see other values go other ways."""
    name = next(n for n in CALLS if n.startswith("ffn_nvfp4"))

    @device_function
    def looks_by_itself(counters: Any, segment: Any, count: Any) -> Any:
        return counted(counters, segment) >= count

    monkeypatch.setattr(mega_ffn_sm90_producer, "is_complete", looks_by_itself)
    make_mega_ffn_sm90.cache_clear()
    try:
        with checking(schedules=["pct:3:11"]) as executor, suppress(ffn_tests.CountersError):
            CALLS[name]()
    finally:
        make_mega_ffn_sm90.cache_clear()
    assert {f.id for f in executor.findings} == {"COLLECTIVE_DIVERGENT"}
