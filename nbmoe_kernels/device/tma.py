"""Tensor memory access: boxes of a matrix to and from shared memory, with 128-byte swizzle.

A box has `ROW_BYTES` (128) bytes of consecutive rows. Its row r lies in shared memory at 128 r,
and the 16-byte piece i of that row at piece i ^ (r % 8): the layout that wgmma and conflict-free
loads want. Coordinates are bytes and rows of the matrix and may lie outside: a load writes zeros
there (and still reports whole boxes of bytes), a store leaves them out. The place in shared memory
is a multiple of 1024 bytes, counted from the array's start, which is one as well.
"""

import numpy as np
from numba import njit

from nbmoe_kernels.device.effects import MbarComplete, ProxyFence, reads, writes
from nbmoe_kernels.device.mbarrier import advance
from nbmoe_kernels.device.op import Timing, device_op, op_factory
from nbmoe_kernels.device.tensor_map import (
    MAP_BYTES,
    ROW_BYTES,
    inside_box,
    map_words,
    memory_at,
)


@njit
def _row_in_matrix(words, column, row):
    """(the row's bytes in memory, first and end of the box's bytes that are inside) of a row."""
    row_bytes, rows = np.int64(words[2]), np.int64(words[3])
    first, end = max(-column, 0), min(row_bytes - column, ROW_BYTES)
    if row < 0 or row >= rows or end <= first:
        first, end, row = 0, 0, 0
    start = np.int64(words[1]) + row * np.int64(words[4])
    return memory_at(start, row_bytes), first, end


@njit
def _check_place(memory, place, box_rows):
    if place % ROW_BYTES != 0:
        raise ValueError("TMA: a box must begin at a multiple of 128 bytes of shared memory")
    if place < 0 or place + box_rows * ROW_BYTES > memory.size:
        raise IndexError("TMA: a box reaches past the end of its array")


@njit
def _load_box(memory, place, words, column, row, box_rows):
    _check_place(memory, place, box_rows)
    for r in range(box_rows):
        source, first, end = _row_in_matrix(words, column, row + r)
        for byte in range(ROW_BYTES):
            linear = place + r * ROW_BYTES + byte
            value = source[column + byte] if first <= byte < end else np.uint8(0)
            memory[linear ^ (((linear >> 7) & 7) << 4)] = value


@njit
def _store_box(memory, place, words, column, row, box_rows):
    _check_place(memory, place, box_rows)
    for r in range(box_rows):
        target, first, end = _row_in_matrix(words, column, row + r)
        for byte in range(first, end):
            linear = place + r * ROW_BYTES + byte
            target[column + byte] = memory[linear ^ (((linear >> 7) & 7) << 4)]


def _inside(operands, box_rows: int):
    numbers = (int(operands[n]) for n in ("tensor_map_index", "column", "row"))
    index, column, row = numbers
    return inside_box(operands["tensor_map"], index, column, row, box_rows)


def _matrix_access(make, box_rows: int):
    """The access to the matrix that the map names."""

    def addresses(operands):
        return _inside(operands, box_rows)[2]

    return make("tensor_map", proxy="async", addresses=addresses)


def _stored_bytes(box_rows: int):
    """The access to the bytes in shared memory that a store copies."""

    def offsets(operands):
        rows, columns, _ = _inside(operands, box_rows)
        linear = int(operands["src_index"]) + rows * ROW_BYTES + columns
        return linear ^ ((linear >> 7) & 7) << 4

    return reads("src", proxy="async", footprint=offsets, align=ROW_BYTES)


@op_factory
def tma_load(box_rows: int):
    """The op that copies a box of ``box_rows`` rows (up to 256) to shared memory.

    The op's arguments are ``dst, dst_index, tensor_map, tensor_map_index, column, row, bar,
    bar_index``: the mbarrier counts ``128 * box_rows`` bytes when they have come.
    """
    nbytes = box_rows * ROW_BYTES

    @device_op(
        "void(shared u8* dst, global u8* tensor_map, i32 column, i32 row, shared u64* bar)",
        ptx="cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[<dst>], [<tensor_map>, {<column>, <row>}], [<bar>];",
        timing=Timing.ASYNC,
        effects=(
            reads("tensor_map", MAP_BYTES, align=64),
            _matrix_access(reads, box_rows),
            writes("dst", nbytes, proxy="async", align=ROW_BYTES),
            MbarComplete("bar", nbytes),
        ),
        min_cc=(9, 0),
        name=f"tma_load_{box_rows}",
    )
    def load(dst, dst_index, tensor_map, tensor_map_index, column, row, bar, bar_index):
        words = map_words(tensor_map, tensor_map_index, box_rows)
        _load_box(dst, np.int64(dst_index), words, np.int64(column), np.int64(row), box_rows)
        bar[bar_index] = advance(bar[bar_index], 0, -nbytes)

    return load


@op_factory
def tma_store(box_rows: int):
    """The op that copies a box from shared memory, as part of the thread's open bulk group.

    The op's arguments are ``tensor_map, tensor_map_index, column, row, src, src_index``; the group
    is closed and awaited as for `nbmoe_kernels.device.bulk.bulk_store`.
    """

    @device_op(
        "void(global u8* tensor_map, i32 column, i32 row, shared u8* src)",
        ptx="cp.async.bulk.tensor.2d.global.shared::cta.bulk_group "
        "[<tensor_map>, {<column>, <row>}], [<src>];",
        timing=Timing.ASYNC,
        group="bulk",
        effects=(
            reads("tensor_map", MAP_BYTES, align=64),
            _stored_bytes(box_rows),
            _matrix_access(writes, box_rows),
        ),
        min_cc=(9, 0),
        name=f"tma_store_{box_rows}",
    )
    def store(tensor_map, tensor_map_index, column, row, src, src_index):
        words = map_words(tensor_map, tensor_map_index, box_rows)
        _store_box(src, np.int64(src_index), words, np.int64(column), np.int64(row), box_rows)

    return store


@device_op(
    "void(global u8* tensor_map)",
    ptx="prefetch.tensormap [<tensor_map>];",
    effects=(),
    min_cc=(9, 0),
)
def prefetch_tensor_map(tensor_map, tensor_map_index):
    """Start fetching a map that will be used."""


@device_op(
    "void(global u8* tensor_map)",
    ptx="fence.proxy.tensormap::generic.acquire.gpu [<tensor_map>], 128;",
    effects=(ProxyFence("tensormap"),),
    min_cc=(9, 0),
)
def fence_tensor_map(tensor_map, tensor_map_index):
    """Copies issued from here on see the map's bytes as the host, or a kernel, has written them."""
