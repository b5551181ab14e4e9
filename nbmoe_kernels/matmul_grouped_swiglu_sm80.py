"""Grouped NVFP4 matmul with SwiGLU and requantize in its epilogue, for sm_80 and up.

The weight is sigma-permuted: row 2i is gate row i, row 2i + 1 up row i. For row m and pair i:

    gate, up = acc * 2^28 * expert_scales[expert] (* a_row_scales[m])      f32, in this order
    gate, up = bf16(gate), bf16(up)                                        if MATCH_BF16
    z        = gate * sigmoid(gate) * up                                   f32
    c_packed, c_swiglu_scales = NVFP4 blocks of 16 consecutive z under c_input_scales[slot]

Shapes: c_packed (M, D/2) u8; c_swiglu_scales (tiles, ceil(D/64), 32, 4, 4) u8; c_input_scales (S,)
f32; weight (E, 2D, K/2) u8 and its scales; the rest as in `matmul_grouped_sm80`. D is a multiple of
16.

Thread map: as in `matmul_grouped_sm80`, so lane (g, t) holds gate and up of pair 4c + t of fragment
column c. Four fragment columns make a block of 16 z: the four lanes of a quad hold 4 each, find the
maximum and join their codes by two butterfly shuffles, and lane t = 0 stores 8 bytes. A block's 128
columns are 64 z, 4 scale columns: one scale word a row.

A slot with expert id -1 has products of 0 and uses no row scale and no input scale, so its z are 0
whatever the scales hold.

Padding: scale columns past D / 16 are 0. Scale rows from the slot's last row to its tile's end are
written as 0 by the block that holds the last row. Other tiles are not written.

Synchronisation: the mainloop's, and one block barrier between the scale bytes' stores to shared
memory and the threads that gather a row's four. The mainloop's last stage may still be read when
the first scale is stored, so scales have their own words.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.convert import bf16x2_of_f32
from nbmoe_kernels.device.math import bits_f32, div_rn, f32_bits, max_nan, mul_rn, silu_gate
from nbmoe_kernels.device.memory import store_v2
from nbmoe_kernels.device.nvfp4 import block_scale, code_of_f32
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.warp import shuffle_xor
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.matmul_grouped_sm80 import row_scale_of, scaled
from nbmoe_kernels.matmul_tile_sm80 import BLOCK_N, MatmulConfig, make_multiply_tile
from nbmoe_kernels.search import TILE_ROWS

_ONE, _ZERO = np.float32(1.0), np.float32(0.0)


@device_function
def magnitude(x):
    """|x| by its bits."""
    return bits_f32(np.uint32(f32_bits(x) & np.uint32(0x7FFFFFFF)))


@device_function
def quad_max(x):
    """The largest x of a quad's lanes; NaN wins."""
    x = max_nan(x, bits_f32(shuffle_xor(f32_bits(x), np.uint32(1))))
    return max_nan(x, bits_f32(shuffle_xor(f32_bits(x), np.uint32(2))))


@device_function
def quad_or(word):
    """The union of a quad's words."""
    word = np.uint32(word | shuffle_xor(word, np.uint32(1)))
    return np.uint32(word | shuffle_xor(word, np.uint32(2)))


