"""Row scales for NVFP4: what brings a row's largest magnitude into the format's range.

    row_scales[m] = bf16(max(amax_m / 2688, 1e-30))                              2688 = 6 * 448

with amax_m the largest magnitude of the row that output row m reads; with relu2 the largest of
bf16(max(x, 0)^2), which is that of the largest x since squaring and rounding keep the order.

Shapes: row_scales (M,) bf16; input (R, K) bf16; row_offsets (S + 1,) u32; scales_offsets (S,) u32;
expert_ids (S,) i32; indices (M,) u32. K is a multiple of 16.

Thread map: block (x, y) handles rows [16 y, 16 y + 16) of scale tile x, a warp four of them, a lane
every 32nd group of 8 columns.

Padding: rows of no slot are not written; rows of a slot with expert id -1 get 0.

Synchronisation: the lanes of a warp join their maxima by butterfly shuffles.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.convert import bf16x2_of_f32, f32_of_bf16, max_nan_bf16x2
from nbmoe_kernels.device.math import bits_f32, div_rn, f32_bits, max_nan
from nbmoe_kernels.device.memory import load_v4
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.warp import shuffle_xor
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.quantize_tile import relu_squared
from nbmoe_kernels.search import locate_rows

THREADS = 128
WARP_ROWS = 4
BLOCK_ROWS = WARP_ROWS * THREADS // 32
_ZERO = np.float32(0.0)
_RANGE, _SMALLEST = np.float32(2688.0), np.float32(1e-30)


@device_function
def warp_max(x):
    """The largest x of a warp's lanes; NaN wins."""
    x = max_nan(x, bits_f32(shuffle_xor(f32_bits(x), np.uint32(16))))
    x = max_nan(x, bits_f32(shuffle_xor(f32_bits(x), np.uint32(8))))
    x = max_nan(x, bits_f32(shuffle_xor(f32_bits(x), np.uint32(4))))
    x = max_nan(x, bits_f32(shuffle_xor(f32_bits(x), np.uint32(2))))
    return max_nan(x, bits_f32(shuffle_xor(f32_bits(x), np.uint32(1))))


@functools.cache
def make_row_scales() -> Kernel:
    """The kernel."""

    @kernel(
        "global u16* row_scales, global u32* input, global u32* row_offsets, "
        "global u32* scales_offsets, global i32* expert_ids, global u32* indices, u32 num_active, "
        "u32 num_cols, u32 indices_divisor, u32 has_indices, u32 has_ids, u32 relu2",
        threads=THREADS,
        name="row_scales",
    )
    def row_scales_of(
        row_scales,
        input,
        row_offsets,
        scales_offsets,
        expert_ids,
        indices,
        num_active,
        num_cols,
        indices_divisor,
        has_indices,
        has_ids,
        relu2,
    ):
        thread = np.uint32(cuda.threadIdx.x)
        lane = np.uint32(thread & np.uint32(31))
        warp_row = np.uint32(np.uint32(thread >> np.uint32(5)) * np.uint32(WARP_ROWS))
        tile_row = np.uint32(np.uint32(cuda.blockIdx.y) * np.uint32(BLOCK_ROWS))
        slot, first_row, rows = locate_rows(
            row_offsets,
            scales_offsets,
            num_active,
            np.uint32(cuda.blockIdx.x),
            np.uint32(tile_row + warp_row),
        )
        is_active = True
        if rows > np.uint32(0) and has_ids != np.uint32(0):
            is_active = expert_ids[np.uint64(slot)] >= np.int32(0)
        # Without relu2 signs are cut, with it negative values lose against the initial 0.
        kept = np.uint32(0x7FFF7FFF) if relu2 == np.uint32(0) else np.uint32(0xFFFFFFFF)
        for i in unroll(range(WARP_ROWS)):
            if np.uint32(i) < rows:
                row = np.uint32(first_row + np.uint32(i))
                largest = np.uint32(0)
                if is_active:
                    source = row
                    if has_indices != np.uint32(0):
                        source = np.uint32(indices[np.uint64(row)] // indices_divisor)
                    start = np.uint64(source) * np.uint64(num_cols >> np.uint32(1))
                    group = lane
                    while group < np.uint32(num_cols >> np.uint32(3)):
                        at = start + np.uint64(group) * np.uint64(4)
                        w0, w1, w2, w3 = load_v4(input, at)
                        front = max_nan_bf16x2(np.uint32(w0 & kept), np.uint32(w1 & kept))
                        back = max_nan_bf16x2(np.uint32(w2 & kept), np.uint32(w3 & kept))
                        largest = max_nan_bf16x2(largest, max_nan_bf16x2(front, back))
                        group = np.uint32(group + np.uint32(32))
                high = bits_f32(np.uint32(largest & np.uint32(0xFFFF0000)))
                amax = warp_max(max_nan(f32_of_bf16(largest), high))
                if relu2 != np.uint32(0):
                    amax = relu_squared(amax)
                scale = bf16x2_of_f32(_ZERO, max_nan(div_rn(amax, _RANGE), _SMALLEST))
                if lane == np.uint32(0):
                    row_scales[np.uint64(row)] = np.uint16(scale if is_active else np.uint32(0))

    return row_scales_of


def launch_row_scales(
    executor: Executor,
    row_scales: Any,
    input: Any,
    row_offsets: Any,
    scales_offsets: Any,
    expert_ids: Any,
    indices: Any,
    *,
    num_active: int,
    num_cols: int,
    num_tiles: int,
    indices_divisor: int,
    has_indices: bool,
    has_ids: bool,
    relu2: bool,
    stream: Any = None,
) -> None:
    """Launch on flat arrays, in the kernel's parameter types."""
    make_row_scales().launch(
        executor,
        (num_tiles, 128 // BLOCK_ROWS, 1),
        row_scales,
        input,
        row_offsets,
        scales_offsets,
        expert_ids,
        indices,
        num_active,
        num_cols,
        indices_divisor,
        has_indices,
        has_ids,
        relu2,
        stream=stream,
    )
