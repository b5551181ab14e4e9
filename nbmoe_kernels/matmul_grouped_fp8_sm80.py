"""Grouped matmul of plain FP8 (e4m3) operands with scales of 128-blocks or of rows, for sm_80 up.

block128, with b over the 128-blocks of K in ascending order:

    acc = fma(sum over block b, a_scales[b, m] * b_scales[e, n / 128, b], acc)    from acc = +0
    output[m, n] = acc (+ bias[e, n])

rowwise:

    output[m, n] = (sum over K) * a_scales[m] * b_scales[e, n] (+ bias[e, n])

Sums are hopper-accumulated from +0 by `matmul_tile_sm80`, every operation is rounded to f32 in this
order, and the result once to bf16.

Shapes: output (M, N) bf16; hidden (M, K) u8; weight (E, N, K) u8; expert_start (S + 1,) u32;
expert_ids (S,) i32; bias (E, N) bf16; scales f32 or bf16, both alike. block128: b_scales (E,
ceil(N/128), ceil(K/128)), and 128-block b of row m has a_scales[b * A_SCALE_STRIDE + m]. rowwise:
row m has a_scales[m * A_SCALE_STRIDE], row n of weight e b_scales[e * B_SCALE_STRIDE_E + n *
B_SCALE_STRIDE_N]; a stride of 0 shares one scale. K and N are multiples of 8.

Dense mode, without slots (NUM_ACTIVE = 0): batch y multiplies rows y * M and on by weight y; of
block128's a_scales it has the y-th ceil(K/128) * A_SCALE_STRIDE.

Thread map: as in `matmul_grouped_sm80`. With block128 a stage is a 128-block: its sums are
fragments of their own, so a lane holds two sets, and loads the scales of its rows.

A slot with expert id -1 gets rows of 0, whatever scales and bias hold.

Synchronisation: the mainloop's; nothing after it.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.convert import bf16x2_of_f32, f32_of_bf16
from nbmoe_kernels.device.math import add_rn, fma_rn, mul_rn
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.matmul_config import BLOCK_N, MatmulConfig
from nbmoe_kernels.matmul_epilogue import (
    ONE,
    ZERO,
    make_lane_place,
    make_load_bias,
)
from nbmoe_kernels.matmul_stage_sm80 import make_multiply_stage
from nbmoe_kernels.matmul_tile_sm80 import make_multiply_tile
from nbmoe_kernels.search import row_blocks


@device_function
def _f32_of_f32(scale):
    return scale


_POINTERS = {"f32": ("f32", _f32_of_f32), "bf16": ("u16", f32_of_bf16)}
"""By scale type: element of the scales' pointers, and what makes an f32 of one."""


