"""MXFP4 weights to the prepared layout of `nbmoe.prepared.w4a8`, with row scales, in two kernels.

Shapes: scales (E, N) f32; units (E, N64, K128, 4352) u8, as u32 and as u16; weight (E, N, K/2) e2m1
codes as u32; tiles (E, ceil(N/128), ceil(K/128), 32, 4, 4) e8m0. K is a multiple of 32.

fold_row_scales: thread by thread a row's power of two, 2^-6 of the largest scale of its blocks that
have a code other than 0; NaN if one of these is below 2^-14 of the largest, which does not fold.

prepare_w4a8: a block makes a unit; thread i = 32 w + 4 g + t makes its words of both planes and the
powers of step t of its two rows. Rows past N and elements past K are 0. Reads the scales that the
first kernel has made.

Synchronisation: none.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.math import bits_f32, f32_bits
from nbmoe_kernels.device.memory import load_v4
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.warp import count_bits
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.prepared_w4a8 import (
    CODE_BYTES,
    LARGEST_POWER,
    LEAST_USUAL,
    NAN_POWER,
    POWER_BIAS,
    UNIT_BYTES,
    UNUSUAL,
)

THREADS = 128
_NAN_BYTE = np.uint32(0xFF)
_MAGNITUDES = np.uint32(0x77777777)
_ONE, _TWO, _THREE = np.uint32(1), np.uint32(2), np.uint32(3)


@device_function
def _scale_byte(tiles, expert, row, block, row_tiles, column_tiles):
    tile = np.uint64(expert) * np.uint64(row_tiles) + np.uint64(row >> np.uint32(7))
    tile = tile * np.uint64(column_tiles) + np.uint64(block >> _TWO)
    low = np.uint32(np.uint32(row & np.uint32(31)) << np.uint32(4))
    high = np.uint32(np.uint32(np.uint32(row >> np.uint32(5)) & _THREE) << _TWO)
    in_tile = np.uint32(np.uint32(low + high) + np.uint32(block & _THREE))
    return np.uint32(tiles[tile * np.uint64(512) + np.uint64(in_tile)])


@device_function
def _has_codes(weight, at):
    a, b, c, d = load_v4(weight, at)
    return np.uint32(np.uint32(np.uint32(a | b) | np.uint32(c | d)) & _MAGNITUDES) != np.uint32(0)


@functools.cache
def make_fold_row_scales() -> Kernel:
    """The kernel; it has no configuration."""

    @kernel(
        "global f32* scales, global u32* weight, global u8* tiles, u32 num_rows, u32 n, u32 k",
        threads=THREADS,
        name="fold_row_scales",
    )
    def fold_row_scales(scales, weight, tiles, num_rows, n, k):
        at_row = np.uint32(np.uint32(cuda.blockIdx.x) * np.uint32(THREADS))
        at_row = np.uint32(at_row + np.uint32(cuda.threadIdx.x))
        if at_row < num_rows:
            expert = np.uint32(at_row // n)
            row = np.uint32(at_row - np.uint32(expert * n))
            row_tiles = np.uint32(np.uint32(n + np.uint32(127)) >> np.uint32(7))
            column_tiles = np.uint32(np.uint32(k + np.uint32(127)) >> np.uint32(7))
            codes = np.uint64(at_row) * np.uint64(k >> _THREE)
            top, bottom = np.int32(-1), np.int32(255)
            block = np.uint32(0)
            while block < np.uint32(k >> np.uint32(5)):
                byte = _scale_byte(tiles, expert, row, block, row_tiles, column_tiles)
                if byte != _NAN_BYTE and _has_codes(weight, codes + np.uint64(block << _TWO)):
                    top, bottom = max(top, np.int32(byte)), min(bottom, np.int32(byte))
                block = np.uint32(block + _ONE)
            power = np.int32(top - np.int32(LARGEST_POWER))
            bits = np.uint32(np.uint32(127) << np.uint32(23))
            if top >= np.int32(0):
                # Powers below 2^-126 are subnormals.
                bits = np.uint32(_ONE << np.uint32(max(power + np.int32(22), np.int32(0))))
                if power > np.int32(0):
                    bits = np.uint32(np.uint32(power) << np.uint32(23))
                if bottom < np.int32(power + np.int32(-POWER_BIAS)):
                    bits = np.uint32(0x7FFFFFFF)
            scales[np.uint64(at_row)] = bits_f32(bits)

    return fold_row_scales


@device_function
def _spread_signs(half):
    """Bits 3, 7, 11, 15 of a half to bits 3, 11, 19, 27."""
    first = np.uint32(half & np.uint32(0x0008)) | np.uint32(
        np.uint32(half & np.uint32(0x0080)) << np.uint32(4)
    )
    last = np.uint32(np.uint32(half & np.uint32(0x0800)) << np.uint32(8)) | np.uint32(
        np.uint32(half & np.uint32(0x8000)) << np.uint32(12)
    )
    return np.uint32(first | last)


@device_function
def _arranged(weight, at, t):
    """A thread's word of a 32-block: elements 4 t to 4 t + 3 and 16 more."""
    shift = np.uint32(np.uint32(t & _ONE) << np.uint32(4))
    word = np.uint64(np.uint32(t >> _ONE))
    low = np.uint32(np.uint32(weight[at + word] >> shift) & np.uint32(0xFFFF))
    high = np.uint32(np.uint32(weight[at + word + np.uint64(2)] >> shift) & np.uint32(0xFFFF))
    magnitudes = np.uint32(np.uint32(low | np.uint32(high << np.uint32(16))) & _MAGNITUDES)
    signs = np.uint32(_spread_signs(low) | np.uint32(_spread_signs(high) << np.uint32(4)))
    return np.uint32(magnitudes | signs)


