"""Launches of the quantizers' kernels: every format, empty and masked slots, partial tiles."""

from collections.abc import Callable
from typing import Any

import numpy as np

from emulate.mutate.slots import EXPERTS, slots, unwritten

Arguments = tuple[Any, ...]
Launch = tuple[Any, Callable[[], Arguments]]
COLUMNS = 160
"""Two tiles across for blocks of 16 and of 32, the second partial."""


def _bf16(random: np.random.Generator, count: int) -> np.ndarray:
    floats = random.standard_normal(count).astype(np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)


def _code_words(kernel: Any, elements: int) -> int:
    return elements // (4 if "mxfp8" in kernel.name else 8)


def _columns_of_tile(kernel: Any) -> int:
    return 64 if "nvfp4" in kernel.name else 128


def quantize(kernel: Any) -> Launch:
    """quantize_grouped, quantize_rows and quantize_row_scaled of any format."""
    across = -(-COLUMNS // _columns_of_tile(kernel))

    def args() -> Arguments:
        random = np.random.default_rng(2)
        rows, starts, offsets = slots(130)
        scales = random.integers(0x3F00, 0x4000, rows).astype(np.uint16)
        scalars = (len(EXPERTS), rows, COLUMNS, 2, 1, 1, 1)
        return (
            unwritten(_code_words(kernel, rows * COLUMNS)),
            unwritten(3 * across * 128),
            _bf16(random, rows * COLUMNS),
            starts,
            offsets,
            EXPERTS,
            np.array([0.5, 3.0], np.float32),
            random.permutation(2 * rows)[:rows].astype(np.uint32),
            scales,
            *(np.uint32(number) for number in scalars),
            np.float32(1.5),
        )

    return (2 if "rows" in kernel.name else 3, across), args


def row_scales(kernel: Any) -> Launch:
    """row_scales."""
    columns = 272

    def args() -> Arguments:
        random = np.random.default_rng(3)
        rows, starts, offsets = slots(130)
        return (
            unwritten(rows, np.uint16),
            _bf16(random, rows * columns),
            starts,
            offsets,
            EXPERTS,
            random.permutation(2 * rows)[:rows].astype(np.uint32),
            *(np.uint32(number) for number in (len(EXPERTS), columns, 2, 1, 1, 0)),
        )

    return (3, 8), args


def gated_quantize(kernel: Any) -> Launch:
    """gated_quantize of any format and activation."""
    across = -(-COLUMNS // _columns_of_tile(kernel))

    def args() -> Arguments:
        random = np.random.default_rng(4)
        rows, starts, offsets = slots(130)
        return (
            unwritten(_code_words(kernel, rows * COLUMNS)),
            unwritten(3 * across * 128),
            _bf16(random, 2 * rows * COLUMNS),
            starts,
            offsets,
            EXPERTS,
            np.array([1.0, 1.0, 2.5], np.float32),
            *(np.uint32(number) for number in (len(EXPERTS), COLUMNS, 0)),
            np.float32(1.7),
            np.float32(2.0),
        )

    return (3, across), args


def gated_activate(kernel: Any) -> Launch:
    """gated_activate of any activation."""
    rows, columns = 3, 48

    def args() -> Arguments:
        x = _bf16(np.random.default_rng(5), 2 * rows * columns)
        scalars = (np.uint32(columns), np.uint32(0), np.float32(1.7), np.float32(2.0))
        return (unwritten(rows * columns // 2), x, *scalars)

    return (rows, 1), args


def interleave_scales(kernel: Any) -> Launch:
    """interleave_scales."""
    experts, rows, columns = 2, 130, 5

    def args() -> Arguments:
        random = np.random.default_rng(6)
        scales = random.integers(1, 256, experts * rows * columns).astype(np.uint8)
        sizes = (np.uint32(rows), np.uint32(columns), np.uint32(2))
        return (unwritten(experts * 2 * 2 * 128), scales, *sizes)

    return (experts * 2, 2), args


def dequantize_mxfp4(kernel: Any) -> Launch:
    """dequantize_mxfp4 to either type."""
    words = 4 * 70

    def args() -> Arguments:
        random = np.random.default_rng(7)
        packed = random.integers(0, 2**32, words, dtype=np.uint32)
        scales = random.integers(100, 140, words // 4).astype(np.uint8)
        made = words * (2 if "e4m3" in kernel.name else 4)
        return (unwritten(made), packed, scales, np.uint64(words))

    return 2, args


QUANTIZERS: dict[str, Callable[[Any], Launch]] = {
    "quantize_grouped": quantize,
    "quantize_rows": quantize,
    "quantize_row_scaled": quantize,
    "row_scales": row_scales,
    "gated_quantize": gated_quantize,
    "gated_activate": gated_activate,
    "interleave_scales": interleave_scales,
    "dequantize_mxfp4": dequantize_mxfp4,
}
"""By the beginning of a kernel's name."""
