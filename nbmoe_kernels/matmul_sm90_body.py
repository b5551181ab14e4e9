"""What every Hopper matmul does but its epilogue: roles, tables, pipeline.

Threads: the consumers' warpgroups, 64 weight rows each, then the producer's warp; where registers
are handed over it belongs to a whole warpgroup, whose other warps are the finishers.

Synchronisation: that of `matmul_sm90_begin`, then of `matmul_sm90_ring` and `matmul_sm90_tiles`.

The previous kernel: with ``routed_before`` the schedule and the weights are read while it runs, so
it must not be the one that writes expert_start or expert_ids. Without, nothing is touched before it
has ended. Either way a kernel that follows may start once all blocks have seen that end.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.grid_dependency import allow_next_grid, wait_for_previous_grid
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.device.sync import set_max_registers
from nbmoe_kernels.matmul_sm90_begin import make_begin
from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig
from nbmoe_kernels.matmul_sm90_consumer import MakeEpilogue, make_consume
from nbmoe_kernels.matmul_sm90_finisher import MakeTake, make_finish
from nbmoe_kernels.matmul_sm90_producer import make_produce

BODY_PARAMS = (
    "global u8* tokens, global u8* weights, global u32* expert_start, global i32* expert_ids, "
    "global f32* expert_scales, u32 has_expert_scales, u32 num_slots, u32 num_rows, "
    "u32 token_rows, u32 n, u32 k64, u32 n64, u32 routed_before"
)


def make_body(
    config: HopperMatmulConfig, make_epilogue: MakeEpilogue, make_take: MakeTake | None = None
) -> Callable[..., Any]:
    """``body(tokens, weights, expert_start, expert_ids, expert_scales, has_expert_scales,
    num_slots, num_rows, token_rows, n, k64, n64, routed_before, args)``.

    ``args`` is a tuple for the epilogue. With ``make_take`` the epilogue leaves results in shared
    memory, and spare warps take them.
    """
    consumers, block_rows = config.consumers, config.block_rows
    begin = make_begin(config)
    produce, consume = make_produce(config), make_consume(config, make_epilogue)
    hands_over, has_finishers = config.registers is not None, make_take is not None
    assert has_finishers == config.stores_later, "the epilogue and the config fit together"
    finish = produce if make_take is None else make_finish(config, make_take)
    fewer, more = config.registers or (24, 24)
    fewer_registers = set_max_registers(fewer, increase=False)
    more_registers = set_max_registers(more, increase=True)

    @device_function
    def body(
        tokens, weights, expert_start, expert_ids, expert_scales, has_expert_scales, num_slots,
        num_rows, token_rows, n, k64, n64, routed_before, args,
    ):  # fmt: skip
        # Views of the same shared memory.
        smem = cuda.shared.array(0, np.uint8, alignment=1024)
        words = cuda.shared.array(0, np.uint32, alignment=1024)
        bars = cuda.shared.array(0, np.uint64, alignment=1024)
        thread = np.uint32(cuda.threadIdx.x)
        begin(words, bars, expert_start, expert_ids, num_slots, num_rows, routed_before)
        m_tiles = np.uint32(np.uint32(n + np.uint32(block_rows - 1)) // np.uint32(block_rows))
        if thread >= np.uint32(consumers):
            if hands_over:
                fewer_registers()
            if thread < np.uint32(consumers + 32):
                produce(
                    words, smem, bars, tokens, weights, num_slots, m_tiles, n64, k64, token_rows
                )
            elif has_finishers:
                wait_for_previous_grid()
                finish(words, smem, bars, n, args)
        else:
            if hands_over:
                more_registers()
            wait_for_previous_grid()
            allow_next_grid()
            consume(words, smem, bars, n, k64, expert_scales, has_expert_scales, args)

    return body
