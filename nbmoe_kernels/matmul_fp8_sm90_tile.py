"""A warpgroup's tile of Hopper's FP8 matmul: 64 weight rows times a segment's tokens.

Each 128-block of K is a stage of the ring and one group of wgmma from zero, whose sums then join
the accumulators (`matmul_fp8_sm90_promote`). Fragment rows g and g + 8 of a warp hold weight rows
2g and 2g + 1 (the prepared layout puts them so), so a lane's pair is a word of the output.

Synchronisation: that of `matmul_fp8_sm90_ring`, in turns with the other warpgroup where it says so.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.mbarrier import mbarrier_wait
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.wgmma import wgmma_commit, wgmma_fence, wgmma_wait
from nbmoe_kernels.device.wgmma_fp8_block import hand_over, wgmma_fp8_block
from nbmoe_kernels.matmul_fp8_sm90_config import Fp8HopperConfig as Config
from nbmoe_kernels.matmul_fp8_sm90_promote import make_add_block, make_load_products
from nbmoe_kernels.matmul_fp8_sm90_ring import (
    make_next_stage,
    make_release_stage,
    make_turns,
    takes_turns,
)

ZERO = np.float32(0.0)


def make_multiply_tile(config: Config, width: int, has_block_scales: bool) -> Callable[..., Any]:
    """``multiply_tile(acc, smem, words, bars, stage, parity, k_blocks)``.

    ``acc`` gets the sums of the tile whose first stage is ``stage``, and the result is the stage
    and the parity after the tile.
    """
    stage_bytes, tokens_at, unit_bytes = config.stage_bytes, config.tokens_at, config.unit_bytes
    first_full, sums_count, scales_count = config.barriers_at // 8, width // 2, width // 4
    has_turns = takes_turns(config, has_block_scales)
    # With turns the last of four steps is a group of its own: while it runs the other warpgroup's
    # products are already queued behind it.
    product = wgmma_fp8_block(width, 0, 3 if has_turns else 4)
    product_last = wgmma_fp8_block(width, 3, 4)
    wait_for_most, wait, hand = wgmma_wait(1), wgmma_wait(0), hand_over(width)
    add_block = make_add_block(width, has_block_scales)
    load_products = make_load_products(config, width)
    release_stage, next_stage = make_release_stage(config), make_next_stage(config)
    _, take_turn, pass_turn = make_turns()

    @device_function
    def multiply_tile(acc, smem, words, bars, stage, parity, k_blocks):
        group = np.uint32(np.uint32(cuda.threadIdx.x) >> np.uint32(7))
        sums = cuda.local.array(sums_count, np.float32)
        scales = cuda.local.array(scales_count, np.float32)
        for i in unroll(range(sums_count)):
            sums[i] = ZERO
        block = np.uint32(0)
        while block < k_blocks:
            mbarrier_wait(bars, np.uint32(np.uint32(first_full) + stage), parity)
            weights_place = np.uint32(
                np.uint32(stage * np.uint32(stage_bytes)) + np.uint32(group * np.uint32(unit_bytes))
            )
            tokens_place = np.uint32(
                np.uint32(stage * np.uint32(stage_bytes)) + np.uint32(tokens_at)
            )
            if has_turns:
                take_turn()
            wgmma_fence()
            product(sums, smem, weights_place, smem, tokens_place)
            wgmma_commit()
            if has_turns:
                product_last(sums, smem, weights_place, smem, tokens_place)
                wgmma_commit()
            if has_block_scales:
                load_products(smem, bars, scales, stage, parity)
            if has_turns:
                wait_for_most()
                pass_turn()
            wait()
            hand(sums)
            release_stage(bars, stage)
            add_block(acc, sums, scales)
            stage, parity = next_stage(stage, parity)
            block = np.uint32(block + np.uint32(1))
        return stage, parity

    return multiply_tile
