"""A tile of few tokens by mma.sync: each warp multiplies its 16 weight rows by itself.

With few tiles the time is one warp's: how fast it decodes its weights. Between wgmma's products
stand fences and waits, and the warps of a group wait for each other. Here a warp's products follow
each other in registers: while one 64-block is multiplied the next is decoded into a second set of
operands, and the codes of the one after that are loaded. Operands, sums and their order are those
of `matmul_sm90_multiply`, so the bytes are, too; for many tokens wgmma is faster.

Thread map: lane 4 g + t of a warp has the weight rows of `matmul_sm90_epilogue`. Of tokens 8 j to
8 j + 7 it loads by `ldmatrix` what step s multiplies: token 8 j + g, columns 16 s + 2 t, + 1 and
16 s + 8 + 2 t, + 1. Token row r has its 16-byte chunk c at place c ^ (r % 8) of its 128 bytes.
Lanes name rows that were copied: those past the last name the last one, and give sums that nobody
stores.

Synchronisation: the mbarriers of `matmul_sm90_ring`; a warp arrives at ``empty`` once all its lanes
have a stage's last words in registers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.matrix import load_matrices
from nbmoe_kernels.device.mbarrier import mbarrier_wait
from nbmoe_kernels.device.mma import MMA_M16N8K16
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig
from nbmoe_kernels.matmul_sm90_places import make_first_places
from nbmoe_kernels.matmul_sm90_ring import make_next_stage
from nbmoe_kernels.warp_arrival import arrive_for_warp

_SET = 16
"""Words of a thread's decoded weights of a 64-block."""
_SETS = 2 * _SET


@device_function
def _lane_words(first, rows):
    """The word of chunk 0 to 3 that a lane names for `ldmatrix`, in tokens ``first`` to + 7."""
    lane = np.uint32(np.uint32(cuda.threadIdx.x) & np.uint32(31))
    token = min(np.uint32(first + np.uint32(lane & np.uint32(7))), np.uint32(rows - np.uint32(1)))
    chunk = np.uint32(np.uint32(lane >> np.uint32(3)) ^ np.uint32(token & np.uint32(7)))
    return np.uint32(np.uint32(token << np.uint32(5)) + np.uint32(chunk << np.uint32(2)))


