"""FP8 codes and scales to the prepared layouts of `nbmoe.prepared.fp8`, and where rows lie there.

prepare_fp8_weights: units (E, N64, K128, 64, 128) from weight (E, N, K), both u32 views of e4m3
codes, K and N multiples of 8. Rows past N and elements past K are 0.

Thread map: a block makes a unit, in the order of the units; thread i makes chunk i % 8 of the rows
i / 8, i / 8 + 16, ...

prepare_fp8_tokens: panels (K128, R, 128), panel_scales (G, R) f32; codes (M, K), and scales f32
or bf16, scale g of row m at g * GROUP_STRIDE + m * ROW_STRIDE; row_offsets (S + 1,) u32. G is K128
or 1, or 0 for one scale of all rows. Rows that no slot owns are not written, but for the scales of
up to 3 rows past a slot's last, which are 0.

Thread map: block (x, y) handles the panel rows [16 x, 16 x + 16) and the 128-blocks [4 y, 4 y + 4);
8 threads share a row and have a 16-byte chunk each of each 128-block.

Synchronisation: none.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.convert import f32_of_bf16
from nbmoe_kernels.device.memory import store_v4
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.prepared_tokens import token_base, token_rows

THREADS = 128
BLOCK = 128
TOKEN_ROWS = 16
TOKEN_BLOCKS = 4
_UNIT_ROWS = 64
_ONE, _TWO, _THREE = np.uint32(1), np.uint32(2), np.uint32(3)
_SEVEN = np.uint32(7)


@device_function
def find_panel_row(row_offsets, num_slots, num_rows, panel_row):
    """(row, rows): the row of the tokens in a row of the panels, and how many its slot has from
    there on; 0 or less as an i32 past the slot's end. Without slots row is the panel's row."""
    start, end, base = np.uint32(0), num_rows, np.uint32(0)
    if num_slots != np.uint32(0):
        low = np.uint32(0)
        high = num_slots
        while np.uint32(high - low) > np.uint32(1):
            middle = np.uint32(np.uint32(low + high) >> _ONE)
            if token_base(row_offsets[np.uint64(middle)], middle) <= panel_row:
                low = middle
            else:
                high = middle
        start = row_offsets[np.uint64(low)]
        end = row_offsets[np.uint64(low) + np.uint64(1)]
        base = token_base(start, low)
    row = np.uint32(start + np.uint32(panel_row - base))
    # Before the first slot there are open rows, too, if its start is not 0.
    rows = np.int32(np.uint32(end - row))
    return row, rows if panel_row >= base else np.int32(-8)


@device_function
def load_chunk(codes, at_row, column, k):
    """16 codes from ``column`` on as four words; those past K are 0."""
    at = np.uint64(np.uint64(at_row) + np.uint64(column)) >> np.uint64(2)
    a, b, c, d = np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0)
    if column < k:
        a, b = codes[at], codes[at + np.uint64(1)]
    if np.uint32(column + np.uint32(8)) < k:
        c, d = codes[at + np.uint64(2)], codes[at + np.uint64(3)]
    return a, b, c, d


@functools.cache
def make_prepare_fp8_weights() -> Kernel:
    """The kernel; it has no configuration."""

    @kernel(
        "global u32* units, global u32* weight, u32 n, u32 k, u32 n_units, u32 k_blocks",
        threads=THREADS,
        name="prepare_fp8_weights",
    )
    def prepare_fp8_weights(units, weight, n, k, n_units, k_blocks):
        thread = np.uint32(cuda.threadIdx.x)
        unit = np.uint32(cuda.blockIdx.x)
        down = np.uint32(unit // k_blocks)
        across = np.uint32(unit - np.uint32(down * k_blocks))
        expert = np.uint32(down // n_units)
        down = np.uint32(down - np.uint32(expert * n_units))
        chunk = np.uint32(thread & _SEVEN)
        column = np.uint32(np.uint32(across * np.uint32(BLOCK)) + np.uint32(chunk * np.uint32(16)))
        for i in unroll(range(_UNIT_ROWS // TOKEN_ROWS)):
            place = np.uint32(np.uint32(thread >> _THREE) + np.uint32(TOKEN_ROWS * i))
            # Rows 2 g and 2 g + 1 of 16 lie at g and g + 8.
            in_16 = np.uint32(
                np.uint32(np.uint32(place & _SEVEN) << _ONE)
                + np.uint32(np.uint32(place >> _THREE) & _ONE)
            )
            row = np.uint32(np.uint32(down * np.uint32(_UNIT_ROWS)) + np.uint32(16 * i))
            row = np.uint32(row + in_16)
            a, b, c, d = np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0)
            if row < n:
                at_row = (np.uint64(expert) * np.uint64(n) + np.uint64(row)) * np.uint64(k)
                a, b, c, d = load_chunk(weight, at_row, column, k)
            into = np.uint64(unit) * np.uint64(_UNIT_ROWS * BLOCK // 4)
            swizzled = np.uint32(chunk ^ np.uint32(place & _SEVEN))
            into = into + np.uint64(
                np.uint32(np.uint32(place << np.uint32(5)) + np.uint32(swizzled << _TWO))
            )
            store_v4(units, into, a, b, c, d)

    return prepare_fp8_weights


def launch_prepare_fp8_weights(
    executor: Executor,
    units: Any,
    weight: Any,
    *,
    num_experts: int,
    n: int,
    k: int,
    stream: Any = None,
) -> None:
    """Launch on flat arrays of bytes."""
    n_units, k_blocks = 2 * -(-n // BLOCK), -(-k // BLOCK)
    make_prepare_fp8_weights().launch(
        executor,
        (num_experts * n_units * k_blocks, 1, 1),
        units,
        weight,
        n,
        k,
        n_units,
        k_blocks,
        stream=stream,
    )


@functools.cache
def make_prepare_fp8_tokens(scale_type: str) -> Kernel:
    """The kernel for "f32" or "bf16" scales."""
    pointer = {"f32": "f32", "bf16": "u16"}[scale_type]
    is_bf16 = scale_type == "bf16"

    @kernel(
        f"global u32* panels, global f32* panel_scales, global u32* codes, global {pointer}* "
        "scales, global u32* row_offsets, u32 num_slots, u32 num_rows, u32 panel_rows, u32 k, "
        "u32 num_groups, u64 group_stride, u32 row_stride",
        threads=THREADS,
        name=f"prepare_fp8_tokens_{scale_type}",
    )
    def prepare_fp8_tokens(
        panels,
        panel_scales,
        codes,
        scales,
        row_offsets,
        num_slots,
        num_rows,
        panel_rows,
        k,
        num_groups,
        group_stride,
        row_stride,
    ):
        thread = np.uint32(cuda.threadIdx.x)
        panel_row = np.uint32(
            np.uint32(np.uint32(cuda.blockIdx.x) * np.uint32(TOKEN_ROWS))
            + np.uint32(thread >> _THREE)
        )
        if panel_row < panel_rows:
            chunk = np.uint32(thread & _SEVEN)
            row, rows = find_panel_row(row_offsets, num_slots, num_rows, panel_row)
            first = np.uint32(np.uint32(cuda.blockIdx.y) * np.uint32(TOKEN_BLOCKS))
            is_first = first == np.uint32(0) and panel_row == np.uint32(0) and chunk == np.uint32(0)
            if is_first and num_groups == np.uint32(0):
                one = scales[np.uint64(0)]
                panel_scales[np.uint64(0)] = f32_of_bf16(one) if is_bf16 else one
            for i in unroll(range(TOKEN_BLOCKS)):
                block = np.uint32(first + np.uint32(i))
                column = np.uint32(
                    np.uint32(block * np.uint32(BLOCK)) + np.uint32(chunk * np.uint32(16))
                )
                at = np.uint64(block) * np.uint64(panel_rows) + np.uint64(panel_row)
                is_block = np.uint32(block * np.uint32(BLOCK)) < k
                if rows > np.int32(0) and is_block:
                    a, b, c, d = load_chunk(codes, np.uint64(row) * np.uint64(k), column, k)
                    swizzled = np.uint32(chunk ^ np.uint32(panel_row & _SEVEN))
                    into = at * np.uint64(BLOCK // 4) + np.uint64(np.uint32(swizzled << _TWO))
                    store_v4(panels, into, a, b, c, d)
                # The matmul copies scales by fours.
                if rows > np.int32(-3) and block < num_groups and chunk == np.uint32(0):
                    value = np.float32(0.0)
                    if rows > np.int32(0):
                        from_at = np.uint64(block) * group_stride
                        from_at = from_at + np.uint64(row) * np.uint64(row_stride)
                        value = f32_of_bf16(scales[from_at]) if is_bf16 else scales[from_at]
                    panel_scales[at] = value

    return prepare_fp8_tokens


def launch_prepare_fp8_tokens(
    executor: Executor,
    panels: Any,
    panel_scales: Any,
    codes: Any,
    scales: Any,
    row_offsets: Any,
    *,
    scale_type: str,
    num_slots: int,
    num_rows: int,
    k: int,
    num_groups: int,
    group_stride: int,
    row_stride: int,
    stream: Any = None,
) -> None:
    """Launch on flat arrays. ``row_offsets`` is not read if ``num_slots`` is 0: one slot of all."""
    panel_rows = token_rows(num_rows, max(num_slots, 1))
    block_columns = BLOCK * TOKEN_BLOCKS
    make_prepare_fp8_tokens(scale_type).launch(
        executor,
        (-(-panel_rows // TOKEN_ROWS), -(-k // block_columns), 1),
        panels,
        panel_scales,
        codes,
        scales,
        row_offsets,
        num_slots,
        num_rows,
        panel_rows,
        k,
        num_groups,
        group_stride,
        row_stride,
        stream=stream,
    )
