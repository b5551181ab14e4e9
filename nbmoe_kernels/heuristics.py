"""Which tile shape a matmul runs with: pure functions of the problem's host metadata.

A choice changes speed, never bytes.
"""

import functools
from dataclasses import replace

from nbmoe_kernels.config_report import report_choice
from nbmoe_kernels.matmul_config import MatmulConfig
from nbmoe_kernels.matmul_operands import OPERANDS

MATMUL_PAIRS = (
    ("nvfp4", "nvfp4"),
    ("mxfp4", "mxfp4"),
    ("mxfp8", "mxfp8"),
    ("mxfp8", "mxfp4"),
    ("bf16", "bf16"),
    ("bf16", "mxfp4"),
    ("e4m3", "e4m3"),
)
"""Operand kinds (a, b) that are multiplied."""

SHARED_BYTES = 99 * 1024
"""Of a block, on the architectures with the least of it: sm_86, sm_89, sm_120."""

_SHAPES = (
    # rows an expert, up to; (block_m, warps_m, warps_n, stages at most)
    (16, (16, 1, 4, 4)),
    (64, (64, 2, 2, 3)),
    (None, (128, 4, 2, 3)),
)
_SHAPES_OF_32 = (
    # SwiGLU's 32-blocks, 64 columns, must lie inside a warp: two warps along the columns.
    (32, (32, 2, 2, 4)),
    *_SHAPES[1:],
)


def copy_bytes_for(a_format: str, b_format: str, k: int) -> int:
    """Widest cp.async that rows of both operands keep aligned: 16 or 8."""
    aligned = all(OPERANDS[name].row_bytes(k) % 16 == 0 for name in (a_format, b_format))
    return 16 if aligned else 8


def _shapes(a_format: str) -> tuple[tuple[int | None, tuple[int, int, int, int]], ...]:
    return _SHAPES_OF_32 if OPERANDS[a_format].scale_block == 32 else _SHAPES


def _config(a_format: str, b_format: str, k: int, shape: tuple[int, int, int, int]) -> MatmulConfig:
    block_m, warps_m, warps_n, stages = shape
    copy_bytes = copy_bytes_for(a_format, b_format, k)
    config = MatmulConfig(a_format, b_format, block_m, warps_m, warps_n, 1, copy_bytes)
    # SwiGLU's scale bytes have four words a row behind the stages.
    fitting = (SHARED_BYTES - 16 * block_m) // config.shared_bytes
    return replace(config, stages=min(stages, fitting))


def grouped_matmul_configs(a_format: str, b_format: str, k: int) -> tuple[MatmulConfig, ...]:
    """Every tile shape that is legal for a pair of operands and a K, smallest first."""
    return tuple(_config(a_format, b_format, k, shape) for _, shape in _shapes(a_format))


@functools.lru_cache(maxsize=4096)
def grouped_matmul_config(
    a_format: str,
    b_format: str,
    n: int,
    k: int,
    num_active: int,
    estimated_total_m: int | None,
) -> MatmulConfig:
    """The tile shape for a problem.

    Small experts get small tiles: a tile's padded rows cost as much arithmetic as real ones. The
    average is rounded up, and an unknown total counts as large.

    Args:
        a_format: kind of the rows.
        b_format: kind of the weights.
        n: weight rows of an expert; every shape covers 128 of them.
        k: columns.
        num_active: expert slots.
        estimated_total_m: expected rows of all slots; a hint.
    """
    limits = [limit for limit, _ in _shapes(a_format)]
    configs = grouped_matmul_configs(a_format, b_format, k)
    if estimated_total_m is None:
        rows, chosen = "an unknown number of", len(configs) - 1
    else:
        mean = -(-estimated_total_m // max(num_active, 1))
        rows = str(mean)
        chosen = next(i for i, limit in enumerate(limits) if limit is None or mean <= limit)
    report_choice(
        f"matmul {a_format} x {b_format}, n {n}, k {k}, {num_active} slots, {rows} rows a slot",
        configs[chosen].name,
        # A wider tile than the rows need multiplies padding, a narrower one reads weights again.
        [
            (c.name, f"tiles are too {'low' if i < chosen else 'high'} for {rows} rows")
            for i, c in enumerate(configs)
            if i != chosen
        ],
    )
    return configs[chosen]
