"""A warpgroup's tile of Hopper's FP8 matmul: 64 weight rows times a segment's tokens.

Each 128-block of K is a stage of the ring and one group of wgmma from zero; then its sums join the
accumulators on the CUDA cores:

    block scales    acc = fma(sums, a_scale[token] * b_scale, acc)
    row scales      acc = acc + sums

Fragment rows g and g + 8 of a warp hold weight rows 2g and 2g + 1 (the prepared layout puts them
so), so a lane's pair is a word of the output.

Synchronisation: waits for `full` of a stage; each warp arrives at `empty` once its part of the
stage's product is complete and its scales are in registers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.convert import f32_of_bf16
from nbmoe_kernels.device.math import add_rn, bits_f32, f32_bits, fma_rn, mul_rn
from nbmoe_kernels.device.mbarrier import mbarrier_arrive, mbarrier_wait
from nbmoe_kernels.device.memory import load_shared_v2
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.warp import shuffle_from, sync_warp
from nbmoe_kernels.device.wgmma import wgmma_commit, wgmma_fence, wgmma_wait
from nbmoe_kernels.device.wgmma_fp8_block import (
    hand_over,
    wgmma_fp8_block,
    wgmma_fp8_block_of_registers,
)
from nbmoe_kernels.matmul_fp8_sm90_config import Fp8HopperConfig as Config
from nbmoe_kernels.matmul_fp8_sm90_fold import make_decode_unit

ZERO, ONE = np.float32(0.0), np.float32(1.0)


@device_function
def _f32_of_f32(scale):
    return scale


SCALE_POINTERS = {"f32": ("f32", _f32_of_f32), "bf16": ("u16", f32_of_bf16)}
"""By type of the weights' scales: element of their pointer, and what makes an f32 of one."""


