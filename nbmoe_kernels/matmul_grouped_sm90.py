"""Hopper matmul of groups: each slot's tokens times its expert's prepared weights.

    out[row, n] = round(sum_k tokens[row, k] * weights[expert, n, k] * scales + bias)

tokens    prepared (`nbmoe_kernels.prepared_tokens`), slot s has rows expert_start[s] up to
          expert_start[s + 1]
weights   u8 [E][N64][K64] units, prepared (`nbmoe_kernels.prepared_weights`)
out       bf16 (M, N) as u32 words of two columns; the rows of expert id -1 are 0, and rows that no
          slot has are not written
scales    f32 by expert id, bf16 by row; bias bf16 (E, N)

Weights are wgmma's M operand, decoded into registers; tokens are its N operand, so that a tile of
few tokens wastes little. Blocks are persistent and take tiles by `matmul_sm90_schedule`.

Roles, pipeline and synchronisation are those of `matmul_sm90_body`; each thread stores its own sums
(`matmul_sm90_epilogue`).
"""

import functools
from typing import Any

from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.matmul_sm90_body import BODY_PARAMS, make_body
from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig
from nbmoe_kernels.matmul_sm90_epilogue import make_store_tile
from nbmoe_kernels.prepared_tokens import token_rows
from nbmoe_kernels.prepared_weights import k64_count, n64_count


@functools.cache
def make_matmul_grouped_sm90(config: HopperMatmulConfig) -> Kernel:
    """The kernel for a pair of operands and a tile shape."""
    body = make_body(config, make_store_tile)

    @kernel(
        f"global u32* out, global u16* a_row_scales, global u16* bias, {BODY_PARAMS}, "
        "u32 has_row_scales, u32 has_bias",
        threads=config.threads,
        shared_bytes=config.shared_bytes,
        min_blocks=1 if config.registers else config.blocks_per_sm,
        name=f"matmul_grouped_{config.name}",
        min_cc=(9, 0),
        overlaps_previous=True,
    )
    def matmul_grouped_sm90(
        out,
        a_row_scales,
        bias,
        tokens,
        weights,
        expert_start,
        expert_ids,
        expert_scales,
        has_expert_scales,
        num_slots,
        num_rows,
        token_rows,
        n,
        k64,
        n64,
        routed_before,
        has_row_scales,
        has_bias,
    ):
        body(
            tokens, weights, expert_start, expert_ids, expert_scales, has_expert_scales, num_slots,
            num_rows, token_rows, n, k64, n64, routed_before,
            (out, a_row_scales, bias, has_row_scales, has_bias),
        )  # fmt: skip

    return matmul_grouped_sm90


def grid_of(executor: Executor, config: HopperMatmulConfig, rows: int, slots: int, n: int) -> int:
    """Persistent blocks: as many as fit on the GPU, and no more than there can be tiles."""
    if rows == 0:
        return 0
    segments = rows // config.max_width + max(1, min(slots, rows))
    tiles = segments * -(-n // config.block_rows)
    return min(tiles, config.blocks_per_sm * executor.multiprocessors)


def launch_matmul_grouped_sm90(
    executor: Executor,
    output: Any,
    tokens: Any,
    weights: Any,
    expert_start: Any,
    expert_ids: Any,
    expert_scales: Any,
    a_row_scales: Any,
    bias: Any,
    *,
    num_active: int,
    num_rows: int,
    n: int,
    k: int,
    has_row_scales: bool,
    has_expert_scales: bool,
    has_bias: bool,
    config: HopperMatmulConfig,
    routed_before: bool = False,
    stream: Any = None,
) -> None:
    """Launch on flat arrays; ``num_active`` = 0 multiplies all rows by expert 0.

    Arrays whose ``has_`` flag is off are not read.

    Args:
        num_active: slots, at most ``config.max_slots``.
        num_rows: M, an upper bound of the slots' rows.
        n: weight rows of an expert, even.
        k: columns, as the caller has them: operands are padded to 64.
        routed_before: whether expert_start and expert_ids were complete before the previous kernel
            of the stream began, so that weights may be asked for while it runs.
    """
    assert num_active <= config.max_slots, "the table has no place for so many slots"
    make_matmul_grouped_sm90(config).launch(
        executor,
        (grid_of(executor, config, num_rows, num_active, n), 1, 1),
        output,
        a_row_scales,
        bias,
        tokens,
        weights,
        expert_start,
        expert_ids,
        expert_scales,
        has_expert_scales,
        num_active,
        num_rows,
        token_rows(num_rows, max(num_active, 1)),
        n,
        k64_count(k),
        n64_count(n),
        routed_before,
        has_row_scales,
        has_bias,
        stream=stream,
    )
