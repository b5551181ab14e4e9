"""Operands with which any op of the table can be run, and the bytes that its effects name."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from nbmoe_kernels.device.effects import (
    Access,
    Atomic,
    MbarArrive,
    MbarComplete,
    MbarInit,
    MbarInval,
    MbarWait,
)
from nbmoe_kernels.device.mbarrier import advance
from nbmoe_kernels.device.op import NUMPY_TYPES, Op, Param, Scope
from nbmoe_kernels.device.tensor_map import encode_tensor_map

START = 64
"""Bytes of an array before the place that an op's pointer names."""
MATRIX_ROWS, MATRIX_BYTES = 20, 160
_SCALARS = {"nbytes": 48, "count": 2, "parity": 0, "column": 64, "row": -3, "scale_d": 1}
_SCALARS |= {"rows": 9, "columns": 24, "tokens": 11, "pitch": 16}
# Bit patterns of numbers in [1, 2): every bit of theirs counts in a product.
_ONES = {"f16": (np.uint16, 0x3C00, 10), "bf16": (np.uint16, 0x3F80, 7), "e4m3": (np.uint8, 56, 3)}


@dataclass
class Example:
    """Operands of one call: arrays by pointer, all arguments by name, and the mapped matrix."""

    op: Op
    arrays: dict[str, np.ndarray]
    operands: dict[str, Any]
    matrix: np.ndarray

    def run(self) -> Any:
        """Run the twin; what it returned and the tiles it updated."""
        result = self.op.twin(*self.operands.values())
        tiles = [self.operands[p.name].tobytes() for p in self.op.params if p.kind == "tile"]
        return result, tiles

    def bytes_of(self, name: str) -> np.ndarray:
        """The bytes of an array; ``matrix`` is the matrix of the tensor map."""
        array = self.matrix if name == "matrix" else self.arrays[name]
        return array.reshape(-1).view(np.uint8)


def example(op: Op, fill: int) -> Example:
    """Operands for an op; its arrays hold ``fill`` where no special content is needed."""
    matrix = np.full((MATRIX_ROWS, MATRIX_BYTES), fill ^ 0x0F, np.uint8)
    made = Example(op, {}, {}, matrix)
    for p in op.params:
        if p.kind == "scalar":
            made.operands[p.name] = _scalar(op, p, fill)
        elif p.kind == "tile":
            shape = (p.length,) if op.scope is Scope.THREAD else (int(op.scope), p.length)
            made.operands[p.name] = np.zeros(shape, NUMPY_TYPES[p.dtype])
        else:
            made.arrays[p.name] = made.operands[p.name] = _array(op, p, fill, matrix)
            made.operands[f"{p.name}_index"] = _index(op, p)
    return made


def _scalar(op: Op, p: Param, fill: int) -> Any:
    value = fill if p.name == "expected" else _SCALARS.get(p.name, 3)
    if op.scope is Scope.THREAD or p.uniform:
        return NUMPY_TYPES[p.dtype](value)
    lanes = np.arange(int(op.scope)) + 257 * value
    if op.group == "wgmma":
        dtype, ones, _ = _ONES[_operand_type(op)]
        lanes = np.full((int(op.scope), 4 // dtype().itemsize), ones, dtype).view(np.uint32)[:, 0]
    return lanes.astype(NUMPY_TYPES[p.dtype])


def _array(op: Op, p: Param, fill: int, matrix: np.ndarray) -> np.ndarray:
    if p.name == "tensor_map":
        rows, row_bytes = matrix.shape
        box_rows = int(op.name.split("_")[2]) if op.name.startswith("tma_") else 8
        encoded = encode_tensor_map(
            matrix.ctypes.data, rows, row_bytes, box_rows, target="emulator"
        )
        return np.concatenate([np.zeros(START, np.uint8), encoded])
    if op.group == "wgmma":
        dtype, ones, bits = _ONES[_operand_type(op)]
        rows = 8 * -(-_operand_rows(op, p) // 8)
        rng = np.random.default_rng(fill)
        random = rng.integers(0, 1 << bits, (START + 128 * rows + 256 + 1024) // dtype().itemsize)
        return (random + ones).astype(dtype).view(np.uint8)
    if p.dtype == "u64" and p.name == "bar":
        word = advance(np.uint64(7 | 7 << 20), 1, 4096)
        return np.full(START // 8 + 4, word, np.uint64) + np.uint64(fill)
    if p.name == "dst":
        fill ^= 0xFF  # unlike what is copied there
    size = START + 1024 + (128 * int(op.name.split("_")[2]) if op.name.startswith("tma_") else 0)
    return np.full(size // np.dtype(NUMPY_TYPES[p.dtype]).itemsize, fill, NUMPY_TYPES[p.dtype])


def _operand_type(op: Op) -> str:
    """Of the products' operands."""
    return next(part for part in op.name.split("_") if part in _ONES)


def _operand_rows(op: Op, p: Param) -> int:
    return 64 if p.name == "a" else int(op.name.split("n")[1].split("k")[0])


def _index(op: Op, p: Param) -> Any:
    first = START // np.dtype(NUMPY_TYPES[p.dtype]).itemsize
    if op.name.startswith("tma_") and p.kind == "shared" and p.dtype == "u8":
        first *= 2
    kind = np.uint32 if p.kind == "shared" else np.uint64
    if op.scope is Scope.THREAD:
        return kind(first)
    lanes = np.arange(int(op.scope))
    # ldmatrix and stmatrix: rows of four words, in no order and with gaps.
    step = 0 if op.group == "wgmma" else 4
    return (first + step * (lanes * 5 % 37)).astype(kind)


def named_bytes(made: Example, *, write: bool) -> dict[str, set[int]]:
    """Bytes that the op's effects say are read (or written), by array."""
    found: dict[str, set[int]] = {name: set() for name in (*made.arrays, "matrix")}
    for effect in made.op.effects or ():
        if isinstance(effect, Access):
            if effect.write != write:
                continue
            if effect.addresses is not None:
                addresses = effect.addresses(made.operands).astype(np.int64)
                found["matrix"] |= set(addresses - made.matrix.ctypes.data)
            elif effect.footprint is not None:
                found[effect.param] |= set(np.asarray(effect.footprint(made.operands)).tolist())
            else:
                found[effect.param] |= _span(made, effect.param, effect.nbytes)
        elif isinstance(effect, Atomic):
            if effect.kind == "rmw" or (effect.kind == "store") == write:
                found[effect.param] |= _span(made, effect.param, effect.nbytes)
        elif (
            isinstance(effect, MbarArrive | MbarComplete)
            or (isinstance(effect, MbarInit | MbarInval) and write)
            or (isinstance(effect, MbarWait) and not write)
        ):
            found[effect.param] |= _span(made, effect.param, 8)
    return found


def _span(made: Example, name: str, nbytes: int | str) -> set[int]:
    count = int(made.operands[nbytes]) if isinstance(nbytes, str) else nbytes
    itemsize = made.arrays[name].itemsize
    starts = np.ravel(made.operands[f"{name}_index"]).astype(np.int64) * itemsize
    return {int(start) + i for start in starts for i in range(count)}
