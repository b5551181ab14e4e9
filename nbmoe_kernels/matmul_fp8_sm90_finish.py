"""The end of a tile of Hopper's FP8 matmul: row scales, bias, rounding, stores.

    block scales    output = bf16(acc (+ bias))
    row scales      output = bf16(acc * a_scale[token] * b_scale[row] (+ bias))

each operation rounded to f32. A masked tile is 0.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.column_store import store_tokens_bf16
from nbmoe_kernels.device.convert import f32_of_bf16
from nbmoe_kernels.device.math import add_rn, mul_rn
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.matmul_fp8_sm90_config import UNIT_ROWS
from nbmoe_kernels.matmul_fp8_sm90_tile import ONE, SCALE_POINTERS


def make_finish_tile(width: int, has_block_scales: bool, scale_type: str) -> Callable[..., Any]:
    """``finish_tile(acc, output, token_scales, b_scales, bias, ...)`` for a tile of ``width``."""
    value_of = SCALE_POINTERS[scale_type][1]
    store = store_tokens_bf16(width)

    @device_function
    def scale_rows(
        acc, token_scales, b_scales, token_row, tokens, expert, row, n, a_stride, stride_e, stride_n
    ):
        first_scale, second_scale = ONE, ONE
        if row < n:
            at = np.uint64(expert) * np.uint64(stride_e) + np.uint64(row) * np.uint64(stride_n)
            first_scale = value_of(b_scales[at])
            second_scale = value_of(b_scales[at + np.uint64(stride_n)])
        for group in unroll(range(width // 8)):
            for i in unroll(range(2)):
                token_scale = ONE
                if np.uint32(8 * group + i) < tokens:
                    token = np.uint32(token_row + np.uint32(8 * group + i))
                    token_scale = token_scales[np.uint64(token) * np.uint64(a_stride)]
                at = 4 * group + i
                acc[at] = mul_rn(mul_rn(acc[at], token_scale), first_scale)
                acc[at + 2] = mul_rn(mul_rn(acc[at + 2], token_scale), second_scale)

    @device_function
    def add_bias(acc, bias, expert, row, n):
        if row < n:
            at = np.uint64(expert) * np.uint64(n) + np.uint64(row)
            first_bias = f32_of_bf16(bias[at])
            second_bias = f32_of_bf16(bias[at + np.uint64(1)])
            for group in unroll(range(width // 8)):
                for i in unroll(range(2)):
                    at_acc = 4 * group + i
                    acc[at_acc] = add_rn(acc[at_acc], first_bias)
                    acc[at_acc + 2] = add_rn(acc[at_acc + 2], second_bias)

    @device_function
    def finish_tile(
        acc,
        output,
        token_scales,
        b_scales,
        bias,
        unit,
        expert,
        output_row,
        token_row,
        rows,
        n,
        a_stride,
        stride_e,
        stride_n,
        has_bias,
    ):
        thread = np.uint32(cuda.threadIdx.x)
        warp = np.uint32(np.uint32(thread >> np.uint32(5)) & np.uint32(3))
        pair = np.uint32(np.uint32(thread >> np.uint32(2)) & np.uint32(7))
        first_token = np.uint32(np.uint32(thread & np.uint32(3)) * np.uint32(2))
        row = np.uint32(
            np.uint32(unit * np.uint32(UNIT_ROWS))
            + np.uint32(np.uint32(warp * np.uint32(16)) + np.uint32(pair * np.uint32(2)))
        )
        tokens = np.uint32(rows - first_token) if first_token < rows else np.uint32(0)
        if row >= n:
            tokens = np.uint32(0)
        if expert >= np.int32(0):
            if not has_block_scales:
                scale_rows(
                    acc,
                    token_scales,
                    b_scales,
                    np.uint32(token_row + first_token),
                    tokens,
                    expert,
                    row,
                    n,
                    a_stride,
                    stride_e,
                    stride_n,
                )
            if has_bias != np.uint32(0):
                add_bias(acc, bias, expert, row, n)
        pitch = np.uint32(n >> np.uint32(1))
        at = np.uint64(np.uint32(output_row + first_token)) * np.uint64(pitch)
        at = np.uint64(at + np.uint64(np.uint32(row >> np.uint32(1))))
        store(acc, output, at, pitch, tokens)

    return finish_tile