def make_add_block(width: int, has_block_scales: bool) -> Callable[..., Any]:
    """``add_block(acc, sums, scales, b_scale)`` for a tile of ``width`` tokens."""

    @device_function
    def add_block(acc, sums, scales, b_scale):
        for group in unroll(range(width // 8)):
            for i in unroll(range(2)):
                at = 4 * group + i
                if has_block_scales:
                    scale = mul_rn(scales[2 * group + i], b_scale)
                    acc[at] = fma_rn(sums[at], scale, acc[at])
                    acc[at + 2] = fma_rn(sums[at + 2], scale, acc[at + 2])
                else:
                    acc[at] = add_rn(acc[at], sums[at])
                    acc[at + 2] = add_rn(acc[at + 2], sums[at + 2])

    return add_block


def make_multiply_tile(
    config: Config, width: int, has_block_scales: bool, scale_type: str
) -> Callable[..., Any]:
    """``multiply_tile(acc, smem, words, bars, stage, parity, k_blocks, b_scales, b_scales_from)``.

    ``acc`` gets the sums of the tile whose first stage is ``stage``, and the result is the stage
    and the parity after the tile. ``b_scales_from`` is the index of the warpgroup's first scale.
    """
    value_of = SCALE_POINTERS[scale_type][1]
    stage_bytes, tokens_at = config.stage_bytes, config.tokens_at
    first_scale, scale_step = config.scales_at // 4, config.max_width
    first_barrier = config.barriers_at // 8
    sums_count, scales_count = width // 2, width // 4
    is_folded, unit_bytes = config.b_format == "mxfp4", config.unit_bytes
    product = wgmma_fp8_block(width)
    product_of_registers = wgmma_fp8_block_of_registers(width)
    decode_unit = make_decode_unit(config.fold_at)
    wait, hand = wgmma_wait(0), hand_over(width)
    add_block = make_add_block(width, has_block_scales)
    release_stage, next_stage = make_release_stage(config), make_next_stage(config)

    @device_function
    def clear(sums):
        for i in unroll(range(sums_count)):
            sums[i] = ZERO

    @device_function
    def start_block(smem, words, bars, sums, stage, parity):
        group = np.uint32(np.uint32(cuda.threadIdx.x) >> np.uint32(7))
        mbarrier_wait(bars, np.uint32(np.uint32(first_barrier) + stage), parity)
        place = np.uint32(stage * np.uint32(stage_bytes))
        weights_place = np.uint32(place + np.uint32(group * np.uint32(unit_bytes)))
        tokens_place = np.uint32(place + np.uint32(tokens_at))
        if is_folded:
            a = cuda.local.array(16, np.uint32)
            decode_unit(words, np.uint32(weights_place >> np.uint32(2)), a)
            wgmma_fence()
            product_of_registers(
                sums,
                a[0],
                a[1],
                a[2],
                a[3],
                a[4],
                a[5],
                a[6],
                a[7],
                a[8],
                a[9],
                a[10],
                a[11],
                a[12],
                a[13],
                a[14],
                a[15],
                smem,
                tokens_place,
            )
        else:
            wgmma_fence()
            product(sums, smem, weights_place, smem, tokens_place)
        wgmma_commit()

    @device_function
    def load_scales(words, scales, stage):
        if has_block_scales:
            column = np.uint32(np.uint32(cuda.threadIdx.x) & np.uint32(3))
            at = np.uint32(np.uint32(first_scale) + np.uint32(stage * np.uint32(scale_step)))
            at = np.uint32(at + np.uint32(np.uint32(2) * column))
            for i in unroll(range(width // 8)):
                even, odd = load_shared_v2(words, np.uint32(at + np.uint32(8 * i)))
                scales[2 * i] = bits_f32(even)
                scales[2 * i + 1] = bits_f32(odd)

    @device_function
    def held_scale(held, b_scales, b_scales_from, block, k_blocks):
        """The lane's among 32 blocks' scales, loaded anew where 32 blocks begin."""
        if has_block_scales:
            if np.uint32(block & np.uint32(31)) == np.uint32(0):
                mine = np.uint32(block + np.uint32(np.uint32(cuda.threadIdx.x) & np.uint32(31)))
                if mine < k_blocks:
                    held = value_of(b_scales[b_scales_from + np.uint64(mine)])
        return held

    @device_function
    def scale_of(held, block):
        if has_block_scales:
            lane = np.uint32(block & np.uint32(31))
            return bits_f32(shuffle_from(f32_bits(held), lane))
        return held

    @device_function
    def multiply_tile(acc, smem, words, bars, stage, parity, k_blocks, b_scales, b_scales_from):
        """One set of sums: other warpgroups keep the tensor core busy meanwhile."""
        sums = cuda.local.array(sums_count, np.float32)
        scales = cuda.local.array(scales_count, np.float32)
        clear(sums)
        held = ZERO
        block = np.uint32(0)
        while block < k_blocks:
            start_block(smem, words, bars, sums, stage, parity)
            held = held_scale(held, b_scales, b_scales_from, block, k_blocks)
            load_scales(words, scales, stage)
            wait()
            hand(sums)
            release_stage(bars, stage)
            add_block(acc, sums, scales, scale_of(held, block))
            stage, parity = next_stage(stage, parity)
            block = np.uint32(block + np.uint32(1))
        return stage, parity

    return multiply_tile


def make_release_stage(config: Config) -> Callable[..., Any]:
    """``release_stage(bars, stage)``: the warp needs nothing of the stage any more."""
    first_empty = config.barriers_at // 8 + config.stages

    @device_function
    def release_stage(bars, stage):
        sync_warp()  # other lanes have read the note and scales
        if np.uint32(np.uint32(cuda.threadIdx.x) & np.uint32(31)) == np.uint32(0):
            mbarrier_arrive(bars, np.uint32(np.uint32(first_empty) + stage))

    return release_stage


def make_next_stage(config: Config) -> Callable[..., Any]:
    """``next_stage(stage, parity)``: both of the stage after this one."""
    stages = config.stages

    @device_function
    def next_stage(stage, parity):
        stage = np.uint32(stage + np.uint32(1))
        if stage == np.uint32(stages):
            stage = np.uint32(0)
            parity = np.uint32(parity ^ np.uint32(1))
        return stage, parity

    return next_stage
