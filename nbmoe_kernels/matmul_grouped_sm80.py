"""Grouped matmul for sm_80 and up: each slot's rows times its expert's weights.

    output[m, n] = acc (* 2^28 for NVFP4) (* expert_scales[e]) (* a_row_scales[m]) (+ bias[e, n])

where acc is the hopper-accumulated sum over K of `matmul_tile_sm80`, every operation is rounded to
f32 in this order, and the result once to bf16 if that is the output's type.

Shapes: output (M, N) bf16 or f32; hidden (M, K) and weight (E, N, K) in the packed codes of their
kinds (`matmul_operands`); a_scales (tiles, ceil(K/X), 32, 4, 4) u8 and b_scales (E, ceil(N/128),
ceil(K/X), 32, 4, 4) u8 with X the elements of four scale bytes; expert_start (S + 1,) u32;
a_scale_offsets (S,) u32; expert_ids (S,) i32; expert_scales (E,) f32; a_row_scales (M,) bf16; bias
(E, N) bf16. K is a multiple of the scale block, of 8 for bf16; N is a multiple of 8 for a bf16
output. bf16 operands have no scales, and bf16 rows no tile offsets.

Thread map: a block handles BLOCK_M rows of one slot and 128 columns (`make_multiply_tile`). Lane
(g, t) of a warp stores columns 2t, 2t + 1 of rows g and g + 8 of each fragment: a bf16 pair as one
word, f32 values one by one.

A slot with expert id -1 has products of 0 and uses no row scale and no bias, so its rows become 0
whatever these hold.

Synchronisation: the mainloop's; nothing after it.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.convert import bf16x2_of_f32
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.matmul_config import BLOCK_N, MatmulConfig
from nbmoe_kernels.matmul_epilogue import (
    expert_scale_of,
    make_lane_place,
    make_load_bias,
    make_scaled,
    row_scale_of,
)
from nbmoe_kernels.matmul_tile_sm80 import make_multiply_tile
from nbmoe_kernels.search import row_blocks

OUTPUT_TYPES = {"bf16": "u32", "f32": "f32"}
"""Element of the output's pointer."""


@device_function
def store_bf16_pair(output, row, column, n, low, high):
    """Columns ``column`` and the next, n even."""
    at = np.uint64(row) * np.uint64(n >> np.uint32(1)) + np.uint64(column >> np.uint32(1))
    output[at] = bf16x2_of_f32(high, low)


@device_function
def store_f32_pair(output, row, column, n, low, high):
    """Columns ``column`` and, if there is one, the next."""
    at = np.uint64(row) * np.uint64(n) + np.uint64(column)
    output[at] = low
    if np.uint32(column + np.uint32(1)) < n:
        output[at + np.uint64(1)] = high


STORES: dict[str, Callable[..., Any]] = {"bf16": store_bf16_pair, "f32": store_f32_pair}


