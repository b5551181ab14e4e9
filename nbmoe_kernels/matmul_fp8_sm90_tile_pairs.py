"""A warpgroup's tile of few tokens of Hopper's FP8 matmul, which takes its 128-blocks by twos.

As `matmul_fp8_sm90_tile`, whose bytes it has, with two sets of sums: the second block's products
are queued behind the first one's, whose sums are added meanwhile. With few tokens a block is so
little work that most of its time is the way to the tensor core and back.

Synchronisation: that of `matmul_fp8_sm90_ring`.
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
from nbmoe_kernels.matmul_fp8_sm90_ring import make_next_stage, make_release_stage

MOST_TOKENS = 16
"""Two sets of more sums do not fit into the registers of four blocks an SM."""
_ZERO, _ONE, _TWO = np.float32(0.0), np.uint32(1), np.uint32(2)


def make_multiply_pairs(config: Config, width: int, has_block_scales: bool) -> Callable[..., Any]:
    """``multiply_tile(acc, smem, words, bars, stage, parity, k_blocks)``.

    As that of `matmul_fp8_sm90_tile.make_multiply_tile`, of one warpgroup.
    """
    stage_bytes, tokens_at = config.stage_bytes, config.tokens_at
    first_full, sums_count, scales_count = config.barriers_at // 8, width // 2, width // 4
    product, hand = wgmma_fp8_block(width), hand_over(width)
    add_block = make_add_block(width, has_block_scales)
    load_products = make_load_products(config, width)
    release_stage, next_stage = make_release_stage(config), make_next_stage(config)

    @device_function
    def begin(sums, smem, bars, stage, parity):
        mbarrier_wait(bars, np.uint32(np.uint32(first_full) + stage), parity)
        weights_place = np.uint32(stage * np.uint32(stage_bytes))
        tokens_place = np.uint32(weights_place + np.uint32(tokens_at))
        wgmma_fence()
        product(sums, smem, weights_place, smem, tokens_place)
        wgmma_commit()

    def make_end(open_groups: int) -> Callable[..., Any]:
        """How a block ends with so many groups of products behind its own."""
        wait = wgmma_wait(open_groups)

        @device_function
        def end(acc, sums, scales, smem, bars, stage, parity):
            if has_block_scales:
                load_products(smem, bars, scales, stage, parity)
            wait()
            hand(sums)
            release_stage(bars, stage)
            add_block(acc, sums, scales)

        return end

    end_first, end_last = make_end(1), make_end(0)

    @device_function
    def multiply_tile(acc, smem, words, bars, stage, parity, k_blocks):
        first = cuda.local.array(sums_count, np.float32)
        second = cuda.local.array(sums_count, np.float32)
        scales = cuda.local.array(scales_count, np.float32)
        for i in unroll(range(sums_count)):
            first[i] = _ZERO
            second[i] = _ZERO
        left = k_blocks
        while left > _ONE:
            after, after_parity = next_stage(stage, parity)
            begin(first, smem, bars, stage, parity)
            begin(second, smem, bars, after, after_parity)
            end_first(acc, first, scales, smem, bars, stage, parity)
            end_last(acc, second, scales, smem, bars, after, after_parity)
            stage, parity = next_stage(after, after_parity)
            left = np.uint32(left - _TWO)
        if left == _ONE:
            begin(first, smem, bars, stage, parity)
            end_last(acc, first, scales, smem, bars, stage, parity)
            stage, parity = next_stage(stage, parity)
        return stage, parity

    return multiply_tile
