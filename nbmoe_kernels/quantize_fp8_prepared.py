"""FP8 quantize with a scale a group of 128, straight to prepared tokens (`nbmoe.prepared.fp8`).

Codes and scales as in `nbmoe_kernels.quantize_fp8_scale`, f32 scales; the same as of
`nbmoe_kernels.quantize_fp8_groups` and then `nbmoe_kernels.prepare_fp8`, in one pass.

Shapes: panels (K128, R, 128) e4m3; panel_scales (K128, R) f32; input (M, K) bf16; row_offsets
(S + 1,) u32. K is a multiple of 8. Elements past K are 0. Rows that no slot owns are not written,
but for the scales of up to 3 rows past a slot's last, which are 0.

Thread map: block (x, y) handles the panel rows [8 x, 8 x + 8) and the groups [4 y, 4 y + 4). The 16
threads of half a warp share a row, and each holds 8 values of each group.

Synchronisation: none but the warp's shuffles.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.math import bits_f32, f32_bits
from nbmoe_kernels.device.memory import load_v4, store_v2
from nbmoe_kernels.device.op import unroll
from nbmoe_kernels.device.warp import shuffle_xor
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.prepare_fp8 import find_panel_row
from nbmoe_kernels.prepared_tokens import token_rows
from nbmoe_kernels.quantize_fp8_scale import bounded_scale, codes_4, magnitudes, multiplier_of

THREADS = 128
ROWS = 8
CHUNK = 4
WORDS = 4 * CHUNK
GROUP = 128


@functools.cache
def make_quantize_fp8_prepared() -> Kernel:
    """The kernel; it has no configuration."""

    @kernel(
        "global u32* panels, global u32* panel_scales, global u32* input, global u32* row_offsets, "
        "u32 num_slots, u32 num_rows, u32 panel_rows, u32 num_cols, f32 scale_ub",
        threads=THREADS,
        name="quantize_fp8_prepared",
    )
    def quantize_fp8_prepared(
        panels,
        panel_scales,
        input,
        row_offsets,
        num_slots,
        num_rows,
        panel_rows,
        num_cols,
        scale_ub,
    ):
        thread = np.uint32(cuda.threadIdx.x)
        panel_row = np.uint32(
            np.uint32(np.uint32(cuda.blockIdx.x) * np.uint32(ROWS))
            + np.uint32(thread >> np.uint32(4))
        )
        lane = np.uint32(thread & np.uint32(15))
        row, rows = find_panel_row(row_offsets, num_slots, num_rows, panel_row)
        first = np.uint32(np.uint32(cuda.blockIdx.y) * np.uint32(CHUNK))
        row_words = np.uint64(row) * np.uint64(num_cols >> np.uint32(1))
        words = cuda.local.array(WORDS, np.uint32)
        # All loads are issued before the first is used.
        for g in unroll(range(CHUNK)):
            column = np.uint32(np.uint32(first + np.uint32(g)) * np.uint32(GROUP))
            column = np.uint32(column + np.uint32(lane * np.uint32(8)))
            w0, w1, w2, w3 = np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0)
            if rows > np.int32(0) and column < num_cols:
                w0, w1, w2, w3 = load_v4(input, row_words + np.uint64(column >> np.uint32(1)))
            words[4 * g] = w0
            words[4 * g + 1] = w1
            words[4 * g + 2] = w2
            words[4 * g + 3] = w3
        chunk = np.uint32(np.uint32(lane >> np.uint32(1)) ^ np.uint32(panel_row & np.uint32(7)))
        in_row = np.uint32(
            np.uint32(chunk << np.uint32(2))
            + np.uint32(np.uint32(lane & np.uint32(1)) << np.uint32(1))
        )
        for g in unroll(range(CHUNK)):
            group = np.uint32(first + np.uint32(g))
            begin = np.uint32(group * np.uint32(GROUP))
            column = np.uint32(begin + np.uint32(lane * np.uint32(8)))
            w0, w1, w2, w3 = words[4 * g], words[4 * g + 1], words[4 * g + 2], words[4 * g + 3]
            largest = magnitudes(w0, w1, w2, w3)
            for step in unroll(range(4)):
                largest = max(largest, shuffle_xor(largest, np.uint32(1 << step)))
            scale = bounded_scale(bits_f32(np.uint32(largest << np.uint32(16))), scale_ub)
            multiplier = multiplier_of(scale)
            at = np.uint64(group) * np.uint64(panel_rows) + np.uint64(panel_row)
            if begin < num_cols and panel_row < panel_rows:
                if rows > np.int32(0):
                    low, high = np.uint32(0), np.uint32(0)
                    if column < num_cols:
                        low, high = codes_4(w0, w1, multiplier), codes_4(w2, w3, multiplier)
                    into = at * np.uint64(GROUP // 4) + np.uint64(in_row)
                    store_v2(panels, into, low, high)
                # The matmul copies scales by fours.
                if rows > np.int32(-3) and lane == np.uint32(0):
                    panel_scales[at] = f32_bits(scale) if rows > np.int32(0) else np.uint32(0)

    return quantize_fp8_prepared


def launch_quantize_fp8_prepared(
    executor: Executor,
    panels: Any,
    panel_scales: Any,
    input: Any,
    row_offsets: Any,
    *,
    num_slots: int,
    num_rows: int,
    num_cols: int,
    scale_ub: float,
    stream: Any = None,
) -> None:
    """Launch on flat arrays, in the kernel's parameter types.

    ``row_offsets`` is not read if ``num_slots`` is 0: one slot of all rows.
    """
    panel_rows = token_rows(num_rows, max(num_slots, 1))
    groups = -(-num_cols // GROUP)
    make_quantize_fp8_prepared().launch(
        executor,
        (-(-panel_rows // ROWS), -(-groups // CHUNK), 1),
        panels,
        panel_scales,
        input,
        row_offsets,
        num_slots,
        num_rows,
        panel_rows,
        num_cols,
        scale_ub,
        stream=stream,
    )
