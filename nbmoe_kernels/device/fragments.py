"""Register fragments of matrix operands and the tiles that they hold, for twins.

With g = lane // 4 % 8, t = lane % 4 and w = lane // 32 (0 for one warp):

* an operand of 32-bit words, 8 along k: word 0 of a lane is (row 16w + g, word t), word 1 row + 8,
  word 2 (row, word t + 4), word 3 both; a column operand has words 0 and 2 of column g;
* an accumulator: element r is (row 16w + g + 8 (r // 2 % 2), column 8 (r // 4) + 2t + r % 2).
"""

import numpy as np
from numba import njit


@njit
def gather_rows(a0, a1, a2, a3):
    """Words of a row operand: 32 or 128 lanes to (lanes / 2, 8)."""
    words = np.empty((a0.size // 2, 8), np.uint32)
    for lane in range(a0.size):
        row, t = lane // 32 * 16 + lane // 4 % 8, lane % 4
        words[row, t], words[row + 8, t] = a0[lane], a1[lane]
        words[row, t + 4], words[row + 8, t + 4] = a2[lane], a3[lane]
    return words


@njit
def gather_columns(b0, b1):
    """Words of a column operand of one warp: (8 columns, 8)."""
    words = np.empty((8, 8), np.uint32)
    for lane in range(32):
        words[lane // 4, lane % 4], words[lane // 4, lane % 4 + 4] = b0[lane], b1[lane]
    return words


@njit
def gather_accumulators(acc):
    """Accumulators (lanes, n / 2) to the tile (lanes / 2, n)."""
    lanes, count = acc.shape
    tile = np.empty((lanes // 2, 2 * count), np.float32)
    for lane in range(lanes):
        row, column = lane // 32 * 16 + lane // 4 % 8, lane % 4 * 2
        for r in range(0, count, 4):
            tile[row, 2 * r + column] = acc[lane, r]
            tile[row, 2 * r + column + 1] = acc[lane, r + 1]
            tile[row + 8, 2 * r + column] = acc[lane, r + 2]
            tile[row + 8, 2 * r + column + 1] = acc[lane, r + 3]
    return tile


@njit
def scatter_accumulators(tile, acc):
    """The reverse of `gather_accumulators`, into ``acc``."""
    lanes, count = acc.shape
    for lane in range(lanes):
        row, column = lane // 32 * 16 + lane // 4 % 8, lane % 4 * 2
        for r in range(0, count, 4):
            acc[lane, r] = tile[row, 2 * r + column]
            acc[lane, r + 1] = tile[row, 2 * r + column + 1]
            acc[lane, r + 2] = tile[row + 8, 2 * r + column]
            acc[lane, r + 3] = tile[row + 8, 2 * r + column + 1]


@njit
def transposed(matrix):
    """A contiguous transpose."""
    out = np.empty((matrix.shape[1], matrix.shape[0]), matrix.dtype)
    for j in range(matrix.shape[1]):
        for i in range(matrix.shape[0]):
            out[j, i] = matrix[i, j]
    return out