@functools.cache
def make_matmul_grouped_swiglu(config: MatmulConfig, match_bf16: bool) -> Kernel:
    """The kernel for a tile shape, with or without the bf16 rounding of gate and up."""
    block_m, threads = config.block_m, config.threads
    row_tiles, column_tiles, warps_n = config.row_tiles, config.column_tiles, config.warps_n
    fragments = row_tiles * column_tiles
    scale_groups = column_tiles // 4
    scales_at = config.stages * config.stage_words
    multiply_tile = make_multiply_tile(config)

    @device_function
    def activated(gate, up):
        if match_bf16:
            rounded = bf16x2_of_f32(up, gate)
            gate = bits_f32(np.uint32(rounded << np.uint32(16)))
            up = bits_f32(np.uint32(rounded & np.uint32(0xFFFF0000)))
        return silu_gate(gate, up)

    @kernel(
        "global u32* c_packed, global u32* c_swiglu_scales, global u8* hidden, global u8* weight, "
        "global u8* a_scales, global u8* b_scales, global u32* expert_start, "
        "global u32* a_scale_offsets, global i32* expert_ids, global f32* expert_scales, "
        "global f32* c_input_scales, global u16* a_row_scales, "
        "u32 num_active, u32 n, u32 k, u32 has_row_scales",
        threads=threads,
        shared_bytes=config.shared_bytes + 4 * 4 * block_m,
        name=f"matmul_grouped_swiglu_nvfp4_sm80_{config.name}_{'bf16' if match_bf16 else 'f32'}",
    )
    def matmul_grouped_swiglu(
        c_packed,
        c_swiglu_scales,
        hidden,
        weight,
        a_scales,
        b_scales,
        expert_start,
        a_scale_offsets,
        expert_ids,
        expert_scales,
        c_input_scales,
        a_row_scales,
        num_active,
        n,
        k,
        has_row_scales,
    ):
        smem = cuda.shared.array(0, np.uint32, alignment=16)
        thread = np.uint32(cuda.threadIdx.x)
        acc = cuda.local.array((fragments, 4), np.float32)
        slot, expert, tile, tile_row, first_row, rows, first_column = multiply_tile(
            acc,
            smem,
            hidden,
            weight,
            a_scales,
            b_scales,
            expert_start,
            a_scale_offsets,
            expert_ids,
            num_active,
            n,
            k,
        )
        if rows > np.uint32(0):
            expert_scale = _ZERO
            tensor_scale = _ONE
            if expert >= np.int32(0):
                expert_scale = expert_scales[np.uint64(expert)]
                tensor_scale = c_input_scales[np.uint64(slot)]
            else:
                has_row_scales = np.uint32(0)
            inverse = div_rn(_ONE, tensor_scale)
            lane = np.uint32(thread & np.uint32(31))
            warp = np.uint32(thread >> np.uint32(5))
            g = np.uint32(lane >> np.uint32(2))
            t = np.uint32(lane & np.uint32(3))
            warp_row = np.uint32(np.uint32(warp // np.uint32(warps_n)) * np.uint32(16 * row_tiles))
            warp_block = np.uint32(np.uint32(warp % np.uint32(warps_n)) * np.uint32(scale_groups))
            first_block = np.uint32(first_column >> np.uint32(5))
            num_blocks = np.uint32(n >> np.uint32(5))
            z = cuda.local.array(4, np.float32)
            for half in unroll(range(2 * row_tiles)):
                row = np.uint32(np.uint32(warp_row + np.uint32(8 * half)) + g)
                row_scale = _ONE
                if row < rows:
                    row_scale = row_scale_of(
                        a_row_scales, has_row_scales, np.uint32(first_row + row)
                    )
                for group in unroll(range(scale_groups)):
                    block_in_tile = np.uint32(warp_block + np.uint32(group))
                    scale_block = np.uint32(first_block + block_in_tile)
                    amax = _ZERO
                    for c in unroll(range(4)):
                        i = (half // 2) * column_tiles + 4 * group + c
                        gate = scaled(acc[i, 2 * (half % 2)], expert_scale, row_scale)
                        up = scaled(acc[i, 2 * (half % 2) + 1], expert_scale, row_scale)
                        z[c] = activated(gate, up)
                        amax = max_nan(amax, magnitude(z[c]))
                    amax = quad_max(amax)
                    code, multiplier = block_scale(amax, tensor_scale, inverse)
                    low = np.uint32(0)
                    high = np.uint32(0)
                    for c in unroll(range(4)):
                        shift = np.uint32(np.uint32(np.uint32(4) * t) + np.uint32(16 * (c % 2)))
                        nibble = np.uint32(code_of_f32(mul_rn(z[c], multiplier)) << shift)
                        if c < 2:
                            low = np.uint32(low | nibble)
                        else:
                            high = np.uint32(high | nibble)
                    low = quad_or(low)
                    high = quad_or(high)
                    is_stored = row < rows and scale_block < num_blocks
                    if is_stored and t == np.uint32(0):
                        at = np.uint64(np.uint32(first_row + row)) * np.uint64(
                            n >> np.uint32(4)
                        ) + np.uint64(np.uint32(2) * scale_block)
                        store_v2(c_packed, at, low, high)
                    if t == np.uint32(0):
                        at_scale = np.uint32(
                            np.uint32(scales_at) + np.uint32(row * np.uint32(4)) + block_in_tile
                        )
                        smem[at_scale] = code if is_stored else np.uint32(0)
            cuda.syncthreads()
            column_tiles_out = np.uint64(np.uint32(num_blocks + np.uint32(3)) >> np.uint32(2))
            tile_at = (
                np.uint64(tile) * column_tiles_out + np.uint64(first_column >> np.uint32(7))
            ) * np.uint64(128)
            # The block with the slot's last row in this tile also clears the rows after it.
            rows_here = np.uint32(block_m)
            if rows <= np.uint32(block_m):
                rows_here = np.uint32(TILE_ROWS - tile_row)
            row = thread
            while row < rows_here:
                word = np.uint32(0)
                if row < np.uint32(block_m):
                    first = np.uint32(np.uint32(scales_at) + np.uint32(row * np.uint32(4)))
                    word = np.uint32(
                        smem[first]
                        | np.uint32(smem[np.uint32(first + np.uint32(1))] << np.uint32(8))
                        | np.uint32(smem[np.uint32(first + np.uint32(2))] << np.uint32(16))
                        | np.uint32(smem[np.uint32(first + np.uint32(3))] << np.uint32(24))
                    )
                in_tile = np.uint32(tile_row + row)
                inside = np.uint32(
                    np.uint32(np.uint32(in_tile & np.uint32(31)) * np.uint32(4))
                    + np.uint32(in_tile >> np.uint32(5))
                )
                c_swiglu_scales[tile_at + np.uint64(inside)] = word
                row = np.uint32(row + np.uint32(threads))

    return matmul_grouped_swiglu


def launch_matmul_grouped_swiglu(
    executor: Executor,
    c_packed: Any,
    c_swiglu_scales: Any,
    hidden: Any,
    weight: Any,
    a_scales: Any,
    b_scales: Any,
    expert_start: Any,
    a_scale_offsets: Any,
    expert_ids: Any,
    expert_scales: Any,
    c_input_scales: Any,
    a_row_scales: Any,
    *,
    num_active: int,
    num_tiles: int,
    n: int,
    k: int,
    has_row_scales: bool,
    match_bf16: bool,
    config: MatmulConfig,
    stream: Any = None,
) -> None:
    """Launch on flat arrays; ``n`` = 2 D, ``num_tiles`` the first dimension of ``a_scales``.

    Without ``has_row_scales`` the array ``a_row_scales`` is not read.
    """
    make_matmul_grouped_swiglu(config, match_bf16).launch(
        executor,
        (-(-n // BLOCK_N) * num_tiles * (128 // config.block_m), 1, 1),
        c_packed,
        c_swiglu_scales,
        hidden,
        weight,
        a_scales,
        b_scales,
        expert_start,
        a_scale_offsets,
        expert_ids,
        expert_scales,
        c_input_scales,
        a_row_scales,
        num_active,
        n,
        k,
        has_row_scales,
        stream=stream,
    )
