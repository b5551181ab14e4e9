"""Launches of the FP8 quantizers' kernels: rows that are bounded, partial groups, every item."""

from collections.abc import Callable
from typing import Any

import numpy as np

from emulate.mutate.slots import unwritten

Arguments = tuple[Any, ...]
Launch = tuple[Any, Callable[[], Arguments]]

ROWS, USED, PADDED = 12, 11, 12
BOUND = np.array([0, 3, USED], np.uint32)
SLOTS = len(BOUND) - 1
LAST_WARP = 506
"""Items of which a block of 256 threads takes the last with its last warp."""


def _values(kernel: Any, count: int) -> np.ndarray:
    """Values of the kernel's input type, in its elements: f32, 16 bits or words of two bf16.

    bf16 grow from item to item, so that a maximum over one more or one less is another.
    """
    signs = np.random.default_rng(8).integers(0, 2, count).astype(np.uint16) << np.uint16(15)
    items = np.arange(count, dtype=np.uint16) // np.uint16(1 if _is_single(kernel) else 8)
    bits = (items + np.uint16(0x3F80)) | signs
    floats = (bits.astype(np.uint32) << 16).view(np.float32)
    if kernel.name.endswith("f32"):
        return floats
    if kernel.name.endswith("_f16"):
        return floats.astype(np.float16).view(np.uint16)
    return bits if _is_single(kernel) else bits.view(np.uint32)


def _is_single(kernel: Any) -> bool:
    """Whether a thread takes a value at a time."""
    return not kernel.name.endswith(("_bf16x8", "_groups"))


def _codes(kernel: Any, count: int) -> np.ndarray:
    return unwritten(count, np.uint8) if _is_single(kernel) else unwritten(count // 4)


def _no_scales(dtype: Any) -> np.ndarray:
    return unwritten(1, dtype)


def groups(kernel: Any) -> Launch:
    """quantize_fp8_groups: six groups, the last of 8, so that a block has less than four."""
    columns, group, count = 5 * 104 + 8, 104, 6

    def args() -> Arguments:
        scales = (unwritten(count * PADDED), _no_scales(np.uint16), _no_scales(np.uint8))
        scalars = (SLOTS, ROWS, columns, group, PADDED, 4)
        return (
            _codes(kernel, ROWS * columns),
            *scales,
            _values(kernel, ROWS * columns),
            BOUND.copy(),
            *(np.uint32(number) for number in scalars),
            np.float32(1200.0),
            np.float32(0.0),
        )

    return (2, 2), args


def rows(kernel: Any) -> Launch:
    """quantize_fp8_rows: a group of more items than a block has threads, and a partial one."""
    rows, used = 2, 1
    group = LAST_WARP * (1 if _is_single(kernel) else 8)
    columns = group + 16

    def args() -> Arguments:
        scales = (unwritten(2 * rows), _no_scales(np.uint16), _no_scales(np.uint8))
        scalars = (1, rows, columns, group, 2, rows, 4)
        return (
            _codes(kernel, rows * columns),
            *scales,
            _values(kernel, rows * columns),
            np.array([0, used], np.uint32),
            *(np.uint32(number) for number in scalars),
            np.float32(1200.0),
            np.float32(0.0),
        )

    return 2 * rows, args


def _row_items(kernel: Any) -> tuple[int, int]:
    """Columns and items of a row: one that is no multiple of the threads, in two blocks."""
    items = 61
    return items * (1 if _is_single(kernel) else 8), items


def amax(kernel: Any) -> Launch:
    """fp8_tensor_amax, in two blocks that step once."""
    columns, items = _row_items(kernel)

    def args() -> Arguments:
        scalars = (np.uint32(SLOTS), np.uint32(ROWS), np.uint32(items))
        return (unwritten(2), _values(kernel, ROWS * columns), BOUND.copy(), *scalars)

    return 2, args


def tensor(kernel: Any) -> Launch:
    """quantize_fp8_tensor, with more partial maxima than a block has threads."""
    columns, items = _row_items(kernel)

    def args() -> Arguments:
        maxima = np.arange(LAST_WARP, dtype=np.uint32) + np.uint32(0x4080)
        scalars = (LAST_WARP, SLOTS, ROWS, items)
        return (
            _codes(kernel, ROWS * columns),
            unwritten(1).view(np.float32),
            maxima,
            _values(kernel, ROWS * columns),
            BOUND.copy(),
            *(np.uint32(number) for number in scalars),
            np.float32(1200.0),
        )

    return 2, args


def static(kernel: Any) -> Launch:
    """quantize_fp8_static of any items, with the scale in an array."""
    columns, items = _row_items(kernel)

    def args() -> Arguments:
        return (
            _codes(kernel, ROWS * columns),
            _values(kernel, ROWS * columns),
            np.array([0.3], np.float32),
            BOUND.copy(),
            *(np.uint32(number) for number in (SLOTS, ROWS, items, 1)),
            np.float32(0.0),
        )

    return 3, args


FP8_QUANTIZERS: dict[str, Callable[[Any], Launch]] = {
    "quantize_fp8_groups": groups,
    "quantize_fp8_rows": rows,
    "fp8_tensor_amax": amax,
    "quantize_fp8_tensor": tensor,
    "quantize_fp8_static": static,
}
"""By the beginning of a kernel's name."""
