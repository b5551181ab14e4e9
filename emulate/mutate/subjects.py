"""The shipped kernels at small shapes, for their mutants to be run on.

A shape is small, but reaches every loop and branch: several groups of slots a warp, empty and
masked experts, partial tiles of rows and of K, and more K than the pipeline has stages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Subject:
    """A kernel with a launch.

    Attributes:
        name: the kernel's name.
        kernel: the kernel.
        grid, block, shared_bytes: the launch.
        args: makes the arguments, the same ones each time.
    """

    name: str
    kernel: Any
    grid: Any
    block: Any
    shared_bytes: int
    args: Callable[[], Arguments]


def subjects() -> list[Subject]:
    """All kernels of the catalog."""
    from nbmoe_kernels.catalog import catalog

    return [_subject(kernel) for kernel in catalog()]


def _subject(kernel: Any) -> Subject:
    for prefix, make in _LAUNCHES.items():
        if kernel.name.startswith(prefix):
            grid, args = make(kernel)
            return Subject(
                kernel.name, kernel.py_func, grid, kernel.threads, kernel.shared_bytes, args
            )
    raise LookupError(f"mutate: no launch is known for {kernel.name}")


def _create_indices(kernel: Any) -> tuple[int, Callable[[], Arguments]]:
    slots, experts = 7700, 40

    def args() -> Arguments:
        random = np.random.default_rng(1)
        ids = random.integers(-1, experts, slots).astype(np.int32)
        ids[ids == 7] = 8  # an empty expert
        words = (slots, experts + 1, slots, experts, 2, experts)
        order, starts, restore, numbers, stats, offsets = (_unwritten(n) for n in words)
        outputs = (order, starts, restore, numbers.view(np.int32), stats, offsets)
        return (*outputs, ids, np.uint32(slots), np.uint32(experts))

    return 1, args


def _unwritten(count: int, dtype: Any = np.uint32) -> np.ndarray:
    """An output whose elements, if they are not written, show."""
    return np.full(count, 0xA5, np.uint8).repeat(np.dtype(dtype).itemsize).view(dtype)


_EXPERTS = np.array([-1, 0, 1], np.int32)
"""Experts of three slots: the first is masked, the second has no rows."""


def _slots(rows: int) -> tuple[int, np.ndarray, np.ndarray]:
    """All rows if the third slot has ``rows``, where each slot's begin, and their scale tiles."""
    starts = np.cumsum([0, 3, 0, rows]).astype(np.uint32)
    return 3 + rows, starts, np.array([0, 1, 1], np.uint32)


def _quantize(kernel: Any) -> tuple[tuple[int, int], Callable[[], Arguments]]:
    columns = 80

    def args() -> Arguments:
        random = np.random.default_rng(2)
        rows, starts, offsets = _slots(130)
        floats = random.standard_normal((rows, columns)).astype(np.float32)
        source = (floats.view(np.uint32) >> 16).astype(np.uint16).reshape(-1).view(np.uint32)
        indices = random.permutation(2 * rows)[:rows].astype(np.uint32)
        return (
            _unwritten(rows * columns // 8),
            _unwritten(3 * 2 * 128),
            source,
            starts,
            offsets,
            _EXPERTS,
            np.array([0.5, 3.0], np.float32),
            indices,
            np.uint32(len(_EXPERTS)),
            np.uint32(columns),
            np.uint32(2),
            np.uint32(1),
        )

    return (3, 2), args


def _scales(random: np.random.Generator, count: int) -> np.ndarray:
    """e4m3 codes from 2^-3 to 2^3."""
    return random.integers(0x20, 0x50, count).astype(np.uint8)


def _operands(slot_rows: int, n: int, k: int) -> Arguments:
    """hidden, weight, a_scales, b_scales, starts, scale offsets, expert ids, expert scales."""
    random = np.random.default_rng(3)
    rows, starts, offsets = _slots(slot_rows)
    tiles, k_tiles = 1 + -(-slot_rows // 128), -(-k // 64)
    return (
        random.integers(0, 256, rows * k // 2).astype(np.uint8),
        random.integers(0, 256, 2 * n * k // 2).astype(np.uint8),
        _scales(random, tiles * k_tiles * 512),
        _scales(random, 2 * -(-n // 128) * k_tiles * 512),
        starts,
        offsets,
        _EXPERTS,
        np.array([0.75, 1.25], np.float32),
    )


def _pipeline(kernel: Any) -> tuple[int, int]:
    """(rows of a block, a K that fills the stages once and goes on) of a matmul's name."""
    parts = {part[0]: part for part in kernel.name.split("_sm80_")[1].split("_")}
    stages, copy_bytes = int(parts["s"][1:]), int(parts["c"][1:])
    block_rows = int(parts["m"][1:].partition("n")[0])
    return block_rows, 128 * stages + (32 if copy_bytes == 16 else 48)


def _matmul(kernel: Any) -> tuple[int, Callable[[], Arguments]]:
    n = 128
    block_rows, k = _pipeline(kernel)

    def args() -> Arguments:
        operands = _operands(block_rows + 1, n, k)
        rows = int(operands[4][-1])
        row_scales = np.random.default_rng(4).integers(0x3F00, 0x4000, rows)
        return (
            _unwritten(rows * n // 2),
            *operands,
            row_scales.astype(np.uint16),
            *(np.uint32(number) for number in (len(_EXPERTS), n, k, 1)),
        )

    # The masked slot's tile, and of the next one the first block, of which all rows are real.
    return 128 // block_rows + 1, args


def _matmul_swiglu(kernel: Any) -> tuple[int, Callable[[], Arguments]]:
    n = 128
    block_rows, k = _pipeline(kernel)

    def args() -> Arguments:
        operands = _operands(block_rows + 1, n, k)
        rows = int(operands[4][-1])
        row_scales = np.random.default_rng(4).integers(0x3F00, 0x4000, rows)
        return (
            _unwritten(rows * n // 16),
            _unwritten(3 * 128),
            *operands,
            np.array([2.0, 1.0, 0.5], np.float32),
            row_scales.astype(np.uint16),
            *(np.uint32(number) for number in (len(_EXPERTS), n, k, 1)),
        )

    return 128 // block_rows + 1, args


def _finalize(kernel: Any) -> tuple[tuple[int, int], Callable[[], Arguments]]:
    tokens, top_k, columns = 3, 2, 1040

    def args() -> Arguments:
        random = np.random.default_rng(6)
        rows = tokens * top_k
        floats = random.standard_normal((rows, columns)).astype(np.float32)
        down = (floats.view(np.uint32) >> 16).astype(np.uint16).reshape(-1).view(np.uint32)
        restore = random.permutation(rows).astype(np.uint32)
        restore[1] = 0xFFFFFFFF
        return (
            _unwritten(tokens * columns // 2),
            down,
            restore,
            random.random(rows).astype(np.float32),
            np.uint32(top_k),
            np.uint32(columns // 2),
        )

    return (tokens, 2), args


_LAUNCHES: dict[str, Callable[[Any], tuple[Any, Callable[[], Arguments]]]] = {
    "moe_create_indices": _create_indices,
    "quantize_grouped": _quantize,
    "matmul_grouped_swiglu": _matmul_swiglu,
    "matmul_grouped_nvfp4": _matmul,
    "moe_finalize": _finalize,
}
