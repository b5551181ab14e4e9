"""Launches of the kernels that make prepared operands, and of those that multiply them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from emulate.mutate.slots import EXPERTS, slots, unwritten
from nbmoe_kernels.catalog_sm90 import fp8_variants, fused_variants, plain_configs
from nbmoe_kernels.device.op import NUMPY_TYPES
from nbmoe_kernels.matmul_grouped_fp8_sm90 import (
    launch_matmul_grouped_fp8_sm90,
    make_matmul_grouped_fp8_sm90,
)
from nbmoe_kernels.matmul_grouped_sm90 import launch_matmul_grouped_sm90, make_matmul_grouped_sm90
from nbmoe_kernels.matmul_grouped_swiglu_sm90 import (
    launch_matmul_grouped_swiglu_sm90,
    make_matmul_grouped_swiglu_sm90,
)
from nbmoe_kernels.prepare_fp8 import launch_prepare_fp8_tokens, launch_prepare_fp8_weights
from nbmoe_kernels.prepare_w4a8 import launch_prepare_w4a8
from nbmoe_kernels.prepare_weights import launch_prepare_weights
from nbmoe_kernels.prepared_tokens import ROW_BYTES, token_rows
from nbmoe_kernels.prepared_w4a8 import UNIT_BYTES as FOLDED_BYTES
from nbmoe_kernels.prepared_weights import UNIT_KINDS, k64_count, prepared_bytes
from nbmoe_kernels.quantize_fp8_prepared import launch_quantize_fp8_prepared

Launch = tuple[Any, Callable[[], tuple[Any, ...]]]
N, K = 72, 288
"""A unit of 64 rows and part of one; blocks of K, the last in part."""
ROWS = 11
"""Of the third slot: two segments of the narrowest tile."""
NONE = np.zeros(4, np.uint32)


class _Recorder:
    """An executor that notes what a launcher asks of it."""

    multiprocessors = 1

    def __init__(self) -> None:
        self.launches: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, kernel: Any, grid: Any, args: tuple[Any, ...], stream: Any) -> None:
        typed = (
            value.view(NUMPY_TYPES[p.dtype]) if p.is_pointer else NUMPY_TYPES[p.dtype](value)
            for p, value in zip(kernel.params, args, strict=True)
        )
        self.launches[kernel.name] = grid, tuple(typed)


def _launch_of(kernel: Any, call: Callable[[Any], None]) -> Launch:
    """The grid and the arguments with which a launcher runs a kernel."""

    def record() -> tuple[Any, tuple[Any, ...]]:
        recorder = _Recorder()
        call(recorder)
        return recorder.launches[kernel.name]

    return record()[0], lambda: record()[1]


def _normal(random: np.random.Generator, dtype: str, count: int) -> np.ndarray:
    """16-bit floats of either sign in [1, 2), or e4m3 codes that are not NaN."""
    if dtype == "e4m3":
        return (random.integers(0, 256, count) & 0xBF).astype(np.uint8)
    exponent, mantissa = (0x3C00, 10) if dtype == "f16" else (0x3F80, 7)
    bits = random.integers(0, 1 << mantissa, count) + exponent
    return (bits | random.integers(0, 2, count) << 15).astype(np.uint16)


def _units(random: np.random.Generator, format: str, experts: int, n: int, k: int) -> np.ndarray:
    """Prepared weights whose values are near 1."""
    kind = UNIT_KINDS[format]
    size = prepared_bytes(format, experts, n, k)
    if format == "bf16":
        return _normal(random, "bf16", size // 2)
    codes = random.integers(0, 256, size).astype(np.uint8)
    units = (codes & 0xBF if format == "mxfp8" else codes).reshape(-1, kind.unit_bytes)
    low, high = (0x20, 0x50) if format == "nvfp4" else (124, 131)
    scales = units[:, kind.code_bytes :]
    scales[...] = random.integers(low, high, scales.shape)
    return units.reshape(-1)


def prepare(kernel: Any) -> Launch:
    """What makes prepared operands."""
    rows, starts, _ = slots(ROWS)
    panel_rows = token_rows(rows, len(EXPERTS))
    blocks = -(-K // 128)

    def call(executor: Any) -> None:
        random = np.random.default_rng(5)
        name = kernel.name
        weight = random.integers(0, 2**32, N * K // 2, dtype=np.uint32)
        tiles = random.integers(120, 130, 512 * -(-K // 64)).astype(np.uint8)
        if name.startswith("prepare_weights_"):
            format = name.removeprefix("prepare_weights_")
            out = unwritten(prepared_bytes(format, 1, N, K) // 4)
            sizes: dict[str, Any] = {"format": format, "num_experts": 1, "n": N, "k": K}
            launch_prepare_weights(executor, out, weight, tiles, **sizes)
        elif name == "prepare_fp8_weights":
            out = unwritten(2 * blocks * 64 * 128 // 4)
            launch_prepare_fp8_weights(executor, out, weight, num_experts=1, n=N, k=K)
        elif name in ("fold_row_scales", "prepare_w4a8"):
            out = unwritten(2 * blocks * FOLDED_BYTES // 4)
            scales = unwritten(N, np.float32)
            if name == "prepare_w4a8":
                scales = np.full(N, 2.0, np.float32)
            launch_prepare_w4a8(executor, out, scales, weight, tiles, num_experts=1, n=N, k=K)
        else:
            panels = unwritten(blocks * panel_rows * 128 // 4)
            panel_scales = unwritten(blocks * panel_rows, np.float32)
            common: dict[str, Any] = {"num_slots": len(EXPERTS), "num_rows": rows}
            if name == "quantize_fp8_prepared":
                x = _normal(random, "bf16", rows * K)
                common |= {"num_cols": K, "scale_ub": np.inf}
                launch_quantize_fp8_prepared(executor, panels, panel_scales, x, starts, **common)
            else:
                dtype = name.removeprefix("prepare_fp8_tokens_")
                floats = random.uniform(0.5, 2, blocks * rows).astype(np.float32)
                scales = floats if dtype == "f32" else _normal(random, "bf16", blocks * rows)
                common |= {
                    "scale_type": dtype,
                    "k": K,
                    "num_groups": blocks,
                    "group_stride": rows,
                    "row_stride": 1,
                }
                codes = _normal(random, "e4m3", rows * K)
                launch_prepare_fp8_tokens(
                    executor,
                    panels,
                    panel_scales,
                    codes,
                    scales,
                    starts,
                    **common,
                )

    return _launch_of(kernel, call)


def multiply(kernel: Any) -> Launch:
    """A Hopper matmul of any kind, with more of K than the ring of stages holds."""
    for config in plain_configs():
        if make_matmul_grouped_sm90(config) is kernel:
            return _launch_of(kernel, partial(_plain, config))
    for fused in fused_variants():
        if make_matmul_grouped_swiglu_sm90(*fused) is kernel:
            return _launch_of(kernel, partial(_fused, *fused))
    for fp8 in fp8_variants():
        if make_matmul_grouped_fp8_sm90(*fp8) is kernel:
            return _launch_of(kernel, partial(_fp8, *fp8))
    raise LookupError(f"mutate: no launch is known for {kernel.name}")


def _operands(config: Any, n: int) -> tuple[int, int, Any, Any, dict[str, Any]]:
    """K, rows, tokens, weights, and what else every block-scaled matmul takes."""
    random = np.random.default_rng(6)
    rows, starts, offsets = slots(ROWS)
    k = 64 * (config.stage_blocks * (config.stages + 1) + 1)
    words = k64_count(k) * token_rows(rows, len(EXPERTS)) * ROW_BYTES // 2
    tokens = _normal(random, config.b.tensor_core, words)
    weights = _units(random, config.b_format, 2, n, k)
    rest = {
        "starts": starts,
        "offsets": offsets,
        "expert_scales": np.array([0.75, 1.25], np.float32) / np.float32(1024),
        "row_scales": random.integers(0x3F00, 0x4000, rows).astype(np.uint16),
        "bias": np.sort(random.integers(0x3C00, 0x4080, 2 * n)).astype(np.uint16),
    }
    return k, rows, tokens, weights, rest


def _plain(config: Any, executor: Any) -> None:
    k, rows, tokens, weights, rest = _operands(config, N)
    launch_matmul_grouped_sm90(
        executor,
        unwritten(rows * N // 2),
        tokens,
        weights,
        rest["starts"],
        EXPERTS,
        rest["expert_scales"],
        rest["row_scales"],
        rest["bias"],
        num_active=len(EXPERTS),
        num_rows=rows,
        n=N,
        k=k,
        has_row_scales=True,
        has_expert_scales=True,
        has_bias=True,
        config=config,
    )


def _fused(config: Any, match_bf16: bool, activation: str, layout: str, executor: Any) -> None:
    n = 128
    k, rows, tokens, weights, rest = _operands(config, n)
    launch_matmul_grouped_swiglu_sm90(
        executor,
        unwritten(token_rows(rows, len(EXPERTS)) * ROW_BYTES // 4),
        unwritten(3 * 128),
        tokens,
        weights,
        rest["starts"],
        rest["offsets"],
        EXPERTS,
        rest["expert_scales"],
        np.array([2.0, 1.0, 0.5], np.float32),
        rest["row_scales"],
        rest["bias"],
        num_active=len(EXPERTS),
        num_rows=rows,
        n=n,
        k=k,
        has_row_scales=True,
        has_expert_scales=True,
        has_bias=True,
        match_bf16=match_bf16,
        activation=activation,
        alpha=1.5,
        limit=4.0,
        config=config,
        layout=layout,
    )


def _fp8(config: Any, scaling: str, scale_type: str, executor: Any) -> None:
    random = np.random.default_rng(7)
    rows, starts, _ = slots(ROWS)
    k = 128 * (config.stages + 1) + 8
    blocks, panel_rows = -(-k // 128), token_rows(rows, len(EXPERTS))
    weights = _normal(random, "e4m3", 2 * 2 * blocks * config.unit_bytes)
    if config.b_format == "mxfp4":
        weights = random.integers(0, 256, weights.size).astype(np.uint8)
        # Powers from -2 to 2.
        units = weights.reshape(-1, config.unit_bytes)
        units[:, -256:] = random.integers(6, 11, (len(units), 256))
    floats = random.uniform(0.5, 2, 2 * N * blocks).astype(np.float32)
    b_scales = floats if scale_type == "f32" else _normal(random, "bf16", floats.size)
    launch_matmul_grouped_fp8_sm90(
        executor,
        unwritten(rows * N // 2),
        _normal(random, "e4m3", blocks * panel_rows * 128),
        weights,
        random.uniform(0.5, 2, blocks * panel_rows).astype(np.float32),
        b_scales,
        starts,
        EXPERTS,
        np.sort(random.integers(0x3C00, 0x4080, 2 * N)).astype(np.uint16),
        scaling=scaling,
        scale_type=scale_type,
        num_active=len(EXPERTS),
        num_rows=rows,
        n=N,
        k=k,
        a_scale_stride=1,
        b_scale_strides=(N, 1),
        has_bias=True,
        config=config,
        num_sms=1,
    )


PREPARED: dict[str, Callable[[Any], Launch]] = {
    **dict.fromkeys(("prepare_weights", "prepare_fp8", "prepare_w4a8", "fold_row"), prepare),
    "quantize_fp8_prepared": prepare,
}
"""By the beginning of a kernel's name."""
