"""8 x 8 matrices of 16-bit elements between shared memory and the fragments of a warp.

Lane i names row i % 8 of matrix i // 8: 16 bytes. In registers a lane holds of each matrix the two
elements 2t and 2t+1 of row g (g = lane // 4, t = lane % 4); transposed, of column g.
"""

import numpy as np
from numba import njit

from nbmoe_kernels.device.effects import reads, writes
from nbmoe_kernels.device.op import Scope, device_op, op_factory

_ROW_BYTES = 16


def _row_access(make, name: str, count: int, displacement: int = 0):
    """The access of the lanes that name a row; with fewer than four matrices some do not."""
    if count == 4 and not displacement:
        return make(name, _ROW_BYTES, align=_ROW_BYTES)

    def offsets(operands):
        named = np.asarray(operands[f"{name}_index"])[: 8 * count].astype(np.int64)
        rows = 4 * (named + displacement)
        return (rows[:, None] + np.arange(_ROW_BYTES)).ravel()

    return make(name, footprint=offsets, align=_ROW_BYTES)


@njit
def _check_rows(memory, rows):
    # Helpers of a twin are compiled without bounds checks.
    for row in rows:
        if row < 0 or np.int64(row) + _ROW_BYTES // 4 > memory.size:
            raise IndexError("matrices: a row reaches past the end of its array")


@njit
def _load_word(memory, rows, lane, matrix, transpose):
    g, t = lane // 4, lane % 4
    if not transpose:
        return memory[np.int64(rows[8 * matrix + g]) + t]
    low = memory[np.int64(rows[8 * matrix + 2 * t]) + g // 2]
    high = memory[np.int64(rows[8 * matrix + 2 * t + 1]) + g // 2]
    shift = np.uint32(16 * (g % 2))
    low = np.uint32((low >> shift) & np.uint32(0xFFFF))
    return np.uint32(low | np.uint32(np.uint32(high >> shift) << np.uint32(16)))


@op_factory
def load_matrices(count: int, *, transpose: bool = False, displacement: int = 0):
    """The op ``(src, src_index) -> words`` that loads 1, 2 or 4 matrices (`ldmatrix`).

    It returns one word, or a tuple of ``count``. ``src`` is an array of u32, rows start at
    multiples of four words, and ``displacement`` words after those that the lanes name: what of an
    address is part of the instruction costs no arithmetic.
    """
    suffix = ".trans" if transpose else ""
    name = f"load_matrices_{count}{'_transposed' if transpose else ''}"
    declare = device_op(
        f"u32{'' if count == 1 else f'[{count}]'}(shared u32* src)",
        scope=Scope.WARP,
        ptx=f"ldmatrix.sync.aligned.m8n8.x{count}{suffix}.shared.b16 "
        f"{'{<ret>}' if count == 1 else '<ret>'}, [<src>+{4 * displacement}];",
        effects=(_row_access(reads, "src", count, displacement),),
        name=f"{name}_{displacement}" if displacement else name,
    )
    if count == 1:

        @declare
        def load_one(src, src_index):
            words = np.empty(32, np.uint32)
            rows = src_index + np.uint32(displacement)
            _check_rows(src, rows[:8])
            for lane in range(32):
                words[lane] = _load_word(src, rows, lane, 0, transpose)
            return words

        return load_one

    @declare
    def load(src, src_index):
        words = np.empty((32, count), np.uint32)
        rows = src_index + np.uint32(displacement)
        _check_rows(src, rows[: 8 * count])
        for lane in range(32):
            for matrix in range(count):
                words[lane, matrix] = _load_word(src, rows, lane, matrix, transpose)
        return words

    return load


@njit
def _store_word(memory, rows, lane, matrix, transpose, word):
    g, t = lane // 4, lane % 4
    if not transpose:
        memory[np.int64(rows[8 * matrix + g]) + t] = word
        return
    shift = np.uint32(16 * (g % 2))
    kept = np.uint32(~np.uint32(np.uint32(0xFFFF) << shift))
    for half in range(2):
        at = np.int64(rows[8 * matrix + 2 * t + half]) + g // 2
        element = np.uint32((word >> np.uint32(16 * half)) & np.uint32(0xFFFF))
        memory[at] = np.uint32((memory[at] & kept) | np.uint32(element << shift))


@op_factory
def store_matrices(count: int, *, transpose: bool = False):
    """The op ``(dst, dst_index, word0, ...)`` that stores 1, 2 or 4 matrices (`stmatrix`)."""
    names = [f"word{i}" for i in range(count)]
    suffix = ".trans" if transpose else ""
    declare = device_op(
        f"void(shared u32* dst, {', '.join(f'u32 {n}' for n in names)})",
        scope=Scope.WARP,
        ptx=f"stmatrix.sync.aligned.m8n8.x{count}{suffix}.shared.b16 [<dst>], "
        f"{{{', '.join(f'<{n}>' for n in names)}}};",
        effects=(_row_access(writes, "dst", count),),
        min_cc=(9, 0),
        name=f"store_matrices_{count}{'_transposed' if transpose else ''}",
    )
    if count == 1:

        @declare
        def store_one(dst, dst_index, word0):
            _check_rows(dst, dst_index[:8])
            for lane in range(32):
                _store_word(dst, dst_index, lane, 0, transpose, word0[lane])

        return store_one
    if count == 2:

        @declare
        def store_two(dst, dst_index, word0, word1):
            _check_rows(dst, dst_index[:16])
            for lane in range(32):
                _store_word(dst, dst_index, lane, 0, transpose, word0[lane])
                _store_word(dst, dst_index, lane, 1, transpose, word1[lane])

        return store_two

    @declare
    def store_four(dst, dst_index, word0, word1, word2, word3):
        _check_rows(dst, dst_index)
        for lane in range(32):
            _store_word(dst, dst_index, lane, 0, transpose, word0[lane])
            _store_word(dst, dst_index, lane, 1, transpose, word1[lane])
            _store_word(dst, dst_index, lane, 2, transpose, word2[lane])
            _store_word(dst, dst_index, lane, 3, transpose, word3[lane])

    return store_four
