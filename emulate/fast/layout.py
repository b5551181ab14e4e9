"""Where an op's operands and results lie while its twin is waiting to run.

A warp or warpgroup op has an *exchange*: for every operand a row of 32 or 128 values, one a lane,
then the results, then the register tiles. A thread op has a *record* of words. Both call sites and
twins read the offsets here.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numba.core import types

from emulate.fast.records import (
    COPY_BYTES,
    MAX_TILES,
    PRODUCT_HEADER,
)
from nbmoe_kernels.device.op import NUMPY_TYPES, Op, Param

NUMBA_TYPES: dict[str, types.Type] = {
    name: getattr(types, np.dtype(kind).name) for name, kind in NUMPY_TYPES.items()
}


def itemsize(dtype: str) -> int:
    """Bytes of an element of one of the table's types."""
    return int(np.dtype(NUMPY_TYPES[dtype]).itemsize)


@dataclass(frozen=True)
class Field:
    """One operand in an exchange or a record.

    A pointer has three values: the array's address, its length and the index.
    """

    param: Param
    offset: int
    stride: int
    """From one lane to the next [bytes]; of a pointer, the same for each of its three rows."""
    lanes: int = 1

    def part(self, index: int) -> int:
        """The offset of the ``index``-th row of a pointer in an exchange."""
        return self.offset + index * self.stride * self.lanes


@dataclass(frozen=True)
class Layout:
    """Where an op's operands and results lie.

    Attributes:
        fields: the operands.
        result: offset of the result.
        nbytes: size of the whole.
        operand_bytes: size of all but the tiles, which come last.
    """

    fields: tuple[Field, ...]
    result: int
    nbytes: int
    operand_bytes: int


@functools.cache
def exchange(op: Op) -> Layout:
    """The layout of a warp or warpgroup op; every row starts at a multiple of 64."""
    lanes = int(op.scope)
    offset = 0
    fields: dict[Param, Field] = {}
    for param in op.params:
        if param.kind == "tile":
            continue
        stride = 8 if param.is_pointer else itemsize(param.dtype)
        rows = 3 if param.is_pointer else 1
        fields[param] = Field(param, offset, stride, lanes)
        offset += _round_up(rows * stride * lanes, 64)
    result = offset
    if op.result:
        offset += _round_up(itemsize(op.result[0]) * max(op.result[1], 1) * lanes, 64)
    operand_bytes = offset
    for param in op.params:
        if param.kind == "tile":
            stride = itemsize(param.dtype) * param.length
            fields[param] = Field(param, offset, stride, lanes)
            offset += _round_up(stride * lanes, 64)
    return Layout(tuple(fields[param] for param in op.params), result, offset, operand_bytes)


@functools.cache
def record(op: Op) -> Layout:
    """The layout of a thread op; the first word is the scheduler's."""
    offset = 8
    fields = []
    for param in op.params:
        fields.append(Field(param, offset, 0))
        size = 24 if param.is_pointer else itemsize(param.dtype) * max(param.length, 1)
        offset += _round_up(size, 8)
    result = offset
    if op.result:
        offset += _round_up(itemsize(op.result[0]) * max(op.result[1], 1), 8)
    return Layout(tuple(fields), result, offset, offset)


def copy_record(op: Op) -> Layout:
    """The layout of an async copy of one thread.

    Raises:
        TypeError: it has a tile or a result, or more operands than a record of the scheduler holds.
    """
    place = record(op)
    if op.result or tiles(op):
        raise TypeError(f"op {op.name}: an async copy has neither register tiles nor a result")
    if place.nbytes > COPY_BYTES:
        raise TypeError(f"op {op.name}: an async copy has at most {COPY_BYTES // 8 - 1} words")
    return place


def tiles(op: Op) -> list[Param]:
    """The op's register tiles."""
    return [param for param in op.params if param.kind == "tile"]


def product_bytes(op: Op) -> int:
    """Size of the record of an async op of a unit.

    Raises:
        TypeError: it has a result or too many tiles.
    """
    if op.result or len(tiles(op)) > MAX_TILES:
        raise TypeError(
            f"op {op.name}: an async op of a warp or warpgroup has no result and at most "
            f"{MAX_TILES} register tiles"
        )
    return product_operands(op) + exchange(op).operand_bytes


def product_operands(op: Op) -> int:
    """Where the operands begin in such a record."""
    return _round_up(PRODUCT_HEADER + 8 * int(op.scope) * len(tiles(op)), 64)


def _round_up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step
