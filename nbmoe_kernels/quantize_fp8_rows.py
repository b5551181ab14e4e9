"""FP8 quantize with a scale a row, or a group of any size: bf16 to e4m3 and scales.

Codes and scales as in `nbmoe_kernels.quantize_fp8_scale`. The scales are transposed: scale g of row
m is at g * padded_rows + m.

Shapes: codes (M, K) e4m3; scales (G, padded_rows) f32, bf16 or e8m0 with G = ceil(K / group); input
(M, K) bf16; row_offsets (S + 1,) u32. Items of 8 values need K and the group to be multiples of 8.

Thread map: block x handles group x % G of row x / G; thread t takes items t, t + 256, ... of the
group, once for the largest magnitude and, from the cache, once for the codes.

Padding: columns of scales from M to padded_rows are 0. With row_offsets, rows are those before
row_offsets[S], and nothing from there on is written, padding included.

Synchronisation: one block barrier between the warps' maxima and their reading (256 threads arrive
and wait).
"""

import functools

import numpy as np
from numba import cuda

from nbmoe_kernels.device.math import bits_f32
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.warp import reduce_lanes
from nbmoe_kernels.kernel import Kernel, kernel
from nbmoe_kernels.quantize_fp8_items import make_items
from nbmoe_kernels.quantize_fp8_scale import store_scale, stored_scale

THREADS = 256
WARPS = THREADS // 32

max_of_warp = reduce_lanes("max")


@device_function
def max_of_block(largest, thread, warp_maxima):
    """The largest value of a block's threads; ``warp_maxima`` is shared memory, a word a warp."""
    largest = max_of_warp(largest)
    if np.uint32(thread & np.uint32(31)) == np.uint32(0):
        warp_maxima[np.uint32(thread >> np.uint32(5))] = largest
    cuda.syncthreads()
    for w in unroll(range(WARPS)):
        largest = max(largest, warp_maxima[w])
    return largest


@functools.cache
def make_quantize_fp8_rows(kind: str) -> Kernel:
    """The kernel for items of a kind: "bf16x8" or "bf16"."""
    items = make_items(kind)
    width = np.uint32(items.width)
    item_magnitude, quantize_item = items.magnitude, items.quantize

    @kernel(
        f"global {items.codes}* codes, global u32* scales_4, global u16* scales_2, "
        f"global u8* scales_1, global {items.input}* input, global u32* row_offsets, "
        "u32 num_slots, u32 num_rows, u32 num_cols, u32 group, u32 num_groups, u32 padded_rows, "
        "u32 scale_bytes, f32 scale_ub, f32 amax_floor",
        threads=THREADS,
        name=f"quantize_fp8_rows_{kind}",
    )
    def quantize_fp8_rows(
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
        num_groups,
        padded_rows,
        scale_bytes,
        scale_ub,
        amax_floor,
    ):
        warp_maxima = cuda.shared.array(WARPS, np.uint32)
        rows = num_rows
        written = padded_rows
        if num_slots != np.uint32(0):
            rows = row_offsets[np.uint64(num_slots)]
            written = rows
        block = np.uint32(cuda.blockIdx.x)
        row = np.uint32(block // num_groups)
        if row < written:
            thread = np.uint32(cuda.threadIdx.x)
            index = np.uint32(block - np.uint32(row * num_groups))
            begin = np.uint32(np.uint32(index * group) // width)
            end = np.uint32(min(np.uint32(np.uint32(index * group) + group), num_cols) // width)
            if row >= rows:
                end = begin
            first = np.uint64(row) * np.uint64(np.uint32(num_cols // width))
            largest = np.uint32(0)
            item = np.uint32(begin + thread)
            while item < end:
                largest = max(largest, item_magnitude(input, first + np.uint64(item)))
                item = np.uint32(item + np.uint32(THREADS))
            largest = max_of_block(largest, thread, warp_maxima)
            amax = bits_f32(np.uint32(largest << np.uint32(16)))
            bits, multiplier = stored_scale(amax, scale_bytes, scale_ub, amax_floor)
            if thread == np.uint32(0):
                at = np.uint64(index) * np.uint64(padded_rows) + np.uint64(row)
                stored = bits if row < rows else np.uint32(0)
                store_scale(scales_4, scales_2, scales_1, scale_bytes, at, stored)
            item = np.uint32(begin + thread)
            while item < end:
                quantize_item(codes, input, first + np.uint64(item), multiplier)
                item = np.uint32(item + np.uint32(THREADS))

    return quantize_fp8_rows
