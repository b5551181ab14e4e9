"""Which tile shape a portable MegaFFN runs with, and what of its launch follows from it."""

from dataclasses import replace

from nbmoe_kernels.heuristics import copy_bytes_for, grouped_matmul_config
from nbmoe_kernels.matmul_config import MatmulConfig
from nbmoe_kernels.search import row_blocks


def mega_ffn_sm80_config(
    a_format: str,
    b_format: str,
    moe_dim: int,
    k: int,
    num_active: int,
    estimated_total_m: int | None,
) -> MatmulConfig:
    """The gate/up matmul's tile shape, with copies that rows of down allow, too."""
    config = grouped_matmul_config(
        a_format, b_format, 2 * moe_dim, k, num_active, estimated_total_m
    )
    widest = copy_bytes_for(a_format, b_format, moe_dim)
    return replace(config, copy_bytes=min(config.copy_bytes, widest))


def most_segments(config: MatmulConfig, num_rows: int, num_slots: int) -> int:
    """How many counters a launch needs: one a row block, some of which have no rows."""
    return row_blocks(num_rows, num_slots, config.block_m)
