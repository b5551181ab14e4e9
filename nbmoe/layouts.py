"""Where things lie: scale tiles, scale offsets of experts, the gate/up order, the order of K.

Every layout has one definition here, as a numpy function and its inverse. Kernels restate the index
arithmetic; tests hold them to these functions.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nbmoe.errors import RangeError, ShapeError, message

TILE_ROWS: Final = 128
TILE_COLUMNS: Final = 4
TILE_SHAPE: Final = (32, 4, 4)
TILE_BYTES: Final = 512

K_BLOCK: Final = 64
K_STEP: Final = 16
K_STEPS: Final = tuple(tuple(range(step, K_BLOCK, 4)) for step in range(4))
"""The 16 elements of a 64-block of K that matmul step j sums at once: those with k % 4 == j.

The tensor core sums the 16 products of a step without regard to order, but the order of steps
shows in the bits, so every kernel, architecture and tile config uses these steps. This choice lets
a thread that owns one whole 16-block of K feed four of its elements to each step.
"""

Array = npt.NDArray[Any]
U32Array = npt.NDArray[np.uint32]


def ceil_div(a: int, b: int) -> int:
    """The quotient a / b rounded up."""
    return -(-a // b)


def tile_counts(rows: int, columns: int) -> tuple[int, int]:
    """Tiles down and across a (rows, columns) matrix of scale bytes."""
    return ceil_div(rows, TILE_ROWS), ceil_div(columns, TILE_COLUMNS)


def interleaved_block_scales_shape(rows: int, columns: int) -> tuple[int, int, int, int, int]:
    """Shape of the tiles of a (rows, columns) matrix of block scales that needs no padding.

    Args:
        rows: R, a multiple of 128.
        columns: C, a multiple of 4: K / 16 or K / 32.

    Returns:
        (R/128, C/4, 32, 4, 4).

    Raises:
        ShapeError: R or C is no such multiple; `interleave_scales` pads.
    """
    if rows % TILE_ROWS or columns % TILE_COLUMNS:
        rule = f"rows % {TILE_ROWS} == 0 and columns % {TILE_COLUMNS} == 0"
        got = f"{rows} rows and {columns} columns"
        raise ShapeError(message("interleaved_block_scales_shape", "rows, columns", rule, got))
    return (*tile_counts(rows, columns), *TILE_SHAPE)


def scale_byte_offset(row: int, column: int, columns: int) -> int:
    """Byte offset of scale (row, column) in the tiled layout of a matrix `columns` wide.

    Tiles are row-major, 512 bytes each; inside a tile rows 32 apart lie 4 bytes apart.
    """
    tile = (row // TILE_ROWS) * ceil_div(columns, TILE_COLUMNS) + column // TILE_COLUMNS
    return tile * TILE_BYTES + (row % 32) * 16 + (row % TILE_ROWS) // 32 * 4 + column % 4


def interleave_scales(scales: Array) -> Array:
    """Lays row-major block scales out in tiles of 128 rows by 4 columns, padding with byte 0.

    Args:
        scales: (R, C), or (E, R, C) for weights, one byte a scale.

    Returns:
        (ceil(R/128), ceil(C/4), 32, 4, 4), with E in front for weights. Scale (r, c) lies at
        [r // 128, c // 4, r % 32, r % 128 // 32, c % 4].

    Raises:
        ShapeError: `scales` has neither 2 nor 3 axes.
    """
    scales = np.asarray(scales)
    if scales.ndim not in (2, 3):
        rule = "(R, C) or (E, R, C)"
        raise ShapeError(message("interleave_scales", "scales", rule, scales.shape))
    *lead, rows, columns = scales.shape
    down, across = tile_counts(rows, columns)
    padded = np.zeros((*lead, down * TILE_ROWS, across * TILE_COLUMNS), scales.dtype)
    padded[..., :rows, :columns] = scales
    tiles = padded.reshape(*lead, down, 4, 32, across, TILE_COLUMNS)
    return np.ascontiguousarray(np.moveaxis(tiles, (-4, -3, -2), (-2, -3, -4)))


def deinterleave_scales(tiles: Array, rows: int, columns: int) -> Array:
    """Undoes `interleave_scales`, dropping the padding.

    Args:
        tiles: (down, across, 32, 4, 4), with E in front for weights.
        rows: R, at most 128 * down.
        columns: C, at most 4 * across.

    Returns:
        (R, C), with E in front for weights.

    Raises:
        ShapeError: `tiles` is not tiled or does not hold that many rows or columns.
    """
    tiles = np.asarray(tiles)
    if tiles.ndim not in (5, 6) or tiles.shape[-3:] != TILE_SHAPE:
        rule = "(down, across, 32, 4, 4) with or without experts in front"
        raise ShapeError(message("deinterleave_scales", "tiles", rule, tiles.shape))
    *lead, down, across = tiles.shape[:-3]
    if rows > down * TILE_ROWS or columns > across * TILE_COLUMNS:
        rule = f"tiles for at least {rows} rows and {columns} columns"
        raise ShapeError(message("deinterleave_scales", "tiles", rule, tiles.shape))
    padded = np.moveaxis(tiles, (-2, -3, -4), (-4, -3, -2))
    padded = padded.reshape(*lead, down * TILE_ROWS, across * TILE_COLUMNS)
    return np.ascontiguousarray(padded[..., :rows, :columns])


def activation_tiles(rows: int, slots: int) -> int:
    """Scale tiles to allocate for `rows` routed rows in `slots` groups, whatever the routing.

    Each group starts on a fresh tile, so at most one tile a non-empty group is only partly used.
    """
    return ceil_div(rows, TILE_ROWS) + min(slots, rows)


def scales_offset(expert_start: npt.ArrayLike) -> U32Array:
    """Where each group's scale tiles begin, relative to its first row's own tile.

    Group e has rows expert_start[e]..expert_start[e+1] and its scales fill tiles
    tile[e] = sum over j < e of ceil(count[j] / 128), and on. The value stored is
    tile[e] - expert_start[e] // 128, which is never negative.

    Args:
        expert_start: (S + 1,) exclusive prefix sums of the groups' row counts [rows].

    Returns:
        uint32 (S,) [128-row tiles].
    """
    start = _prefix("scales_offset", expert_start)
    tiles = -(-np.diff(start) // TILE_ROWS)
    before = np.concatenate([[0], np.cumsum(tiles)])[:-1]
    return (before - start[:-1] // TILE_ROWS).astype(np.uint32)


def tile_starts(expert_start: npt.ArrayLike, offsets: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """First scale tile of each group: expert_start[e] // 128 + offsets[e].

    Args:
        expert_start: (S + 1,) [rows].
        offsets: (S,) as `scales_offset` gives them [128-row tiles].

    Returns:
        int64 (S,) [128-row tiles].
    """
    start = _prefix("tile_starts", expert_start)
    shift = np.asarray(offsets).astype(np.int64)
    if shift.shape != (len(start) - 1,):
        rule = f"({len(start) - 1},), one a group"
        raise ShapeError(message("tile_starts", "offsets", rule, shift.shape))
    return start[:-1] // TILE_ROWS + shift


def _prefix(api: str, expert_start: npt.ArrayLike) -> npt.NDArray[np.int64]:
    start = np.asarray(expert_start).astype(np.int64)
    if start.ndim != 1 or len(start) < 1:
        raise ShapeError(message(api, "expert_start", "(S + 1,)", start.shape))
    if (np.diff(start) < 0).any() or start[0] < 0:
        raise RangeError(message(api, "expert_start", "ascending prefix sums", start.tolist()))
    return start


def sigma(n: int) -> npt.NDArray[np.int64]:
    """The gate/up interleave of a matrix of n = 2D rows: gate rows 0..D-1, then up rows D..2D-1.

    Row r of the permuted matrix is row sigma(n)[r] of the original: sigma(2i) = i,
    sigma(2i + 1) = D + i. A gate and its up become neighbours, so one thread holds both.

    Raises:
        ShapeError: n is odd.
    """
    if n % 2:
        raise ShapeError(message("sigma", "n", "an even number of gate and up rows", n))
    return np.arange(n).reshape(2, n // 2).T.ravel()


def sigma_permute(matrix: Array, axis: int = -2) -> Array:
    """Puts gate and up rows side by side; weights and row-major scale rows go alike.

    Scales must be permuted as logical rows, before `interleave_scales`.

    Args:
        matrix: gate rows then up rows along `axis`: (E, 2D, K/2) codes or (E, 2D, K/16) scales.
        axis: The axis of length 2D.
    """
    return np.take(matrix, sigma(np.shape(matrix)[axis]), axis=axis)


def sigma_unpermute(matrix: Array, axis: int = -2) -> Array:
    """Undoes `sigma_permute`."""
    return np.take(matrix, np.argsort(sigma(np.shape(matrix)[axis])), axis=axis)


def group_k(matrix: Array) -> Array:
    """Splits K, the last axis, into the matmul's steps: (..., K) to (..., K/64, 4, 16).

    Block b, step j holds the elements k = 64 b + 4 i + j, i = 0..15, which is `K_STEPS`.

    Raises:
        ShapeError: K is not a multiple of 64.
    """
    *lead, k = np.shape(matrix)
    if k % K_BLOCK:
        raise ShapeError(message("group_k", "matrix", "K % 64 == 0", k, "pad K with zeros"))
    return np.swapaxes(np.reshape(matrix, (*lead, k // K_BLOCK, K_STEP, 4)), -1, -2)


def ungroup_k(grouped: Array) -> Array:
    """Undoes `group_k`: (..., K/64, 4, 16) to (..., K).

    Raises:
        ShapeError: The last axes are not (4, 16).
    """
    *lead, blocks, steps, width = np.shape(grouped)
    if (steps, width) != (4, K_STEP):
        raise ShapeError(message("ungroup_k", "grouped", "(..., blocks, 4, 16)", np.shape(grouped)))
    return np.swapaxes(grouped, -1, -2).reshape(*lead, blocks * K_BLOCK)
