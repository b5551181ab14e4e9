"""FP8 quantize with one scale for a matrix: its largest magnitude, then scale and codes.

Scale and codes as in `nbmoe_kernels.quantize_fp8_scale`, f32 scale.

Shapes: codes (M, K) e4m3; scale (1,) f32; partials (blocks,) u32; input (M, K) bf16; row_offsets
(S + 1,) u32. With row_offsets only rows before row_offsets[S] are read and written. Items of 8
values need K to be a multiple of 8.

Thread map: block x of `amax` leaves the largest magnitude of items x * 256 + t, stepping by all
threads of the grid, in partials[x]. Every block of `quantize` reads all partials, which the first
launch has completed, and takes its items in the same steps; block 0 stores the scale. A maximum has
no order, so the grid does not show in the result.

Synchronisation: one block barrier between the warps' maxima and their reading (256 threads arrive
and wait).
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.math import bits_f32
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.quantize_fp8_items import make_items
from nbmoe_kernels.quantize_fp8_rows import THREADS, WARPS, max_of_block
from nbmoe_kernels.quantize_fp8_scale import bounded_scale, multiplier_of

MAX_PARTIALS = 1024
"""What a caller's workspace must hold [words]."""
ITEMS_PER_THREAD = 4
GIVEN, INVERTED, STORED = np.uint32(0), np.uint32(1), np.uint32(2)
"""Multiplier of a static scale: the launch's number, 1 / scale[0], scale[0]."""


@device_function
def used_items(row_offsets, num_slots, num_rows, row_items):
    """Items of the rows that are quantized."""
    rows = num_rows
    if num_slots != np.uint32(0):
        rows = row_offsets[np.uint64(num_slots)]
    return np.uint64(rows) * np.uint64(row_items)


@functools.cache
def make_fp8_tensor_amax(kind: str) -> Kernel:
    """The kernel for items of a kind: "bf16x8" or "bf16"."""
    items = make_items(kind)
    item_magnitude = items.magnitude

    @kernel(
        f"global u32* partials, global {items.input}* input, global u32* row_offsets, "
        "u32 num_slots, u32 num_rows, u32 row_items",
        threads=THREADS,
        name=f"fp8_tensor_amax_{kind}",
    )
    def fp8_tensor_amax(partials, input, row_offsets, num_slots, num_rows, row_items):
        warp_maxima = cuda.shared.array(WARPS, np.uint32)
        thread = np.uint32(cuda.threadIdx.x)
        block = np.uint32(cuda.blockIdx.x)
        end = used_items(row_offsets, num_slots, num_rows, row_items)
        step = np.uint64(np.uint32(cuda.gridDim.x) * np.uint32(THREADS))
        item = np.uint64(np.uint32(np.uint32(block * np.uint32(THREADS)) + thread))
        largest = np.uint32(0)
        while item < end:
            largest = max(largest, item_magnitude(input, item))
            item = np.uint64(item + step)
        largest = max_of_block(largest, thread, warp_maxima)
        if thread == np.uint32(0):
            partials[np.uint64(block)] = largest

    return fp8_tensor_amax


@functools.cache
def make_quantize_fp8_tensor(kind: str) -> Kernel:
    """The kernel for items of a kind: "bf16x8" or "bf16"."""
    items = make_items(kind)
    quantize_item = items.quantize

    @kernel(
        f"global {items.codes}* codes, global f32* scale, global u32* partials, "
        f"global {items.input}* input, global u32* row_offsets, u32 num_partials, u32 num_slots, "
        "u32 num_rows, u32 row_items, f32 scale_ub",
        threads=THREADS,
        name=f"quantize_fp8_tensor_{kind}",
    )
    def quantize_fp8_tensor(
        codes,
        scale,
        partials,
        input,
        row_offsets,
        num_partials,
        num_slots,
        num_rows,
        row_items,
        scale_ub,
    ):
        warp_maxima = cuda.shared.array(WARPS, np.uint32)
        thread = np.uint32(cuda.threadIdx.x)
        block = np.uint32(cuda.blockIdx.x)
        largest = np.uint32(0)
        partial = thread
        while partial < num_partials:
            largest = max(largest, partials[np.uint64(partial)])
            partial = np.uint32(partial + np.uint32(THREADS))
        largest = max_of_block(largest, thread, warp_maxima)
        own_scale = bounded_scale(bits_f32(np.uint32(largest << np.uint32(16))), scale_ub)
        if block == np.uint32(0) and thread == np.uint32(0):
            scale[np.uint64(0)] = own_scale
        multiplier = multiplier_of(own_scale)
        end = used_items(row_offsets, num_slots, num_rows, row_items)
        step = np.uint64(np.uint32(cuda.gridDim.x) * np.uint32(THREADS))
        item = np.uint64(np.uint32(np.uint32(block * np.uint32(THREADS)) + thread))
        while item < end:
            quantize_item(codes, input, item, multiplier)
            item = np.uint64(item + step)

    return quantize_fp8_tensor


