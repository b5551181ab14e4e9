"""Grouped NVFP4 quantize: bf16 rows to e2m1 codes and 5-D tiles of e4m3 block scales.

For each block of 16 columns of a row: `nbmoe_kernels.device.nvfp4.block_scale` of the largest
magnitude under sf_tensor[expert_ids[slot]], and the code of every element. Output row m reads input
row m, or indices[m] // indices_divisor.

Shapes: output (M, K/2) u8; scales (tiles, ceil(K/64), 32, 4, 4) u8; input (R, K) bf16; row_offsets
(S + 1,) u32; scales_offsets (S,) u32; expert_ids (S,) i32; sf_tensor (E,) f32; indices (M,) u32.
K is a multiple of 16.

Thread map: block (x, y) handles scale tile x (128 rows of one slot) and columns [64 y, 64 y + 64).
Thread t handles the 16 columns of scale column t % 4 in rows t // 4 + 32 p, p = 0..3: a whole
block, so no lane needs another. Scale bytes meet in shared memory, byte (t // 4) * 16 + p * 4 +
t % 4, and leave as one contiguous 512-byte tile.

Padding: rows past the slot's last and columns past K get scale 0 and no codes; tiles that belong to
no slot are not written. A slot with expert id -1 gets zeros.

Synchronisation: one block barrier between the bytes' stores and the tile's stores (128 threads
arrive and wait).
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.convert import max_nan_bf16x2
from nbmoe_kernels.device.math import bits_f32, div_rn, max_nan
from nbmoe_kernels.device.memory import load_shared_word, load_v4, store_v2
from nbmoe_kernels.device.nvfp4 import NAN_SCALE, block_scale, quantize_8
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.search import locate_rows

THREADS = 128
TILE_COLUMNS = 64
PASSES = 4
THREAD_WORDS = 8 * PASSES
_ONE = np.float32(1.0)
_MAGNITUDES = np.uint32(0x7FFF7FFF)
_ALL_SIGNS = np.uint32(0x88888888)


@device_function
def block_amax(words, at):
    """Largest magnitude of the 16 bf16 in words[at : at + 8]; NaN if any is."""
    largest = np.uint32(words[at] & _MAGNITUDES)
    for i in unroll(range(1, 8)):
        largest = max_nan_bf16x2(largest, np.uint32(words[at + i] & _MAGNITUDES))
    low = bits_f32(np.uint32(largest << np.uint32(16)))
    return max_nan(low, bits_f32(np.uint32(largest & np.uint32(0xFFFF0000))))


@functools.cache
def make_quantize_grouped() -> Kernel:
    """The kernel for NVFP4."""

    @kernel(
        "global u32* output, global u32* scales, global u32* input, global u32* row_offsets, "
        "global u32* scales_offsets, global i32* expert_ids, global f32* sf_tensor, "
        "global u32* indices, u32 num_active, u32 num_cols, u32 indices_divisor, u32 has_indices",
        threads=THREADS,
        name="quantize_grouped_nvfp4",
    )
    def quantize_grouped(
        output,
        scales,
        input,
        row_offsets,
        scales_offsets,
        expert_ids,
        sf_tensor,
        indices,
        num_active,
        num_cols,
        indices_divisor,
        has_indices,
    ):
        scale_bytes = cuda.shared.array(512, np.uint8, alignment=16)
        tile = np.uint32(cuda.blockIdx.x)
        column_tile = np.uint32(cuda.blockIdx.y)
        thread = np.uint32(cuda.threadIdx.x)
        slot, first_row, rows = locate_rows(
            row_offsets, scales_offsets, num_active, tile, np.uint32(0)
        )
        if rows > np.uint32(0):
            expert = expert_ids[np.uint64(slot)]
            lane_row = np.uint32(thread >> np.uint32(2))
            scale_column = np.uint32(thread & np.uint32(3))
            column = np.uint32(column_tile * np.uint32(TILE_COLUMNS)) + np.uint32(
                scale_column * np.uint32(16)
            )
            column = np.uint32(column)
            in_columns = column < num_cols and expert >= np.int32(0)
            words = cuda.local.array(THREAD_WORDS, np.uint32)
            # All loads are issued before the first is used.
            for p in unroll(range(PASSES)):
                row = np.uint32(lane_row + np.uint32(32 * p))
                if in_columns and row < rows:
                    source = np.uint32(first_row + row)
                    if has_indices != np.uint32(0):
                        source = np.uint32(indices[np.uint64(source)] // indices_divisor)
                    at = np.uint64(source) * np.uint64(num_cols >> np.uint32(1)) + np.uint64(
                        column >> np.uint32(1)
                    )
                    w0, w1, w2, w3 = load_v4(input, at)
                    w4, w5, w6, w7 = load_v4(input, at + np.uint64(4))
                    words[8 * p] = w0
                    words[8 * p + 1] = w1
                    words[8 * p + 2] = w2
                    words[8 * p + 3] = w3
                    words[8 * p + 4] = w4
                    words[8 * p + 5] = w5
                    words[8 * p + 6] = w6
                    words[8 * p + 7] = w7
            tensor_scale = _ONE
            if expert >= np.int32(0):
                tensor_scale = sf_tensor[np.uint64(expert)]
            inverse = div_rn(_ONE, tensor_scale)
            for p in unroll(range(PASSES)):
                row = np.uint32(lane_row + np.uint32(32 * p))
                code = np.uint32(0)
                if row < rows and column < num_cols:
                    low = np.uint32(0)
                    high = np.uint32(0)
                    if expert >= np.int32(0):
                        amax = block_amax(words, 8 * p)
                        code, multiplier = block_scale(amax, tensor_scale, inverse)
                        # A NaN block's codes are all 7: no signs.
                        signs = np.uint32(0) if code == NAN_SCALE else _ALL_SIGNS
                        low = quantize_8(
                            words[8 * p],
                            words[8 * p + 1],
                            words[8 * p + 2],
                            words[8 * p + 3],
                            multiplier,
                            signs,
                        )
                        high = quantize_8(
                            words[8 * p + 4],
                            words[8 * p + 5],
                            words[8 * p + 6],
                            words[8 * p + 7],
                            multiplier,
                            signs,
                        )
                    at = np.uint64(np.uint32(first_row + row)) * np.uint64(
                        num_cols >> np.uint32(3)
                    ) + np.uint64(column >> np.uint32(3))
                    store_v2(output, at, low, high)
                byte = np.uint32(thread >> np.uint32(2)) * np.uint32(16) + np.uint32(4 * p)
                scale_bytes[np.uint32(byte + scale_column)] = np.uint8(code)
            cuda.syncthreads()
            column_tiles = np.uint64(cuda.gridDim.y)
            at = (np.uint64(tile) * column_tiles + np.uint64(column_tile)) * np.uint64(128)
            scales[at + np.uint64(thread)] = load_shared_word(
                scale_bytes, np.uint32(thread * np.uint32(4))
            )

    return quantize_grouped


def launch_quantize_grouped(
    executor: Executor,
    output: Any,
    scales: Any,
    input: Any,
    row_offsets: Any,
    scales_offsets: Any,
    expert_ids: Any,
    sf_tensor: Any,
    indices: Any,
    *,
    num_active: int,
    num_cols: int,
    num_tiles: int,
    indices_divisor: int,
    has_indices: bool,
    stream: Any = None,
) -> None:
    """Launch on flat arrays, in the kernel's parameter types.

    ``num_active`` is the number of slots, ``num_tiles`` the first dimension of ``scales``. Without
    ``has_indices`` the array ``indices`` is not read.
    """
    make_quantize_grouped().launch(
        executor,
        (num_tiles, -(-num_cols // TILE_COLUMNS), 1),
        output,
        scales,
        input,
        row_offsets,
        scales_offsets,
        expert_ids,
        sf_tensor,
        indices,
        num_active,
        num_cols,
        indices_divisor,
        has_indices,
        stream=stream,
    )
