"""A warpgroup's tile of Hopper's FP8 matmul with MXFP4 weights that are folded into e4m3.

As `matmul_fp8_sm90_tile`, but A comes from registers: while the tensor core multiplies a 128-block,
the warpgroup decodes the next one's weights into another set. A stage has two blocks, one a set.
Scales are those of rows.

Synchronisation: that of `matmul_fp8_sm90_ring`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.mbarrier import mbarrier_wait
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.wgmma import wgmma_commit, wgmma_fence, wgmma_wait
from nbmoe_kernels.device.wgmma_block import operand_descriptor
from nbmoe_kernels.device.wgmma_fp8_block import hand_over, wgmma_fp8_block_of_registers
from nbmoe_kernels.matmul_fp8_sm90_config import Fp8HopperConfig as Config
from nbmoe_kernels.matmul_fp8_sm90_fold import decode_unit
from nbmoe_kernels.matmul_fp8_sm90_promote import make_add_block
from nbmoe_kernels.matmul_fp8_sm90_ring import make_next_stage, make_release_stage

_STAGE_BLOCKS = 2
_A_WORDS = 16
"""Of a thread's weights in a 128-block."""
_ZERO = np.float32(0.0)


def make_multiply_folded(config: Config, width: int) -> Callable[..., Any]:
    """``multiply_tile(acc, smem, words, bars, stage, parity, k_blocks)``.

    As that of `matmul_fp8_sm90_tile.make_multiply_tile` with row scales.
    """
    stage_bytes, tokens_at, unit_bytes = config.stage_bytes, config.tokens_at, config.unit_bytes
    first_full, sums_count, warpgroups = config.barriers_at // 8, width // 2, config.warpgroups
    assert config.stage_blocks == _STAGE_BLOCKS, "a set of registers for each"
    add_block = make_add_block(width, has_block_scales=False)
    release_stage, next_stage = make_release_stage(config), make_next_stage(config)
    wait, hand = wgmma_wait(0), hand_over(width)

    @device_function
    def unit_place(stage):
        """The word of the warpgroup's first unit in a stage."""
        place = np.uint32(stage * np.uint32(stage_bytes // 4))
        if warpgroups > 1:
            group = np.uint32(np.uint32(cuda.threadIdx.x) >> np.uint32(7))
            place = np.uint32(place + np.uint32(group * np.uint32(_STAGE_BLOCKS * unit_bytes // 4)))
        return place

    def make_multiply_block(q: int) -> Callable[..., Any]:
        """``multiply_block(acc, sums, now, ahead, smem, words, bars, ring, left)``.

        Multiplies block q of a stage, whose weights are ``now``; those of the block after it become
        ``ahead``. ``left`` counts the tile's blocks from this one on.
        """
        product = wgmma_fp8_block_of_registers(width, q * config.panel_bytes)
        is_last_of_stage = q == _STAGE_BLOCKS - 1

        @device_function
        def multiply_block(acc, sums, now, ahead, smem, words, bars, ring, left):
            stage, parity, descriptor, tokens_place = ring
            wgmma_fence()
            product(
                sums, now[0], now[1], now[2], now[3], now[4], now[5], now[6], now[7], now[8],
                now[9], now[10], now[11], now[12], now[13], now[14], now[15],
                descriptor, smem, tokens_place,
            )  # fmt: skip
            wgmma_commit()
            goes_on = left > np.uint32(1)
            if goes_on:
                if is_last_of_stage:
                    after, next_parity = next_stage(stage, parity)
                    mbarrier_wait(bars, np.uint32(np.uint32(first_full) + after), next_parity)
                    decode_unit(words, unit_place(after), 0, ahead)
                else:
                    decode_unit(words, unit_place(stage), (q + 1) * unit_bytes // 4, ahead)
            wait()
            hand(sums)
            if is_last_of_stage or not goes_on:
                release_stage(bars, stage)
            add_block(acc, sums, sums)

        return multiply_block

    first_block, second_block = make_multiply_block(0), make_multiply_block(1)

    @device_function
    def multiply_tile(acc, smem, words, bars, stage, parity, k_blocks):
        sums = cuda.local.array(sums_count, np.float32)
        for i in unroll(range(sums_count)):
            sums[i] = _ZERO
        first = cuda.local.array(_A_WORDS, np.uint32)
        second = cuda.local.array(_A_WORDS, np.uint32)
        left = k_blocks
        if left > np.uint32(0):
            mbarrier_wait(bars, np.uint32(np.uint32(first_full) + stage), parity)
            decode_unit(words, unit_place(stage), 0, first)
        while left > np.uint32(0):
            place = np.uint32(np.uint32(stage * np.uint32(stage_bytes)) + np.uint32(tokens_at))
            ring = stage, parity, operand_descriptor(smem, place), place
            first_block(acc, sums, first, second, smem, words, bars, ring, left)
            left = np.uint32(left - np.uint32(1))
            if left > np.uint32(0):
                second_block(acc, sums, second, first, smem, words, bars, ring, left)
                left = np.uint32(left - np.uint32(1))
            stage, parity = next_stage(stage, parity)
        return stage, parity

    return multiply_tile
