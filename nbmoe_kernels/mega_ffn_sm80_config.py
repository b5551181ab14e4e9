"""Which tile shape a portable MegaFFN runs with, and what of its launch follows from it."""

from dataclasses import replace

from nbmoe_kernels.heuristics import copy_bytes_for, grouped_matmul_config
from nbmoe_kernels.matmul_config import MatmulConfig
from nbmoe_kernels.matmul_grouped_swiglu_sm80 import fused_shared_bytes
from nbmoe_kernels.mega_ffn_layout import NEXT_TILE
from nbmoe_kernels.search import row_blocks

_SM_SHARED_BYTES, _RESERVED_BYTES = 100 * 1024, 1024
"""Of an SM on the architectures with the least of it (sm_86, sm_89, sm_120), and what the system
takes of it for every block."""
_SM_REGISTERS, _THREAD_REGISTERS = 65536, 256


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
    """How many segments there are: the row blocks, some of which have no rows."""
    return row_blocks(num_rows, num_slots, config.block_m)


def most_counters(config: MatmulConfig, num_rows: int, num_slots: int) -> int:
    """How many counters a launch has use for."""
    return NEXT_TILE + most_segments(config, num_rows, num_slots)


def mega_ffn_shared_bytes(config: MatmulConfig) -> int:
    """Of a block: the fused matmul's, and two tiles' numbers."""
    return fused_shared_bytes(config) + 8


def blocks_per_sm(config: MatmulConfig) -> int:
    """How many blocks an SM of any architecture holds, however many registers a thread has."""
    by_memory = _SM_SHARED_BYTES // (mega_ffn_shared_bytes(config) + _RESERVED_BYTES)
    return min(by_memory, _SM_REGISTERS // (config.threads * _THREAD_REGISTERS))
