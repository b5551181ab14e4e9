"""Launches of the quantizers' kernels: every format, empty and masked slots, partial tiles."""

from collections.abc import Callable
from typing import Any

import numpy as np

from emulate.mutate.slots import EXPERTS, slots, unwritten
from nbmoe_kernels.prepared_tokens import ROW_BYTES, token_panels, token_rows
from nbmoe_kernels.quantize_tile import column_blocks_of

Arguments = tuple[Any, ...]
Launch = tuple[Any, Callable[[], Arguments]]
COLUMNS = 160
"""Two blocks across, the second with part of a scale tile; two warps share a panel's rows."""


def _bf16(random: np.random.Generator, count: int) -> np.ndarray:
    floats = random.standard_normal(count).astype(np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)


def _code_words(kernel: Any, elements: int) -> int:
    return elements // (4 if "mxfp8" in kernel.name else 8)


def _columns_of_tile(kernel: Any) -> int:
    return 64 if "nvfp4" in kernel.name else 128


def _outputs(kernel: Any, rows: int) -> tuple[Any, Any, int, int]:
    """Codes and scales, or prepared tokens and nothing; rows of a panel, blocks across."""
    panel_rows = token_rows(rows, len(EXPERTS))
    blocks = column_blocks_of(COLUMNS, 1)
    if "prepared" in kernel.name or "prepare_tokens" in kernel.name:
        words = token_panels(COLUMNS) * panel_rows * ROW_BYTES // 4
        return unwritten(words), unwritten(1), panel_rows, blocks
    across = -(-COLUMNS // _columns_of_tile(kernel))
    codes = unwritten(_code_words(kernel, rows * COLUMNS))
    return codes, unwritten(3 * across * 128), panel_rows, blocks


def prepare_tokens(kernel: Any) -> Launch:
    """prepare_tokens of any format."""

    def args() -> Arguments:
        random = np.random.default_rng(8)
        rows, starts, offsets = slots(130)
        output, _, panel_rows, blocks = _outputs(kernel, rows)
        elements = rows * COLUMNS
        words = elements // 2 if "bf16" in kernel.name else _code_words(kernel, elements)
        tiles = 3 * -(-COLUMNS // _columns_of_tile(kernel))
        scalars = (len(EXPERTS), rows, panel_rows, COLUMNS, blocks, 1)
        return (
            output,
            random.integers(0, 2**32, words, dtype=np.uint32),
            random.integers(100, 120, 512 * tiles).astype(np.uint8),
            starts,
            offsets,
            *(np.uint32(number) for number in scalars),
        )

    return (2 if kernel.name.endswith("_rows") else 3) * 2, args


def quantize(kernel: Any) -> Launch:
    """quantize_grouped, quantize_rows and quantize_row_scaled of any format."""

    def args() -> Arguments:
        random = np.random.default_rng(2)
        rows, starts, offsets = slots(130)
        row_scales = random.integers(0x3F00, 0x4000, rows).astype(np.uint16)
        output, scales, panel_rows, blocks = _outputs(kernel, rows)
        scalars = (len(EXPERTS), rows, COLUMNS, panel_rows, blocks, 1, 2, 1 << 31, 1, 1, 1)
        return (
            output,
            scales,
            _bf16(random, rows * COLUMNS),
            starts,
            offsets,
            EXPERTS,
            np.array([0.5, 3.0], np.float32),
            random.permutation(2 * rows)[:rows].astype(np.uint32),
            row_scales,
            *(np.uint32(number) for number in scalars),
            np.float32(1.5),
        )

    return (2 if "rows" in kernel.name else 3) * 2, args


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

    def args() -> Arguments:
        random = np.random.default_rng(4)
        rows, starts, offsets = slots(130)
        output, scales, panel_rows, blocks = _outputs(kernel, rows)
        return (
            output,
            scales,
            _bf16(random, 2 * rows * COLUMNS),
            starts,
            offsets,
            EXPERTS,
            np.array([1.0, 1.0, 2.5], np.float32),
            *(np.uint32(n) for n in (len(EXPERTS), COLUMNS, panel_rows, blocks, 1, 0)),
            np.float32(1.7),
            np.float32(2.0),
        )

    return 3 * 2, args


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
    "prepare_tokens": prepare_tokens,
    "row_scales": row_scales,
    "gated_quantize": gated_quantize,
    "gated_activate": gated_activate,
    "interleave_scales": interleave_scales,
    "dequantize_mxfp4": dequantize_mxfp4,
}
"""By the beginning of a kernel's name."""