def _make_load_tokens(config: HopperMatmulConfig, width: int, q: int, operands: int) -> Any:
    """``load_tokens(b, words, places)``: block q of a stage to set 0 or 1 of ``b``.

    ``places`` are a lane's words in the stage, for each eight tokens; a row's chunks 4 to 7 are
    those of 0 to 3 with the place's bit 6 turned over.
    """
    load = load_matrices(4, displacement=q * config.panel_bytes // 4)
    first = width * operands

    @device_function
    def load_tokens(b, words, places):
        for j in unroll(range(width // 8)):
            at = first + 8 * j
            b[at], b[at + 1], b[at + 2], b[at + 3] = load(words, places[j])
            high = np.uint32(places[j] ^ np.uint32(16))
            b[at + 4], b[at + 5], b[at + 6], b[at + 7] = load(words, high)

    return load_tokens


def _make_multiply_set(config: HopperMatmulConfig, width: int, operands: int) -> Any:
    """``multiply_set(acc, a, b)``: adds the products of a set to the sums, step after step."""
    mma, a_at, b_at = MMA_M16N8K16[config.b.tensor_core], _SET * operands, width * operands

    @device_function
    def multiply_set(acc, a, b):
        for j in unroll(range(width // 8)):
            sums = cuda.local.array(4, np.float32)
            for i in unroll(range(4)):
                sums[i] = acc[4 * j + i]
            for step in unroll(range(4)):
                mma(
                    sums, a[a_at + 4 * step], a[a_at + 4 * step + 1], a[a_at + 4 * step + 2],
                    a[a_at + 4 * step + 3], b[b_at + 8 * j + 2 * step],
                    b[b_at + 8 * j + 2 * step + 1],
                )  # fmt: skip
            for i in unroll(range(4)):
                acc[4 * j + i] = sums[i]

    return multiply_set


def _make_stage(config: HopperMatmulConfig, width: int, q: int) -> Callable[..., Any]:
    """``stage(acc, a, b, raw, ahead, smem, words, places, codes_at, scales_at)``: q and following.

    Block q, whose codes are in ``raw``, is decoded while the one before it is multiplied: set 1
    before the first, and set 1 holds the last one at the end. ``ahead`` gets block q + 1's codes.
    """
    operands, unit_bytes = q % 2, config.b.unit_bytes
    decode, load_next = config.b.decode, config.b.make_load((q + 1) * unit_bytes)
    load_tokens = _make_load_tokens(config, width, q, operands)
    multiply_set = _make_multiply_set(config, width, 1 - operands)
    is_last = q == config.stage_blocks - 1
    following = decode if is_last else _make_stage(config, width, q + 1)

    @device_function
    def stage(acc, a, b, raw, ahead, smem, words, places, codes_at, scales_at):
        if not is_last:
            load_next(smem, codes_at, scales_at, ahead)
        load_tokens(b, words, places)
        multiply_set(acc, a, b)
        decode(raw, a, _SET * operands)
        if not is_last:
            following(acc, a, b, ahead, raw, smem, words, places, codes_at, scales_at)

    return stage


def make_multiply_few(config: HopperMatmulConfig, width: int) -> Callable[..., Any]:
    """``multiply(acc, smem, bars, stage, parity, k64, rows)``: a tile of ``rows`` tokens.

    ``acc`` (f32[width / 2]) becomes the sums over ``k64`` 64-blocks, in ascending order; returns
    the ring's next stage and parity.
    """
    stage_bytes, stage_blocks = config.stage_bytes, config.stage_blocks
    assert stage_blocks % 2 == 0, "a stage ends with the second set of operands"
    first_full, first_empty = config.barriers_at // 8, config.barriers_at // 8 + config.stages
    panel_words = config.panel_bytes // 4
    unit_bytes, raw_words, eights = config.b.unit_bytes, config.b.raw_words, width // 8
    token_words = 2 * width
    load, decode = config.b.make_load(0), config.b.decode
    load_tokens = _make_load_tokens(config, width, 0, 0)
    multiply_first = _make_multiply_set(config, width, 0)
    multiply_stage = _make_stage(config, width, 0)
    multiply_last = _make_multiply_set(config, width, 1)
    first_places, next_stage = make_first_places(config), make_next_stage(config.stages)

    @device_function
    def multiply(acc, smem, bars, stage, parity, k64, rows):
        words = cuda.shared.array(0, np.uint32, alignment=1024)
        first_codes, first_scales = first_places()
        first_words = cuda.local.array(eights, np.uint32)
        places = cuda.local.array(eights, np.uint32)
        for j in unroll(range(eights)):
            first_words[j] = _lane_words(np.uint32(8 * j), rows)
        a = cuda.local.array(_SETS, np.uint32)
        b = cuda.local.array(token_words, np.uint32)
        raw = cuda.local.array(raw_words, np.uint32)
        ahead = cuda.local.array(raw_words, np.uint32)
        for i in unroll(range(width // 2)):
            acc[i] = np.float32(0.0)
        # Before the first block come products of zeros, which leave sums of 0.
        for i in unroll(range(_SET)):
            a[_SET + i] = np.uint32(0)
        for i in unroll(range(width)):
            b[width + i] = np.uint32(0)
        left = k64
        while left >= np.uint32(stage_blocks):
            mbarrier_wait(bars, np.uint32(np.uint32(first_full) + stage), parity)
            at = np.uint32(stage * np.uint32(stage_bytes))
            codes_at, scales_at = np.uint32(at + first_codes), np.uint32(at + first_scales)
            for j in unroll(range(eights)):
                places[j] = np.uint32(np.uint32(at >> np.uint32(2)) + first_words[j])
            load(smem, codes_at, scales_at, raw)
            multiply_stage(acc, a, b, raw, ahead, smem, words, places, codes_at, scales_at)
            arrive_for_warp(bars, np.uint32(np.uint32(first_empty) + stage))
            stage, parity = next_stage(stage, parity)
            left = np.uint32(left - np.uint32(stage_blocks))
        multiply_last(acc, a, b)
        if left > np.uint32(0):
            mbarrier_wait(bars, np.uint32(np.uint32(first_full) + stage), parity)
            at = np.uint32(stage * np.uint32(stage_bytes))
            codes_at, scales_at = np.uint32(at + first_codes), np.uint32(at + first_scales)
            for j in unroll(range(eights)):
                places[j] = np.uint32(np.uint32(at >> np.uint32(2)) + first_words[j])
            while left > np.uint32(0):
                load(smem, codes_at, scales_at, raw)
                load_tokens(b, words, places)
                decode(raw, a, 0)
                multiply_first(acc, a, b)
                codes_at = np.uint32(codes_at + np.uint32(unit_bytes))
                scales_at = np.uint32(scales_at + np.uint32(unit_bytes))
                for j in unroll(range(eights)):
                    places[j] = np.uint32(places[j] + np.uint32(panel_words))
                left = np.uint32(left - np.uint32(1))
            arrive_for_warp(bars, np.uint32(np.uint32(first_empty) + stage))
            stage, parity = next_stage(stage, parity)
        return stage, parity

    return multiply
