"""What the epilogues of the portable matmuls share: a value's factors and its lane's place.

    v = acc * 2^28 (NVFP4 only) * expert_scale * row_scale + bias          f32, one rounding each

An absent factor is 1 and an absent bias -0, which leave every value as it is.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.convert import f32_of_bf16
from nbmoe_kernels.device.math import add_rn, mul_rn
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.matmul_config import MatmulConfig

ONE, ZERO, MINUS_ZERO = np.float32(1.0), np.float32(0.0), np.float32(-0.0)


@device_function
def expert_scale_of(expert_scales, has_expert_scales, expert):
    """The scale of an expert; 0 for a masked one, whose sums are 0."""
    if expert < np.int32(0):
        return ZERO
    if has_expert_scales == np.uint32(0):
        return ONE
    return expert_scales[np.uint64(expert)]


@device_function
def row_scale_of(a_row_scales, has_row_scales, row):
    """The bf16 scale of a row as f32."""
    if has_row_scales == np.uint32(0):
        return ONE
    return f32_of_bf16(a_row_scales[np.uint64(row)])


def make_scaled(config: MatmulConfig) -> Callable[..., Any]:
    """``scaled(acc, expert_scale, row_scale, bias)``, the formula of the module's docstring."""
    exponent = config.a.exponent + config.b.exponent
    decode_scale = np.float32(2.0**-exponent)

    @device_function
    def scaled(acc, expert_scale, row_scale, bias):
        if exponent:
            acc = mul_rn(acc, decode_scale)
        return add_rn(mul_rn(mul_rn(acc, expert_scale), row_scale), bias)

    return scaled


def make_load_bias(config: MatmulConfig) -> Callable[..., Any]:
    """``load_bias(out, bias, has_bias, expert, column, n)`` fills a lane's columns.

    out[2c] and out[2c + 1] get the bias of columns ``column`` + 8c and the next; a masked expert
    has none.
    """
    column_tiles = config.column_tiles

    @device_function
    def load_bias(out, bias, has_bias, expert, column, n):
        for c in unroll(range(column_tiles)):
            for i in unroll(range(2)):
                out[2 * c + i] = MINUS_ZERO
                at = np.uint32(column + np.uint32(8 * c + i))
                if has_bias != np.uint32(0) and expert >= np.int32(0) and at < n:
                    place = np.uint64(expert) * np.uint64(n) + np.uint64(at)
                    out[2 * c + i] = f32_of_bf16(bias[place])

    return load_bias


def make_lane_place(config: MatmulConfig) -> Callable[..., Any]:
    """``lane_place()``: the row and the column in the block of the lane's first fragment value.

    The others lie 8 rows and 8 columns apart.
    """
    warps_n = config.warps_n
    warp_rows, warp_columns = 16 * config.row_tiles, 8 * config.column_tiles

    @device_function
    def lane_place():
        thread = np.uint32(cuda.threadIdx.x)
        lane = np.uint32(thread & np.uint32(31))
        warp = np.uint32(thread >> np.uint32(5))
        row = np.uint32(
            np.uint32(np.uint32(warp // np.uint32(warps_n)) * np.uint32(warp_rows))
            + np.uint32(lane >> np.uint32(2))
        )
        column = np.uint32(
            np.uint32(np.uint32(warp % np.uint32(warps_n)) * np.uint32(warp_columns))
            + np.uint32(np.uint32(lane & np.uint32(3)) * np.uint32(2))
        )
        return row, column

    return lane_place
