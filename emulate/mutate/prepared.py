"""Launches of the kernels that make prepared operands."""

from collections.abc import Callable
from typing import Any

import numpy as np

from emulate.mutate.slots import EXPERTS, slots, unwritten
from nbmoe_kernels.device.op import NUMPY_TYPES
from nbmoe_kernels.prepare_fp8 import launch_prepare_fp8_tokens, launch_prepare_fp8_weights
from nbmoe_kernels.prepare_w4a8 import launch_prepare_w4a8
from nbmoe_kernels.prepare_weights import launch_prepare_weights
from nbmoe_kernels.prepared_tokens import token_rows
from nbmoe_kernels.prepared_w4a8 import UNIT_BYTES as FOLDED_BYTES
from nbmoe_kernels.prepared_weights import prepared_bytes
from nbmoe_kernels.quantize_fp8_prepared import launch_quantize_fp8_prepared

Launch = tuple[Any, Callable[[], tuple[Any, ...]]]
N, K = 72, 288
"""A unit of 64 rows and part of one; blocks of K, the last in part."""
ROWS = 11
"""Of the third slot."""


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


def launch_of(kernel: Any, call: Callable[[Any], None]) -> Launch:
    """The grid and the arguments with which a launcher runs a kernel."""

    def record() -> tuple[Any, tuple[Any, ...]]:
        recorder = _Recorder()
        call(recorder)
        return recorder.launches[kernel.name]

    return record()[0], lambda: record()[1]


def normal(random: np.random.Generator, dtype: str, count: int) -> np.ndarray:
    """16-bit floats of either sign in [1, 2), or e4m3 codes that are not NaN."""
    if dtype == "e4m3":
        return (random.integers(0, 256, count) & 0xBF).astype(np.uint8)
    exponent, mantissa = (0x3C00, 10) if dtype == "f16" else (0x3F80, 7)
    bits = random.integers(0, 1 << mantissa, count) + exponent
    return (bits | random.integers(0, 2, count) << 15).astype(np.uint16)


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
                x = normal(random, "bf16", rows * K)
                common |= {"num_cols": K, "scale_ub": np.inf}
                launch_quantize_fp8_prepared(executor, panels, panel_scales, x, starts, **common)
            else:
                dtype = name.removeprefix("prepare_fp8_tokens_")
                floats = random.uniform(0.5, 2, blocks * rows).astype(np.float32)
                scales = floats if dtype == "f32" else normal(random, "bf16", blocks * rows)
                common |= {
                    "scale_type": dtype,
                    "k": K,
                    "num_groups": blocks,
                    "group_stride": rows,
                    "row_stride": 1,
                }
                codes = normal(random, "e4m3", rows * K)
                launch_prepare_fp8_tokens(
                    executor,
                    panels,
                    panel_scales,
                    codes,
                    scales,
                    starts,
                    **common,
                )

    return launch_of(kernel, call)


PREPARED: dict[str, Callable[[Any], Launch]] = {
    **dict.fromkeys(("prepare_weights", "prepare_fp8", "prepare_w4a8", "fold_row"), prepare),
    "quantize_fp8_prepared": prepare,
}
"""By the beginning of a kernel's name."""
