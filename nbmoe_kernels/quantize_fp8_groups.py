"""FP8 quantize with a scale a group of up to 128 values of a row: bf16 to e4m3 and scales.

Codes and scales as in `nbmoe_kernels.quantize_fp8_scale`. The scales are transposed: scale g of row
m is at g * padded_rows + m.

Shapes: codes (M, K) e4m3; scales (G, padded_rows) f32, bf16 or e8m0 with G = ceil(K / group); input
(M, K) bf16; row_offsets (S + 1,) u32. K and the group are multiples of 8.

Thread map: block (x, y) handles rows [8 x, 8 x + 8) and groups [4 y, 4 y + 4). The 16 threads of
half a warp share a row, and each holds 8 values of each group. So the scales of a group's 8 rows,
neighbours in memory, are stored by one block.

Padding: columns of scales from M to padded_rows are 0. With row_offsets, rows are those before
row_offsets[S], and nothing from there on is written, padding included.

Synchronisation: none but the warp's shuffles.
"""

import functools

import numpy as np
from numba import cuda

from nbmoe_kernels.device.math import bits_f32
from nbmoe_kernels.device.memory import load_v4, store_v2
from nbmoe_kernels.device.op import unroll
from nbmoe_kernels.device.warp import shuffle_xor
from nbmoe_kernels.kernel import Kernel, kernel
from nbmoe_kernels.quantize_fp8_scale import codes_4, magnitudes, store_scale, stored_scale

THREADS = 128
ROWS = 8
CHUNK = 4
WORDS = 4 * CHUNK
MAX_GROUP = 128


@functools.cache
def make_quantize_fp8_groups() -> Kernel:
    """The kernel; it has no configuration."""

    @kernel(
        "global u32* codes, global u32* scales_4, global u16* scales_2, global u8* scales_1, "
        "global u32* input, global u32* row_offsets, u32 num_slots, u32 num_rows, u32 num_cols, "
        "u32 group, u32 padded_rows, u32 scale_bytes, f32 scale_ub, f32 amax_floor",
        threads=THREADS,
        name="quantize_fp8_groups",
    )
    def quantize_fp8_groups(
        codes,
        scales_4,
        scales_2,
        scales_1,
        input,
        row_offsets,
        num_slots,
        num_rows,
        num_cols,
        group,
        padded_rows,
        scale_bytes,
        scale_ub,
        amax_floor,
    ):
        rows = num_rows
        written = padded_rows
        if num_slots != np.uint32(0):
            rows = row_offsets[np.uint64(num_slots)]
            written = rows
        first_row = np.uint32(np.uint32(cuda.blockIdx.x) * np.uint32(ROWS))
        if first_row < written:
            thread = np.uint32(cuda.threadIdx.x)
            row = np.uint32(first_row + np.uint32(thread >> np.uint32(4)))
            lane = np.uint32(thread & np.uint32(15))
            lane_column = np.uint32(lane * np.uint32(8))
            first_group = np.uint32(np.uint32(cuda.blockIdx.y) * np.uint32(CHUNK))
            row_words = np.uint64(row) * np.uint64(num_cols >> np.uint32(1))
            in_group = row < rows and lane_column < group
            words = cuda.local.array(WORDS, np.uint32)
            # All loads are issued before the first is used.
            for g in unroll(range(CHUNK)):
                column = np.uint32(np.uint32(np.uint32(first_group + np.uint32(g)) * group))
                column = np.uint32(column + lane_column)
                w0, w1, w2, w3 = np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0)
                if in_group and column < num_cols:
                    w0, w1, w2, w3 = load_v4(input, row_words + np.uint64(column >> np.uint32(1)))
                words[4 * g] = w0
                words[4 * g + 1] = w1
                words[4 * g + 2] = w2
                words[4 * g + 3] = w3
            for g in unroll(range(CHUNK)):
                begin = np.uint32(np.uint32(first_group + np.uint32(g)) * group)
                column = np.uint32(begin + lane_column)
                w0, w1, w2, w3 = words[4 * g], words[4 * g + 1], words[4 * g + 2], words[4 * g + 3]
                largest = magnitudes(w0, w1, w2, w3)
                for step in unroll(range(4)):
                    largest = max(largest, shuffle_xor(largest, np.uint32(1 << step)))
                amax = bits_f32(np.uint32(largest << np.uint32(16)))
                bits, multiplier = stored_scale(amax, scale_bytes, scale_ub, amax_floor)
                if in_group and column < num_cols:
                    store_v2(
                        codes,
                        (row_words + np.uint64(column >> np.uint32(1))) >> np.uint64(1),
                        codes_4(w0, w1, multiplier),
                        codes_4(w2, w3, multiplier),
                    )
                if lane == np.uint32(0) and row < written and begin < num_cols:
                    at = np.uint64(np.uint32(first_group + np.uint32(g))) * np.uint64(padded_rows)
                    stored = bits if row < rows else np.uint32(0)
                    store_scale(
                        scales_4, scales_2, scales_1, scale_bytes, at + np.uint64(row), stored
                    )

    return quantize_fp8_groups
