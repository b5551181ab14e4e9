"""The scaler of Hopper's FP8 matmul: a warp that multiplies the scales of each stage.

All threads of a tile scale a token's sums by the same number, its scale times the weights': one
multiplication here instead of one in each thread, and a load from global memory that no product
waits for, since the warp looks up a tile's scales before its operands are there.

    products[stage][token] = a_scales[stage][token] * b_scales[expert, n / 128, block]

Thread map: lane l multiplies tokens l, l + 32, ... of the widest tile and holds the weights' scale
of block 32 i + l.

Synchronisation: waits for `full` of a stage, then arrives once at `scaled`, with the products in
place, and once at `empty`: it has read what the copies brought.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.grid_dependency import wait_for_previous_grid
from nbmoe_kernels.device.math import bits_f32, f32_bits, mul_rn
from nbmoe_kernels.device.mbarrier import mbarrier_wait
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.warp import shuffle_from
from nbmoe_kernels.matmul_fp8_sm90_config import Fp8HopperConfig as Config
from nbmoe_kernels.matmul_fp8_sm90_ring import make_next_stage
from nbmoe_kernels.matmul_fp8_sm90_scale_types import SCALE_POINTERS
from nbmoe_kernels.matmul_sm90_schedule import make_find_tile
from nbmoe_kernels.warp_arrival import arrive_for_warp

_LANES = 32


def make_multiply_scales(config: Config, scale_type: str) -> Callable[..., Any]:
    """``multiply_scales(words, bars, b_scales, num_active, n_units, k_blocks)``, by a warp."""
    value_of = SCALE_POINTERS[scale_type][1]
    warpgroups, stages, width = config.warpgroups, config.stages, config.max_width
    first_scale, first_product = config.scales_at // 4, config.products_at // 4
    first_full = config.barriers_at // 8
    first_empty, first_scaled = first_full + stages, first_full + 2 * stages
    rounds = -(-width // _LANES)
    num_segments, find_tile = make_find_tile(config.max_slots, config.table_at // 4)
    next_stage = make_next_stage(config)

    @device_function
    def multiply_stage(words, stage, b_scale):
        lane = np.uint32(np.uint32(cuda.threadIdx.x) & np.uint32(_LANES - 1))
        first = np.uint32(stage * np.uint32(width))
        for i in unroll(range(rounds)):
            token = np.uint32(lane + np.uint32(_LANES * i))
            if token < np.uint32(width):
                at = np.uint32(first + token)
                scale = bits_f32(words[np.uint32(np.uint32(first_scale) + at)])
                words[np.uint32(np.uint32(first_product) + at)] = f32_bits(mul_rn(scale, b_scale))

    @device_function
    def multiply_scales(words, bars, b_scales, num_active, n_units, k_blocks):
        lane = np.uint32(np.uint32(cuda.threadIdx.x) & np.uint32(_LANES - 1))
        row_blocks = np.uint32(
            np.uint32(n_units + np.uint32(warpgroups - 1)) // np.uint32(warpgroups)
        )
        num_tiles = np.uint32(num_segments(words, num_active) * row_blocks)
        stage, parity = np.uint32(0), np.uint32(0)
        # Only the first stages' weights may be read while the previous kernel runs.
        wait_for_previous_grid()
        tile = np.uint32(cuda.blockIdx.x)
        while tile < num_tiles:
            segment = np.uint32(tile // row_blocks)
            first_unit = np.uint32(
                np.uint32(tile - np.uint32(segment * row_blocks)) * np.uint32(warpgroups)
            )
            expert, _, _, _ = find_tile(words, segment, num_active)
            # A masked tile has one stage with a note alone.
            blocks = k_blocks if expert >= np.int32(0) else np.uint32(1)
            weight_block = np.uint64(max(expert, np.int32(0))) * np.uint64(n_units >> np.uint32(1))
            weight_block = np.uint64(weight_block + np.uint64(first_unit >> np.uint32(1)))
            scales_from = np.uint64(weight_block * np.uint64(k_blocks))
            held = np.float32(0.0)
            block = np.uint32(0)
            while block < blocks:
                if np.uint32(block & np.uint32(_LANES - 1)) == np.uint32(0):
                    mine = np.uint32(block + lane)
                    if mine < k_blocks:
                        held = value_of(b_scales[scales_from + np.uint64(mine)])
                mbarrier_wait(bars, np.uint32(np.uint32(first_full) + stage), parity)
                if expert >= np.int32(0):
                    from_lane = np.uint32(block & np.uint32(_LANES - 1))
                    multiply_stage(words, stage, bits_f32(shuffle_from(f32_bits(held), from_lane)))
                arrive_for_warp(bars, np.uint32(np.uint32(first_scaled) + stage))
                arrive_for_warp(bars, np.uint32(np.uint32(first_empty) + stage))
                stage, parity = next_stage(stage, parity)
                block = np.uint32(block + np.uint32(1))
            tile = np.uint32(tile + np.uint32(cuda.gridDim.x))

    return multiply_scales