@functools.cache
def make_quantize_fp8_static(kind: str) -> Kernel:
    """The kernel for items of a kind: "bf16x8", "bf16", "f16" or "f32".

    Thread t of block x takes item 256 x + t. Values are multiplied by ``multiplier``, or by
    scale[0] or its inverse, as ``scale_source`` says.
    """
    items = make_items(kind)
    quantize_item = items.quantize

    @kernel(
        f"global {items.codes}* codes, global {items.input}* input, global f32* scale, "
        "global u32* row_offsets, u32 num_slots, u32 num_rows, u32 row_items, u32 scale_source, "
        "f32 multiplier",
        threads=THREADS,
        name=f"quantize_fp8_static_{kind}",
    )
    def quantize_fp8_static(
        codes, input, scale, row_offsets, num_slots, num_rows, row_items, scale_source, multiplier
    ):
        end = used_items(row_offsets, num_slots, num_rows, row_items)
        first = np.uint64(np.uint32(cuda.blockIdx.x)) * np.uint64(THREADS)
        item = np.uint64(first + np.uint64(cuda.threadIdx.x))
        if item < end:
            factor = multiplier
            if scale_source != GIVEN:
                factor = scale[np.uint64(0)]
                if scale_source == INVERTED:
                    factor = multiplier_of(factor)
            quantize_item(codes, input, item, factor)

    return quantize_fp8_static


def item_kind(num_cols: int, element: str = "bf16") -> str:
    """The kind of items that a matrix of ``num_cols`` columns is taken in."""
    return "bf16x8" if element == "bf16" and num_cols % 8 == 0 else element


def num_partials(num_rows: int, num_cols: int) -> int:
    """Blocks of `amax`, and so partials."""
    items = num_rows * num_cols // make_items(item_kind(num_cols)).width
    return max(1, min(MAX_PARTIALS, -(-items // (THREADS * ITEMS_PER_THREAD))))


def launch_quantize_fp8_tensor(
    executor: Executor,
    codes: Any,
    scale: Any,
    partials: Any,
    input: Any,
    row_offsets: Any,
    *,
    num_slots: int,
    num_rows: int,
    num_cols: int,
    scale_ub: float,
    stream: Any = None,
) -> None:
    """Launch both kernels on flat arrays, in the kernels' parameter types.

    ``partials`` has at least `num_partials` words, whatever they hold. ``row_offsets`` is not read
    if ``num_slots`` is 0.
    """
    kind, blocks = item_kind(num_cols), num_partials(num_rows, num_cols)
    row_items = num_cols // make_items(kind).width
    rows = (num_slots, num_rows, row_items)
    make_fp8_tensor_amax(kind).launch(
        executor, (blocks, 1, 1), partials, input, row_offsets, *rows, stream=stream
    )
    make_quantize_fp8_tensor(kind).launch(
        executor,
        (blocks, 1, 1),
        codes,
        scale,
        partials,
        input,
        row_offsets,
        blocks,
        *rows,
        scale_ub,
        stream=stream,
    )


def launch_quantize_fp8_static(
    executor: Executor,
    codes: Any,
    input: Any,
    scale: Any,
    row_offsets: Any,
    *,
    element: str,
    num_slots: int,
    num_rows: int,
    num_cols: int,
    multiplier: float | None,
    scale_is_inverted: bool,
    stream: Any = None,
) -> None:
    """Launch on flat arrays, in the kernel's parameter types.

    ``element`` is the type of ``input``: "bf16", "f16" or "f32". Without ``multiplier`` it is
    ``scale[0]``, or its inverse if ``scale_is_inverted``; else ``scale`` is not read.
    ``row_offsets`` is not read if ``num_slots`` is 0.
    """
    kind = item_kind(num_cols, element)
    row_items = num_cols // make_items(kind).width
    source = GIVEN if multiplier is not None else INVERTED if scale_is_inverted else STORED
    make_quantize_fp8_static(kind).launch(
        executor,
        (-(-num_rows * row_items // THREADS), 1, 1),
        codes,
        input,
        scale,
        row_offsets,
        num_slots,
        num_rows,
        row_items,
        source,
        0.0 if multiplier is None else multiplier,
        stream=stream,
    )
