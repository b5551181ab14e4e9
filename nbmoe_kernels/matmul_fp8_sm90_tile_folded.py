"""A warpgroup's tile of Hopper's FP8 matmul with MXFP4 weights that are folded into e4m3.

As `matmul_fp8_sm90_tile`, but A comes from registers: while the tensor core multiplies a 128-block,
the warpgroup decodes the next one's weights into another set. Scales are those of rows.

Synchronisation: that of `matmul_fp8_sm90_ring`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.mbarrier import mbarrier_wait
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.wgmma import wgmma_commit, wgmma_fence, wgmma_wait
from nbmoe_kernels.device.wgmma_fp8_block import hand_over, wgmma_fp8_block_of_registers
from nbmoe_kernels.matmul_fp8_sm90_config import Fp8HopperConfig as Config
from nbmoe_kernels.matmul_fp8_sm90_fold import make_decode_unit
from nbmoe_kernels.matmul_fp8_sm90_promote import make_add_block
from nbmoe_kernels.matmul_fp8_sm90_ring import make_next_stage, make_release_stage

_A_WORDS = 16
"""Of a thread's weights in a 128-block."""
_ZERO = np.float32(0.0)


def make_multiply_folded(config: Config, width: int) -> Callable[..., Any]:
    """``multiply_tile(acc, smem, words, bars, stage, parity, k_blocks)``.

    As that of `matmul_fp8_sm90_tile.make_multiply_tile` with row scales.
    """
    stage_bytes, tokens_at, unit_bytes = config.stage_bytes, config.tokens_at, config.unit_bytes
    first_full, sums_count = config.barriers_at // 8, width // 2
    product, wait, hand = wgmma_fp8_block_of_registers(width), wgmma_wait(0), hand_over(width)
    decode_unit = make_decode_unit(config.fold_at)
    add_block = make_add_block(width, has_block_scales=False)
    release_stage, next_stage = make_release_stage(config), make_next_stage(config)

    @device_function
    def decode_stage(words, bars, a, stage, parity):
        group = np.uint32(np.uint32(cuda.threadIdx.x) >> np.uint32(7))
        mbarrier_wait(bars, np.uint32(np.uint32(first_full) + stage), parity)
        place = np.uint32(
            np.uint32(stage * np.uint32(stage_bytes)) + np.uint32(group * np.uint32(unit_bytes))
        )
        decode_unit(words, np.uint32(place >> np.uint32(2)), a)

    @device_function
    def multiply_block(acc, sums, now, ahead, smem, words, bars, ring, block, k_blocks):
        """The block whose weights are ``now``; those of the one after it become ``ahead``."""
        stage, parity = ring
        tokens_place = np.uint32(np.uint32(stage * np.uint32(stage_bytes)) + np.uint32(tokens_at))
        wgmma_fence()
        product(
            sums, now[0], now[1], now[2], now[3], now[4], now[5], now[6], now[7], now[8], now[9],
            now[10], now[11], now[12], now[13], now[14], now[15], smem, tokens_place,
        )  # fmt: skip
        wgmma_commit()
        after, next_parity = next_stage(stage, parity)
        block = np.uint32(block + np.uint32(1))
        if block < k_blocks:
            decode_stage(words, bars, ahead, after, next_parity)
        wait()
        hand(sums)
        release_stage(bars, stage)
        add_block(acc, sums, sums)
        return after, next_parity, block

    @device_function
    def multiply_tile(acc, smem, words, bars, stage, parity, k_blocks):
        sums = cuda.local.array(sums_count, np.float32)
        for i in unroll(range(sums_count)):
            sums[i] = _ZERO
        even = cuda.local.array(_A_WORDS, np.uint32)
        odd = cuda.local.array(_A_WORDS, np.uint32)
        block = np.uint32(0)
        if block < k_blocks:
            decode_stage(words, bars, even, stage, parity)
        while block < k_blocks:
            stage, parity, block = multiply_block(
                acc, sums, even, odd, smem, words, bars, (stage, parity), block, k_blocks
            )
            if block < k_blocks:
                stage, parity, block = multiply_block(
                    acc, sums, odd, even, smem, words, bars, (stage, parity), block,
                    k_blocks,
                )  # fmt: skip
        return stage, parity

    return multiply_tile
