"""The end of a tile of Hopper's FP8 matmul: row scales, bias, rounding, stores.

    block scales    output = bf16(acc (+ bias))
    row scales      output = bf16(acc * a_scale[token] * b_scale[row] (+ bias))

each operation rounded to f32. A masked tile is 0. Scales and bias are asked for before the tile is
multiplied, so that its end waits for nothing: a lane keeps those of its two weight rows and of
every 32nd token, which it hands to the lanes that need them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.column_store import store_tokens_bf16
from nbmoe_kernels.device.convert import f32_of_bf16
from nbmoe_kernels.device.math import add_rn, bits_f32, f32_bits, mul_rn
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.warp import shuffle_from
from nbmoe_kernels.matmul_fp8_sm90_config import UNIT_ROWS
from nbmoe_kernels.matmul_fp8_sm90_scale_types import SCALE_POINTERS

_ONE, _ZERO_BITS = np.float32(1.0), np.uint16(0)
_LANES = 32


@device_function
def weight_row(unit):
    """The first of the lane's two weight rows in the warpgroup's unit."""
    thread = np.uint32(cuda.threadIdx.x)
    warp = np.uint32(np.uint32(thread >> np.uint32(5)) & np.uint32(3))
    pair = np.uint32(np.uint32(thread >> np.uint32(2)) & np.uint32(7))
    first = np.uint32(np.uint32(warp * np.uint32(16)) + np.uint32(pair * np.uint32(2)))
    return np.uint32(np.uint32(unit * np.uint32(UNIT_ROWS)) + first)


@device_function
def first_token():
    """The first of the lane's tokens in a tile."""
    return np.uint32(np.uint32(np.uint32(cuda.threadIdx.x) & np.uint32(3)) * np.uint32(2))


def make_load_rows(has_block_scales: bool, scale_type: str) -> Callable[..., Any]:
    """``load_rows(b_scales, bias, expert, row, n, strides, has_bias)``: the lane's two rows'.

    Returns their scales (f32) and bias (bf16 bits), of ``row`` and of ``row`` + 1.
    """
    value_of = SCALE_POINTERS[scale_type][1]

    @device_function
    def load_rows(b_scales, bias, expert, row, n, strides, has_bias):
        stride_e, stride_n = strides
        first_scale, second_scale = _ONE, _ONE
        first_bias, second_bias = _ZERO_BITS, _ZERO_BITS
        if expert >= np.int32(0) and row < n:
            if not has_block_scales:
                at = np.uint64(expert) * np.uint64(stride_e) + np.uint64(row) * np.uint64(stride_n)
                first_scale = value_of(b_scales[at])
                second_scale = value_of(b_scales[at + np.uint64(stride_n)])
            if has_bias != np.uint32(0):
                at = np.uint64(expert) * np.uint64(n) + np.uint64(row)
                first_bias = bias[at]
                second_bias = bias[at + np.uint64(1)]
        return first_scale, second_scale, first_bias, second_bias

    return load_rows


def make_load_tokens(width: int, has_block_scales: bool) -> Callable[..., Any]:
    """``load_tokens(held, token_scales, token_row, rows, stride)``: row scales of a tile's tokens.

    ``held`` (f32, one for each 32 tokens) gets those of the lane's place among 32.
    """
    rounds = -(-width // _LANES)

    @device_function
    def load_tokens(held, token_scales, token_row, rows, stride):
        lane = np.uint32(np.uint32(cuda.threadIdx.x) & np.uint32(_LANES - 1))
        for i in unroll(range(rounds)):
            held[i] = _ONE
            token = np.uint32(lane + np.uint32(_LANES * i))
            if not has_block_scales and token < rows:
                held[i] = token_scales[np.uint64(np.uint32(token_row + token)) * np.uint64(stride)]

    return load_tokens


def make_finish_tile(width: int, has_block_scales: bool) -> Callable[..., Any]:
    """``finish_tile(acc, held, of_rows, output, expert, output_row, row, rows, n, has_bias)``.

    ``held`` and ``of_rows`` are what ``load_tokens`` and ``load_rows`` found.
    """
    store = store_tokens_bf16(width)

    @device_function
    def scale_rows(acc, held, first_scale, second_scale):
        token = first_token()
        for group in unroll(range(width // 8)):
            for i in unroll(range(2)):
                lane = np.uint32(token + np.uint32(8 * group % _LANES + i))
                scale = bits_f32(shuffle_from(f32_bits(held[8 * group // _LANES]), lane))
                at = 4 * group + i
                acc[at] = mul_rn(mul_rn(acc[at], scale), first_scale)
                acc[at + 2] = mul_rn(mul_rn(acc[at + 2], scale), second_scale)

    @device_function
    def add_bias(acc, first_bias, second_bias):
        first, second = f32_of_bf16(first_bias), f32_of_bf16(second_bias)
        for group in unroll(range(width // 8)):
            for i in unroll(range(2)):
                at = 4 * group + i
                acc[at] = add_rn(acc[at], first)
                acc[at + 2] = add_rn(acc[at + 2], second)

    @device_function
    def finish_tile(acc, held, of_rows, output, expert, output_row, row, rows, n, has_bias):
        first_scale, second_scale, first_bias, second_bias = of_rows
        token = first_token()
        tokens = np.uint32(rows - token) if token < rows and row < n else np.uint32(0)
        if expert >= np.int32(0):
            if not has_block_scales:
                scale_rows(acc, held, first_scale, second_scale)
            if has_bias != np.uint32(0):
                add_bias(acc, first_bias, second_bias)
        pitch = np.uint32(n >> np.uint32(1))
        at = np.uint64(np.uint32(output_row + token)) * np.uint64(pitch)
        at = np.uint64(at + np.uint64(np.uint32(row >> np.uint32(1))))
        store(acc, output, at, pitch, tokens)

    return finish_tile