@functools.cache
def make_prepare_w4a8() -> Kernel:
    """The kernel; it has no configuration."""

    @kernel(
        "global u32* units, global u16* halves, global f32* scales, global u32* weight, "
        "global u8* tiles, u32 n, u32 k, u32 n_units, u32 k_blocks",
        threads=THREADS,
        name="prepare_w4a8",
    )
    def prepare_w4a8(units, halves, scales, weight, tiles, n, k, n_units, k_blocks):
        thread = np.uint32(cuda.threadIdx.x)
        t = np.uint32(thread & _THREE)
        unit = np.uint32(cuda.blockIdx.x)
        down = np.uint32(unit // k_blocks)
        across = np.uint32(unit - np.uint32(down * k_blocks))
        expert = np.uint32(down // n_units)
        down = np.uint32(down - np.uint32(expert * n_units))
        row_tiles = np.uint32(n_units >> _ONE)
        at_unit = np.uint64(unit) * np.uint64(UNIT_BYTES)
        first_row = np.uint32(
            np.uint32(down << np.uint32(6)) + np.uint32(np.uint32(thread >> _TWO) << _ONE)
        )
        powers = np.uint32(0)
        for r in unroll(range(2)):
            row = np.uint32(first_row + np.uint32(r))
            at_row = np.uint64(expert) * np.uint64(n) + np.uint64(row)
            codes = at_row * np.uint64(k >> _THREE)
            for j in unroll(range(4)):
                block = np.uint32(np.uint32(across << _TWO) + np.uint32(j))
                word = np.uint32(0)
                is_inside = row < n and np.uint32(block << np.uint32(5)) < k
                if is_inside:
                    word = _arranged(weight, codes + np.uint64(block << _TWO), t)
                at = at_unit + np.uint64(2048 * (j // 2) + 4 * (2 * (j % 2) + r))
                at = at + np.uint64(np.uint32(thread << np.uint32(4)))
                units[at >> np.uint64(2)] = word
            block = np.uint32(np.uint32(across << _TWO) + t)
            if row < n and np.uint32(block << np.uint32(5)) < k:
                byte = _scale_byte(tiles, expert, row, block, row_tiles, k_blocks)
                power = np.uint32(POWER_BIAS)
                if _has_codes(weight, codes + np.uint64(block << _TWO)):
                    bits = f32_bits(scales[at_row])
                    of_row = np.int32(bits >> np.uint32(23))
                    if of_row == np.int32(0):
                        of_row = np.int32(count_bits(np.uint32(bits - _ONE))) - np.int32(22)
                    power = np.uint32(
                        np.int32(np.int32(byte) - of_row) + np.int32(POWER_BIAS)
                    ) & np.uint32(15)
                if byte == _NAN_BYTE:
                    power = np.uint32(NAN_POWER | UNUSUAL)
                if power < np.uint32(LEAST_USUAL):
                    power = np.uint32(power | np.uint32(UNUSUAL))
                powers = np.uint32(powers | np.uint32(power << np.uint32(8 * r)))
        at = at_unit + np.uint64(CODE_BYTES) + np.uint64(np.uint32(thread << _ONE))
        halves[at >> np.uint64(1)] = np.uint16(powers)

    return prepare_w4a8


def launch_prepare_w4a8(
    executor: Executor,
    units: Any,
    scales: Any,
    weight: Any,
    tiles: Any,
    *,
    num_experts: int,
    n: int,
    k: int,
    stream: Any = None,
) -> None:
    """Launch both on flat arrays: bytes, but for the f32 ``scales``."""
    rows = num_experts * n
    make_fold_row_scales().launch(
        executor, (-(-rows // THREADS), 1, 1), scales, weight, tiles, rows, n, k, stream=stream
    )
    n_units, k_blocks = 2 * -(-n // 128), -(-k // 128)
    make_prepare_w4a8().launch(
        executor,
        (num_experts * n_units * k_blocks, 1, 1),
        units,
        units,
        scales,
        weight,
        tiles,
        n,
        k,
        n_units,
        k_blocks,
        stream=stream,
    )
