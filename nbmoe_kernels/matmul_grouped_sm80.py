"""Grouped NVFP4 matmul for sm_80 and up: each slot's rows times its expert's weights.

    output[m, n] = bf16( acc * 2^28 * expert_scales[expert] (* a_row_scales[m]) )

where acc is the exact-operand, hopper-accumulated sum over K of `matmul_tile_sm80`, and every
product is rounded to f32 in this order.

Shapes: output (M, N) bf16; hidden (M, K/2) u8; weight (E, N, K/2) u8; a_scales (tiles, ceil(K/64),
32, 4, 4) u8; b_scales (E, ceil(N/128), ceil(K/64), 32, 4, 4) u8; expert_start (S + 1,) u32;
a_scale_offsets (S,) u32; expert_ids (S,) i32; expert_scales (E,) f32; a_row_scales (M,) bf16. K is
a multiple of 16, N of 8.

Thread map: a block handles BLOCK_M rows of one slot and 128 columns (`make_multiply_tile`). Lane
(g, t) of a warp stores columns 2t, 2t + 1 of rows g and g + 8 of each fragment as one 4-byte word.

A slot with expert id -1 has products of 0 and uses no row scale, so its rows become 0 whatever the
scales hold.

Synchronisation: the mainloop's; nothing after it.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.convert import bf16x2_of_f32
from nbmoe_kernels.device.math import bits_f32, mul_rn
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.matmul_tile_sm80 import (
    BLOCK_N,
    PRODUCT_SCALE,
    MatmulConfig,
    make_multiply_tile,
)

_ONE, _ZERO = np.float32(1.0), np.float32(0.0)


@device_function
def row_scale_of(a_row_scales, has_row_scales, row):
    """The bf16 scale of a row as f32; 1 without row scales, which leaves every value as it is."""
    if has_row_scales == np.uint32(0):
        return _ONE
    bits = np.uint32(a_row_scales[np.uint64(row)])
    return bits_f32(np.uint32(bits << np.uint32(16)))


@device_function
def scaled(acc, expert_scale, row_scale):
    """The product in f32: decode scale, expert scale, row scale, one rounding each."""
    return mul_rn(mul_rn(mul_rn(acc, PRODUCT_SCALE), expert_scale), row_scale)


@functools.cache
def make_matmul_grouped(config: MatmulConfig) -> Kernel:
    """The kernel for a tile shape."""
    row_tiles, column_tiles, warps_n = config.row_tiles, config.column_tiles, config.warps_n
    fragments = row_tiles * column_tiles
    multiply_tile = make_multiply_tile(config)

    @kernel(
        "global u32* output, global u8* hidden, global u8* weight, global u8* a_scales, "
        "global u8* b_scales, global u32* expert_start, global u32* a_scale_offsets, "
        "global i32* expert_ids, global f32* expert_scales, global u16* a_row_scales, "
        "u32 num_active, u32 n, u32 k, u32 has_row_scales",
        threads=config.threads,
        shared_bytes=config.shared_bytes,
        name=f"matmul_grouped_nvfp4_sm80_{config.name}",
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
        num_active,
        n,
        k,
        has_row_scales,
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
            expert_start,
            a_scale_offsets,
            expert_ids,
            num_active,
            n,
            k,
        )
        if rows > np.uint32(0):
            expert_scale = _ZERO
            if expert >= np.int32(0):
                expert_scale = expert_scales[np.uint64(expert)]
            else:
                has_row_scales = np.uint32(0)
            lane = np.uint32(np.uint32(cuda.threadIdx.x) & np.uint32(31))
            warp = np.uint32(np.uint32(cuda.threadIdx.x) >> np.uint32(5))
            g = np.uint32(lane >> np.uint32(2))
            t = np.uint32(lane & np.uint32(3))
            warp_row = np.uint32(np.uint32(warp // np.uint32(warps_n)) * np.uint32(16 * row_tiles))
            warp_column = np.uint32(
                np.uint32(warp % np.uint32(warps_n)) * np.uint32(8 * column_tiles)
            )
            column = np.uint32(np.uint32(first_column + warp_column) + np.uint32(np.uint32(2) * t))
            for half in unroll(range(2 * row_tiles)):
                row = np.uint32(np.uint32(warp_row + np.uint32(8 * half)) + g)
                if row < rows:
                    row_scale = row_scale_of(
                        a_row_scales, has_row_scales, np.uint32(first_row + row)
                    )
                    row_at = np.uint64(np.uint32(first_row + row)) * np.uint64(n >> np.uint32(1))
                    for c in unroll(range(column_tiles)):
                        at_column = np.uint32(column + np.uint32(8 * c))
                        if at_column < n:
                            i = (half // 2) * column_tiles + c
                            low = acc[i, 2 * (half % 2)]
                            high = acc[i, 2 * (half % 2) + 1]
                            output[row_at + np.uint64(at_column >> np.uint32(1))] = bf16x2_of_f32(
                                scaled(high, expert_scale, row_scale),
                                scaled(low, expert_scale, row_scale),
                            )

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
    *,
    num_active: int,
    num_tiles: int,
    n: int,
    k: int,
    has_row_scales: bool,
    config: MatmulConfig,
    stream: Any = None,
) -> None:
    """Launch on flat arrays; ``num_tiles`` is the first dimension of ``a_scales``.

    Without ``has_row_scales`` the array ``a_row_scales`` is not read.
    """
    make_matmul_grouped(config).launch(
        executor,
        (-(-n // BLOCK_N) * num_tiles * (128 // config.block_m), 1, 1),
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
        num_active,
        n,
        k,
        has_row_scales,
        stream=stream,
    )