def make_add_scaled_stage(config: MatmulConfig, scale_type: str) -> Callable[..., Any]:
    """The ``add_stage`` of `make_multiply_tile` that scales the sums of each 128-block."""
    row_tiles, column_tiles = config.row_tiles, config.column_tiles
    fragments, halves = config.fragments, 2 * config.row_tiles
    value_of = _POINTERS[scale_type][1]
    multiply_stage = make_multiply_stage(config)
    lane_place = make_lane_place(config)
    assert config.stage_blocks == 2, "a stage is a 128-block"

    @device_function
    def add_scaled_stage(
        acc,
        smem,
        stage_at,
        stage,
        a_scales,
        b_scales,
        scale_stride,
        batch,
        batch_row,
        rows,
        expert,
        first_column,
        n,
        k,
    ):
        """acc = fma(the stage's sums, their scales, acc)."""
        sums = cuda.local.array((fragments, 4), np.float32)
        for i in unroll(range(fragments)):
            for j in unroll(range(4)):
                sums[i, j] = ZERO
        multiply_stage(
            sums, smem, stage_at, np.uint32(stage * np.uint32(2)), np.uint32(k >> np.uint32(4))
        )
        # Scales come after the products, which leave no registers for them.
        k_blocks = np.uint64(np.uint32(k + np.uint32(127)) >> np.uint32(7))
        n_blocks = np.uint64(np.uint32(n + np.uint32(127)) >> np.uint32(7))
        weight_block = np.uint64(expert) * n_blocks + np.uint64(first_column >> np.uint32(7))
        b_scale = value_of(b_scales[weight_block * k_blocks + np.uint64(stage)])
        scale_row = np.uint64(batch) * k_blocks + np.uint64(stage)
        lane_row, _ = lane_place()
        scales = cuda.local.array(halves, np.float32)
        for half in unroll(range(halves)):
            row = np.uint32(lane_row + np.uint32(8 * half))
            scales[half] = ZERO
            if row < rows:
                at = scale_row * np.uint64(scale_stride) + np.uint64(np.uint32(batch_row + row))
                scales[half] = mul_rn(value_of(a_scales[at]), b_scale)
        for m in unroll(range(row_tiles)):
            for c in unroll(range(column_tiles)):
                i = m * column_tiles + c
                for j in unroll(range(4)):
                    acc[i, j] = fma_rn(sums[i, j], scales[2 * m + j // 2], acc[i, j])

    return add_scaled_stage


@functools.cache
def make_matmul_grouped_fp8(config: MatmulConfig, scaling: str, scale_type: str) -> Kernel:
    """The kernel for a tile shape, "block128" or "rowwise" scaling, and "f32" or "bf16" scales."""
    row_tiles, column_tiles = config.row_tiles, config.column_tiles
    fragments, lane_columns = config.fragments, 2 * config.column_tiles
    pointer, value_of = _POINTERS[scale_type]
    is_rowwise = {"rowwise": True, "block128": False}[scaling]
    add_stage = None if is_rowwise else make_add_scaled_stage(config, scale_type)
    multiply_tile = make_multiply_tile(config, add_stage)
    load_bias, lane_place = make_load_bias(config), make_lane_place(config)

    @device_function
    def load_column_scales(out, b_scales, stride_e, stride_n, expert, column, n):
        """The b_scales of a lane's columns; 1 for a masked expert and past the last."""
        for c in unroll(range(column_tiles)):
            for i in unroll(range(2)):
                out[2 * c + i] = ONE
                at = np.uint32(column + np.uint32(8 * c + i))
                if is_rowwise and expert >= np.int32(0) and at < n:
                    place = np.uint64(expert) * np.uint64(stride_e)
                    place = place + np.uint64(at) * np.uint64(stride_n)
                    out[2 * c + i] = value_of(b_scales[place])

    @device_function
    def scaled(acc, row_scale, column_scale, bias):
        if is_rowwise:
            acc = mul_rn(mul_rn(acc, row_scale), column_scale)
        return add_rn(acc, bias)

    @kernel(
        f"global u32* output, global u8* hidden, global u8* weight, global {pointer}* a_scales, "
        f"global {pointer}* b_scales, global u32* expert_start, global i32* expert_ids, "
        "global u16* bias, u32 num_active, u32 num_rows, u32 n, u32 k, u32 a_scale_stride, "
        "u32 b_scale_stride_e, u32 b_scale_stride_n, u32 has_bias",
        threads=config.threads,
        shared_bytes=config.shared_bytes,
        name=f"matmul_grouped_{config.name}_{scaling}_{scale_type}",
    )
    def matmul_grouped_fp8(
        output,
        hidden,
        weight,
        a_scales,
        b_scales,
        expert_start,
        expert_ids,
        bias,
        num_active,
        num_rows,
        n,
        k,
        a_scale_stride,
        b_scale_stride_e,
        b_scale_stride_n,
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
            a_scale_stride,
            expert_start,
            expert_start,
            expert_ids,
            num_active,
            num_rows,
            n,
            k,
        )
        if rows > np.uint32(0):
            lane_row, lane_column = lane_place()
            column = np.uint32(first_column + lane_column)
            biases = cuda.local.array(lane_columns, np.float32)
            load_bias(biases, bias, has_bias, expert, column, n)
            column_scales = cuda.local.array(lane_columns, np.float32)
            load_column_scales(
                column_scales, b_scales, b_scale_stride_e, b_scale_stride_n, expert, column, n
            )
            for half in unroll(range(2 * row_tiles)):
                row_in_block = np.uint32(lane_row + np.uint32(8 * half))
                if row_in_block < rows:
                    row = np.uint32(first_row + row_in_block)
                    row_scale = ONE
                    if is_rowwise and expert >= np.int32(0):
                        row_scale = value_of(a_scales[np.uint64(row) * np.uint64(a_scale_stride)])
                    row_at = np.uint64(row) * np.uint64(n >> np.uint32(1))
                    for c in unroll(range(column_tiles)):
                        at_column = np.uint32(column + np.uint32(8 * c))
                        if at_column < n:
                            i = (half // 2) * column_tiles + c
                            low = acc[i, 2 * (half % 2)]
                            high = acc[i, 2 * (half % 2) + 1]
                            low = scaled(low, row_scale, column_scales[2 * c], biases[2 * c])
                            high = scaled(
                                high, row_scale, column_scales[2 * c + 1], biases[2 * c + 1]
                            )
                            at = row_at + np.uint64(at_column >> np.uint32(1))
                            output[at] = bf16x2_of_f32(high, low)

    return matmul_grouped_fp8


def launch_matmul_grouped_fp8(
    executor: Executor,
    output: Any,
    hidden: Any,
    weight: Any,
    a_scales: Any,
    b_scales: Any,
    expert_start: Any,
    expert_ids: Any,
    bias: Any,
    *,
    scaling: str,
    scale_type: str,
    num_active: int,
    num_rows: int,
    n: int,
    k: int,
    a_scale_stride: int,
    b_scale_strides: tuple[int, int] = (0, 0),
    has_bias: bool,
    config: MatmulConfig,
    num_batches: int = 1,
    stream: Any = None,
) -> None:
    """Launch on flat arrays.

    Args:
        scaling: "block128" or "rowwise".
        scale_type: "f32" or "bf16", of both kinds of scales.
        num_active: expert slots. 0 means none: batch b of ``num_batches`` multiplies rows
            b * num_rows and on by weight b, and the routing arrays are not read.
        num_rows: M, or the rows of a batch.
        a_scale_stride: block128: from a row's scale to that of its next 128-block; rowwise: from a
            row's scale to the next row's [elements].
        b_scale_strides: rowwise only: from a weight's scales to the next weight's, and from a
            weight row's to the next one's [elements].
        config: see `nbmoe_kernels.heuristics.grouped_matmul_config`.
    """
    blocks = row_blocks(num_rows, num_active, config.block_m)
    make_matmul_grouped_fp8(config, scaling, scale_type).launch(
        executor,
        (-(-n // BLOCK_N) * blocks, num_batches, 1),
        output,
        hidden,
        weight,
        a_scales,
        b_scales,
        expert_start,
        expert_ids,
        bias,
        num_active,
        num_rows,
        n,
        k,
        a_scale_stride,
        *b_scale_strides,
        has_bias,
        stream=stream,
    )
