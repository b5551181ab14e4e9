"""Launches of the matmuls that only compute capability 9.0 runs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from emulate.mutate.prepared import Launch, launch_of, normal
from emulate.mutate.slots import unwritten
from nbmoe_kernels.catalog_sm90 import (
    ffn_variants,
    fp8_variants,
    fused_variants,
    plain_configs,
)
from nbmoe_kernels.matmul_grouped_fp8_sm90 import (
    launch_matmul_grouped_fp8_sm90,
    make_matmul_grouped_fp8_sm90,
)
from nbmoe_kernels.matmul_grouped_sm90 import launch_matmul_grouped_sm90, make_matmul_grouped_sm90
from nbmoe_kernels.matmul_grouped_swiglu_sm90 import (
    launch_matmul_grouped_swiglu_sm90,
    make_matmul_grouped_swiglu_sm90,
)
from nbmoe_kernels.mega_ffn_sm90 import (
    launch_mega_ffn_sm90,
    make_mega_ffn_sm90,
    most_counters,
)
from nbmoe_kernels.prepared_tokens import ROW_BYTES, token_rows
from nbmoe_kernels.prepared_weights import UNIT_KINDS, k64_count, prepared_bytes


def multiply(kernel: Any) -> tuple[Launch, Launch]:
    """A launch with slots and all that may be multiplied and added, and a small one with nothing.

    The first has more of K than the ring of stages holds, and weight rows that fill a unit and part
    of one; the second has a block of K and whole units.
    """
    for config in plain_configs():
        if make_matmul_grouped_sm90(config) is kernel:
            return _both(kernel, partial(_plain, config))
    for fused in fused_variants():
        if make_matmul_grouped_swiglu_sm90(*fused) is kernel:
            return _both(kernel, partial(_fused, *fused))
    for fp8 in fp8_variants():
        if make_matmul_grouped_fp8_sm90(*fp8) is kernel:
            return _both(kernel, partial(_fp8, *fp8))
    for ffn in ffn_variants():
        if make_mega_ffn_sm90(*ffn) is kernel:
            return _both(kernel, partial(_ffn, *ffn))
    raise LookupError(f"mutate: no launch is known for {kernel.name}")


def _both(kernel: Any, call: Callable[[bool, Any], None]) -> tuple[Launch, Launch]:
    return launch_of(kernel, partial(call, True)), launch_of(kernel, partial(call, False))


@dataclass(frozen=True)
class _Routing:
    """Rows of all slots; where slots begin, their experts and first scale tiles; how many."""

    rows: int
    starts: np.ndarray
    experts: np.ndarray
    tiles: np.ndarray
    num_active: int

    @property
    def panel_rows(self) -> int:
        return token_rows(self.rows, self.experts.size)


def _routing(config: Any, has_slots: bool) -> _Routing:
    """As many slots as the kernel takes, most of them empty; or none, and a few rows.

    Of tiles with rows and of masked ones there are some of every width. The first is one whose last
    rows nobody copies; a masked slot fills the widest tile, and another has one row more.
    """
    *_, widest = config.widths
    shapes = [(0, widest - 5)]
    if has_slots:
        narrow = [width + 3 for width in (0, *config.widths[:-1])]
        shapes += [(-1, widest), (1, widest + 1)]
        shapes += [(-1, rows) for rows in narrow] + [(0, rows) for rows in narrow]
    counts = np.zeros(config.max_slots if has_slots else 1, np.int64)
    experts = np.zeros(counts.size, np.int32)
    # A lane of the table's warp has four neighbours or eight: slots at a lane's beginning, inside,
    # before empty ones and at its end, and the last one of all.
    places = [*(0, 1, 2, *range(7, 2 * len(shapes), 2))[: len(shapes) - 1], counts.size - 1]
    for place, (expert, rows) in zip(places, shapes, strict=True):
        experts[place], counts[place] = expert, rows
    starts = np.cumsum([0, *counts]).astype(np.uint32)
    tiles = np.cumsum([0, *-(-counts // 128)]).astype(np.uint32)
    return _Routing(int(starts[-1]), starts, experts, tiles, experts.size if has_slots else 0)


def _units(random: np.random.Generator, format: str, experts: int, n: int, k: int) -> np.ndarray:
    """Prepared weights whose values are near 1."""
    kind = UNIT_KINDS[format]
    size = prepared_bytes(format, experts, n, k)
    if format == "bf16":
        return normal(random, "bf16", size // 2)
    codes = random.integers(0, 256, size).astype(np.uint8)
    units = (codes & 0xBF if format == "mxfp8" else codes).reshape(-1, kind.unit_bytes)
    low, high = (0x20, 0x50) if format == "nvfp4" else (124, 131)
    scales = units[:, kind.code_bytes :]
    scales[...] = random.integers(low, high, scales.shape)
    return units.reshape(-1)


def _operands(config: Any, has_slots: bool, n: int) -> dict[str, Any]:
    """What every block-scaled matmul takes, in the order of its parameters up to the flags."""
    random = np.random.default_rng(6)
    routing = _routing(config, has_slots)
    blocks = config.stage_blocks * (config.stages + 1) + max(config.stage_blocks // 2, 1)
    k = 64 * blocks if has_slots else 64
    words = k64_count(k) * routing.panel_rows * ROW_BYTES // 2
    return {
        "routing": routing,
        "k": k,
        "tokens": normal(random, config.b.tensor_core, words),
        # Without slots a weight too far is past the end.
        "weights": _units(random, config.b_format, 2 if has_slots else 1, n, k),
        "expert_scales": np.array([0.75, 1.25], np.float32) / np.float32(1024),
        "row_scales": random.integers(0x3F00, 0x4000, routing.rows).astype(np.uint16),
        "bias": np.sort(random.integers(0x3C00, 0x4080, 2 * n)).astype(np.uint16),
        "flags": {
            "has_row_scales": has_slots,
            "has_expert_scales": has_slots,
            "has_bias": has_slots,
        },
    }


def _plain(config: Any, has_slots: bool, executor: Any) -> None:
    n = 72 if has_slots else 64
    given = _operands(config, has_slots, n)
    routing = given["routing"]
    launch_matmul_grouped_sm90(
        executor,
        unwritten(routing.rows * n // 2),
        given["tokens"],
        given["weights"],
        routing.starts,
        routing.experts,
        given["expert_scales"],
        given["row_scales"],
        given["bias"],
        num_active=routing.num_active,
        num_rows=routing.rows,
        n=n,
        k=given["k"],
        config=config,
        **given["flags"],
    )


def _fused(
    config: Any, match_bf16: bool, activation: str, layout: str, has_slots: bool, executor: Any
) -> None:
    n = 128
    given = _operands(config, has_slots, n)
    routing = given["routing"]
    launch_matmul_grouped_swiglu_sm90(
        executor,
        unwritten(routing.panel_rows * ROW_BYTES // 4),
        unwritten(int(routing.tiles[-1]) * 128),
        given["tokens"],
        given["weights"],
        routing.starts,
        routing.tiles,
        routing.experts,
        given["expert_scales"],
        np.resize(np.array([2.0, 1.0, 0.5], np.float32), routing.experts.size),
        given["row_scales"],
        given["bias"],
        num_active=max(routing.num_active, 1),  # it takes no rows without slots
        num_rows=routing.rows,
        n=n,
        k=given["k"],
        match_bf16=match_bf16,
        activation=activation,
        alpha=1.5,
        limit=4.0 if has_slots else 0.0,
        config=config,
        layout=layout,
        **given["flags"],
    )


def _ffn(config: Any, match_bf16: bool, activation: str, has_slots: bool, executor: Any) -> None:
    random, n = np.random.default_rng(8), 128
    given = _operands(config, has_slots, n)
    routing = given["routing"]
    slots, moe_dim = routing.experts.size, n // 2
    middle = unwritten(routing.panel_rows * ROW_BYTES // 4)
    launch_mega_ffn_sm90(
        executor,
        unwritten(routing.rows * n // 2),
        middle,
        middle.view(np.uint8),
        np.zeros(most_counters(config, routing.rows, slots), np.uint32),
        given["tokens"],
        given["weights"],
        _units(random, config.b_format, 2, n, moe_dim),
        routing.starts,
        routing.experts,
        given["expert_scales"],
        given["expert_scales"] * np.float32(512),
        np.resize(np.array([2.0, 1.0, 0.5], np.float32), slots),
        given["row_scales"],
        given["bias"],
        given["bias"][::-1].copy(),
        num_active=slots,
        num_slots=slots,
        num_rows=routing.rows,
        k=given["k"],
        moe_dim=moe_dim,
        n=n,
        has_up_scales=has_slots,
        has_down_scales=has_slots,
        has_row_scales=has_slots,
        has_up_bias=has_slots,
        has_down_bias=has_slots,
        match_bf16=match_bf16,
        activation=activation,
        alpha=1.5,
        limit=4.0 if has_slots else 0.0,
        config=config,
    )


def _fp8(config: Any, scaling: str, scale_type: str, has_slots: bool, executor: Any) -> None:
    random = np.random.default_rng(7)
    n, k = (72, 128 * (config.stages + 1) + 8) if has_slots else (128, 128)
    routing = _routing(config, has_slots)
    blocks = -(-k // 128)
    weights = normal(random, "e4m3", 2 * 2 * blocks * config.unit_bytes)
    if config.b_format == "mxfp4":
        weights = random.integers(0, 256, weights.size).astype(np.uint8)
        # Powers from -2 to 2.
        units = weights.reshape(-1, config.unit_bytes)
        units[:, -256:] = random.integers(6, 11, (len(units), 256))
    floats = random.uniform(0.5, 2, 2 * n * blocks).astype(np.float32)
    b_scales = floats if scale_type == "f32" else normal(random, "bf16", floats.size)
    launch_matmul_grouped_fp8_sm90(
        executor,
        unwritten(routing.rows * n // 2),
        normal(random, "e4m3", blocks * routing.panel_rows * 128),
        weights,
        random.uniform(0.5, 2, blocks * routing.panel_rows).astype(np.float32),
        b_scales,
        routing.starts,
        routing.experts,
        np.sort(random.integers(0x3C00, 0x4080, 2 * n)).astype(np.uint16),
        scaling=scaling,
        scale_type=scale_type,
        num_active=routing.num_active,
        num_rows=routing.rows,
        n=n,
        k=k,
        a_scale_stride=1,
        b_scale_strides=(n, 1),
        has_bias=has_slots,
        config=config,
        num_sms=1,
    )
