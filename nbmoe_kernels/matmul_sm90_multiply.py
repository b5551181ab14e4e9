"""A warpgroup's tile by wgmma: weights decoded into registers, two groups of products in flight.

A block of K goes through three steps: its codes are loaded to registers, decoded, and multiplied
while the next block is decoded. Synchronisation: the mbarriers of `matmul_sm90_ring`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.mbarrier import mbarrier_arrive, mbarrier_wait
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.wgmma import wgmma_commit, wgmma_fence, wgmma_wait
from nbmoe_kernels.device.wgmma_block import operand_descriptor, settle, wgmma_block
from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig
from nbmoe_kernels.matmul_sm90_places import make_first_places
from nbmoe_kernels.matmul_sm90_ring import make_next_stage
from nbmoe_kernels.warp_arrival import arrives


def _make_multiply_block(config: HopperMatmulConfig, width: int, q: int) -> Callable[..., Any]:
    """``multiply_block(acc, a, first, smem, descriptor, tokens_at)``: issue block q of a stage."""
    product = wgmma_block(width, config.b.tensor_core, q * config.panel_bytes)

    @device_function
    def multiply_block(acc, a, first, smem, descriptor, tokens_at):
        wgmma_fence()
        product(
            acc, a[first], a[first + 1], a[first + 2], a[first + 3], a[first + 4], a[first + 5],
            a[first + 6], a[first + 7], a[first + 8], a[first + 9], a[first + 10], a[first + 11],
            a[first + 12], a[first + 13], a[first + 14], a[first + 15], descriptor, smem, tokens_at,
        )  # fmt: skip
        wgmma_commit()

    return multiply_block


def _make_blocks(config: HopperMatmulConfig, width: int, q: int) -> Callable[..., Any]:
    """``blocks(acc, a, raw, smem, descriptor, tokens_at, codes_at, scales_at, bars, release)``.

    Decodes and multiplies 64-blocks q and following of a stage. Once the products of block 0 are
    issued and those before it complete, the lanes whose ``release`` is not 0 arrive at that
    barrier.
    """
    decode, first = config.b.decode_usual, 16 * q
    multiply_block, wait_for_older = _make_multiply_block(config, width, q), wgmma_wait(1)
    is_last = q == config.stage_blocks - 1
    # Codes are loaded a block ahead where registers allow it.
    ahead = config.registers is not None
    load = config.b.make_load(q * config.b.unit_bytes)
    load_next = config.b.make_load((q + 1) * config.b.unit_bytes)
    following = decode if is_last else _make_blocks(config, width, q + 1)

    @device_function
    def blocks(acc, a, raw, smem, descriptor, tokens_at, codes_at, scales_at, bars, release):
        if q == 0 or not ahead:
            load(smem, codes_at, scales_at, raw)
        decode(raw, a, first)
        if ahead and not is_last:
            load_next(smem, codes_at, scales_at, raw)
        multiply_block(acc, a, first, smem, descriptor, tokens_at)
        wait_for_older()
        if q == 0:
            if release > np.uint32(0):
                mbarrier_arrive(bars, release)
        if not is_last:
            following(acc, a, raw, smem, descriptor, tokens_at, codes_at, scales_at, bars, release)

    return blocks


def make_multiply(config: HopperMatmulConfig, width: int) -> Callable[..., Any]:
    """``multiply(acc, smem, bars, stage, parity, k64, rows)``: a tile of ``rows`` tokens.

    ``acc`` (f32[width / 2]) becomes the sums over ``k64`` 64-blocks, in ascending order; returns
    the ring's next stage and parity.
    """
    stage_bytes, stage_blocks = config.stage_bytes, config.stage_blocks
    first_full, first_empty = config.barriers_at // 8, config.barriers_at // 8 + config.stages
    panel_bytes, unit_bytes = config.panel_bytes, config.b.unit_bytes
    load, decode = config.b.make_load(0), config.b.decode_usual
    multiply_blocks = _make_blocks(config, width, 0)
    multiply_block = _make_multiply_block(config, width, 0)
    first_places = make_first_places(config)
    wait_for_all, settled = wgmma_wait(0), settle(width // 2)
    operands, raw_words = 16 * stage_blocks, config.b.raw_words
    next_stage = make_next_stage(config.stages)

    @device_function
    def multiply_rest(acc, a, raw, smem, tokens_at, codes_at, scales_at, left):
        """The 64-blocks of a stage that is not full."""
        while left > np.uint32(0):
            load(smem, codes_at, scales_at, raw)
            decode(raw, a, 0)
            multiply_block(acc, a, 0, smem, operand_descriptor(smem, tokens_at), tokens_at)
            wait_for_all()
            tokens_at = np.uint32(tokens_at + np.uint32(panel_bytes))
            codes_at = np.uint32(codes_at + np.uint32(unit_bytes))
            scales_at = np.uint32(scales_at + np.uint32(unit_bytes))
            left = np.uint32(left - np.uint32(1))

    @device_function
    def multiply(acc, smem, bars, stage, parity, k64, rows):
        first_codes, first_scales = first_places()
        a = cuda.local.array(operands, np.uint32)
        raw = cuda.local.array(raw_words, np.uint32)
        for i in unroll(range(width // 2)):
            acc[i] = np.float32(0.0)
        # Nothing to release before the first stage.
        release = np.uint32(0)
        left = k64
        while left >= np.uint32(stage_blocks):
            mbarrier_wait(bars, np.uint32(np.uint32(first_full) + stage), parity)
            at = np.uint32(stage * np.uint32(stage_bytes))
            codes_at, scales_at = np.uint32(at + first_codes), np.uint32(at + first_scales)
            descriptor = operand_descriptor(smem, at)
            multiply_blocks(acc, a, raw, smem, descriptor, at, codes_at, scales_at, bars, release)
            if arrives():
                release = np.uint32(np.uint32(first_empty) + stage)
            stage, parity = next_stage(stage, parity)
            left = np.uint32(left - np.uint32(stage_blocks))
        wait_for_all()
        if release > np.uint32(0):
            mbarrier_arrive(bars, release)
        if left > np.uint32(0):
            mbarrier_wait(bars, np.uint32(np.uint32(first_full) + stage), parity)
            at = np.uint32(stage * np.uint32(stage_bytes))
            codes_at, scales_at = np.uint32(at + first_codes), np.uint32(at + first_scales)
            multiply_rest(acc, a, raw, smem, at, codes_at, scales_at, left)
            if arrives():
                mbarrier_arrive(bars, np.uint32(np.uint32(first_empty) + stage))
            stage, parity = next_stage(stage, parity)
        settled(acc)
        return stage, parity

    return multiply
