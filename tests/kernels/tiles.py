"""Register fragments and swizzled shared memory of matrices, written out for tests."""

import numpy as np


def words_of(matrix: np.ndarray) -> np.ndarray:
    """A matrix of 8- or 16-bit elements as words of 32 bits along its rows."""
    return np.ascontiguousarray(matrix).view(np.uint32)


def row_fragments(matrix: np.ndarray) -> list[np.ndarray]:
    """Operand words of 32 lanes for every 16 rows: two for 16-byte rows, four for 32-byte ones."""
    words = words_of(matrix)
    lane = np.arange(2 * len(matrix))
    row, t = lane // 32 * 16 + lane // 4 % 8, lane % 4
    return [words[row + 8 * (i % 2), t + 4 * (i // 2)] for i in range(words.shape[1] // 2)]


def column_fragments(matrix: np.ndarray) -> list[np.ndarray]:
    """Operand words of a warp for 8 columns, given as rows."""
    words = words_of(matrix)
    lane = np.arange(32)
    return [words[lane // 4, lane % 4 + first] for first in range(0, words.shape[1], 4)]


def places(lanes: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of every accumulator of every lane, each (lanes, columns / 2)."""
    lane, r = np.arange(lanes)[:, None], np.arange(columns // 2)[None, :]
    row = lane // 32 * 16 + lane % 32 // 4 + 8 * (r % 4 // 2)
    return row, r // 4 * 8 + lane % 4 * 2 + r % 2


def swizzled(matrix: np.ndarray, start: int, size: int) -> np.ndarray:
    """An array of ``size`` bytes in which 32-byte rows lie as 128-byte swizzle puts them."""
    memory = np.full(size, 0xEE, np.uint8)
    for row, line in enumerate(np.ascontiguousarray(matrix).view(np.uint8)):
        for byte, value in enumerate(line):
            offset = start + 128 * row + byte
            piece = offset // 16 % 8 ^ row % 8
            memory[offset // 128 * 128 + 16 * piece + offset % 16] = value
    return memory
