"""How a 128-block's sums join the accumulators of Hopper's FP8 matmul, on the CUDA cores.

    block scales    acc = fma(sums, a_scale[token] * b_scale, acc)
    row scales      acc = acc + sums

with the products of block scales as `matmul_fp8_sm90_scaler` leaves them. Of tokens 8 j to 8 j + 7
a lane has 8 j + 2 t and + 1, of two weight rows each; t is its place among four.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.math import add_rn, bits_f32, fma_rn
from nbmoe_kernels.device.memory import load_shared_pair
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.matmul_fp8_sm90_config import Fp8HopperConfig as Config
from nbmoe_kernels.matmul_fp8_sm90_ring import make_wait_for_scaler


def make_add_block(width: int, has_block_scales: bool) -> Callable[..., Any]:
    """``add_block(acc, sums, scales)`` for a tile of ``width`` tokens."""

    @device_function
    def add_block(acc, sums, scales):
        for group in unroll(range(width // 8)):
            for i in unroll(range(2)):
                at = 4 * group + i
                if has_block_scales:
                    scale = scales[2 * group + i]
                    acc[at] = fma_rn(sums[at], scale, acc[at])
                    acc[at + 2] = fma_rn(sums[at + 2], scale, acc[at + 2])
                else:
                    acc[at] = add_rn(acc[at], sums[at])
                    acc[at + 2] = add_rn(acc[at + 2], sums[at + 2])

    return add_block


@functools.cache
def _make_load_eights(count: int) -> Callable[..., Any]:
    """``load_eights(smem, at, scales)``: a lane's two scales of each of ``count`` eights of tokens.

    ``at`` is the byte of the first; how far the others are is a part of the instructions.
    """
    last = count - 1
    load = load_shared_pair(32 * last)
    load_others = _make_load_eights(last) if last else load

    @device_function
    def load_eights(smem, at, scales):
        if last:
            load_others(smem, at, scales)
        even, odd = load(smem, at)
        scales[2 * last] = bits_f32(even)
        scales[2 * last + 1] = bits_f32(odd)

    return load_eights


def make_load_products(config: Config, width: int) -> Callable[..., Any]:
    """``load_products(smem, bars, scales, stage, parity)``: of the lane's tokens."""
    products_at, step = config.products_at, 4 * config.max_width
    load_eights = _make_load_eights(width // 8)
    wait_for_scaler = make_wait_for_scaler(config)

    @device_function
    def load_products(smem, bars, scales, stage, parity):
        wait_for_scaler(bars, stage, parity)
        column = np.uint32(np.uint32(cuda.threadIdx.x) & np.uint32(3))
        at = np.uint32(np.uint32(products_at) + np.uint32(stage * np.uint32(step)))
        load_eights(smem, np.uint32(at + np.uint32(column << np.uint32(3))), scales)

    return load_products