def make_store_tile(config: MatmulConfig, out_type: str = "bf16") -> Callable[..., Any]:
    """``store_tile(acc, output, expert, first_row, rows, first_column, n, factors)``.

    ``factors`` are (expert_scales, a_row_scales, bias, has_expert_scales, has_row_scales,
    has_bias).
    """
    row_tiles, column_tiles = config.row_tiles, config.column_tiles
    lane_columns = 2 * config.column_tiles
    scaled, load_bias = make_scaled(config), make_load_bias(config)
    lane_place = make_lane_place(config)
    store_pair = STORES[out_type]

    @device_function
    def store_tile(acc, output, expert, first_row, rows, first_column, n, factors):
        expert_scales, a_row_scales, bias, has_expert_scales, has_row_scales, has_bias = factors
        if rows > np.uint32(0):
            if expert < np.int32(0):
                has_row_scales = np.uint32(0)
            expert_scale = expert_scale_of(expert_scales, has_expert_scales, expert)
            lane_row, lane_column = lane_place()
            column = np.uint32(first_column + lane_column)
            biases = cuda.local.array(lane_columns, np.float32)
            load_bias(biases, bias, has_bias, expert, column, n)
            for half in unroll(range(2 * row_tiles)):
                row_in_block = np.uint32(lane_row + np.uint32(8 * half))
                if row_in_block < rows:
                    row = np.uint32(first_row + row_in_block)
                    row_scale = row_scale_of(a_row_scales, has_row_scales, row)
                    for c in unroll(range(column_tiles)):
                        at_column = np.uint32(column + np.uint32(8 * c))
                        if at_column < n:
                            i = (half // 2) * column_tiles + c
                            low = acc[i, 2 * (half % 2)]
                            high = acc[i, 2 * (half % 2) + 1]
                            store_pair(
                                output,
                                row,
                                at_column,
                                n,
                                scaled(low, expert_scale, row_scale, biases[2 * c]),
                                scaled(high, expert_scale, row_scale, biases[2 * c + 1]),
                            )

    return store_tile


@functools.cache
def make_matmul_grouped(config: MatmulConfig, out_type: str = "bf16") -> Kernel:
    """The kernel for a pair of operands and a tile shape, with an output of bf16 or f32."""
    fragments = config.fragments
    multiply_tile, store_tile = make_multiply_tile(config), make_store_tile(config, out_type)

    @kernel(
        f"global {OUTPUT_TYPES[out_type]}* output, global u8* hidden, global u8* weight, "
        "global u8* a_scales, global u8* b_scales, global u32* expert_start, "
        "global u32* a_scale_offsets, global i32* expert_ids, global f32* expert_scales, "
        "global u16* a_row_scales, global u16* bias, u32 num_active, u32 num_rows, u32 n, u32 k, "
        "u32 has_row_scales, u32 has_expert_scales, u32 has_bias",
        threads=config.threads,
        shared_bytes=config.shared_bytes,
        name=f"matmul_grouped_{config.name}" + ("" if out_type == "bf16" else f"_{out_type}"),
    )
    def matmul_grouped(
        output,
        hidden,
        weight,
        a_scales,
        b_scales,
        expert_start,
        a_scale_offsets,
        expert_ids,
        expert_scales,
        a_row_scales,
        bias,
        num_active,
        num_rows,
        n,
        k,
        has_row_scales,
        has_expert_scales,
        has_bias,
    ):
        smem = cuda.shared.array(0, np.uint32, alignment=16)
        acc = cuda.local.array((fragments, 4), np.float32)
        _, expert, _, _, first_row, rows, first_column = multiply_tile(
            acc,
            smem,
            hidden,
            weight,
            a_scales,
            b_scales,
            np.uint32(0),
            expert_start,
            a_scale_offsets,
            expert_ids,
            num_active,
            num_rows,
            n,
            k,
        )
        factors = (
            expert_scales, a_row_scales, bias, has_expert_scales, has_row_scales, has_bias,
        )  # fmt: skip
        store_tile(acc, output, expert, first_row, rows, first_column, n, factors)

    return matmul_grouped


def launch_matmul_grouped(
    executor: Executor,
    output: Any,
    hidden: Any,
    weight: Any,
    a_scales: Any,
    b_scales: Any,
    expert_start: Any,
    a_scale_offsets: Any,
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
    config: MatmulConfig,
    out_type: str = "bf16",
    num_batches: int = 1,
    stream: Any = None,
) -> None:
    """Launch on flat arrays.

    Arrays whose ``has_`` flag is off are not read, nor are scales and offsets of bf16 operands.

    Args:
        num_active: expert slots. 0, for bf16 rows only, means none: batch b of ``num_batches``
            multiplies rows b * num_rows and on by weight b, without reading the routing arrays.
        num_rows: M, or the rows of a batch.
        config: see `nbmoe_kernels.heuristics.grouped_matmul_config`.
        out_type: "bf16" or "f32".
    """
    blocks = row_blocks(num_rows, num_active, config.block_m)
    make_matmul_grouped(config, out_type).launch(
        executor,
        (-(-n // BLOCK_N) * blocks, num_batches, 1),
        output,
        hidden,
        weight,
        a_scales,
        b_scales,
        expert_start,
        a_scale_offsets,
        expert_ids,
        expert_scales,
        a_row_scales,
        bias,
        num_active,
        num_rows,
        n,
        k,
        has_row_scales,
        has_expert_scales,
        has_bias,
        stream=stream,
    )
