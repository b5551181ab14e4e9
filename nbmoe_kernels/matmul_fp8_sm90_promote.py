"""How a 128-block's sums join the accumulators of Hopper's FP8 matmul, on the CUDA cores.

    block scales    acc = fma(sums, a_scale[token] * b_scale, acc)
    row scales      acc = acc + sums

with the products of block scales as `matmul_fp8_sm90_scaler` leaves them. Of tokens 8 j to 8 j + 7
a lane has 8 j + 2 t and + 1, of two weight rows each; t is its place among four.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.math import add_rn, bits_f32, fma_rn
from nbmoe_kernels.device.memory import load_shared_v2
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


def make_load_products(config: Config, width: int) -> Callable[..., Any]:
    """``load_products(words, bars, scales, stage, parity)``: of the lane's tokens."""
    first_product, step = config.products_at // 4, config.max_width
    wait_for_scaler = make_wait_for_scaler(config)

    @device_function
    def load_products(words, bars, scales, stage, parity):
        wait_for_scaler(bars, stage, parity)
        column = np.uint32(np.uint32(cuda.threadIdx.x) & np.uint32(3))
        at = np.uint32(np.uint32(first_product) + np.uint32(stage * np.uint32(step)))
        at = np.uint32(at + np.uint32(np.uint32(2) * column))
        for i in unroll(range(width // 8)):
            even, odd = load_shared_v2(words, np.uint32(at + np.uint32(8 * i)))
            scales[2 * i] = bits_f32(even)
            scales[2 * i + 1] = bits_f32(odd)

    return load_products
