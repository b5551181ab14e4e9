"""Tensor maps: 128 bytes in global memory that tell TMA where a matrix lies.

`encode_tensor_map` has two back ends. The driver's format is its own; the emulator's is eight
words of 64 bits, at the `Word` positions, then zeros.
"""

from enum import IntEnum
from typing import Any, Literal

import numpy as np
from numba import carray, njit
from numba.core import types
from numba.extending import intrinsic

MAP_BYTES = 128
ROW_BYTES = 128
"""Bytes of a box's row: the width of the swizzle."""
_MAGIC = 0x70616D726F736E74
_MAX_BOX_ROWS = 256


class Word(IntEnum):
    """Positions of the emulator's format."""

    MAGIC = 0
    ADDRESS = 1
    ROW_BYTES = 2
    ROWS = 3
    STRIDE = 4
    BOX_ROWS = 5


def encode_tensor_map(
    address: int,
    rows: int,
    row_bytes: int,
    box_rows: int,
    *,
    stride: int | None = None,
    target: Literal["gpu", "emulator"],
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The map of a row-major matrix of bytes, copied in boxes of 128 bytes with 128-byte swizzle.

    Args:
        address: where the matrix begins, a multiple of 16. For the emulator, the address of the
            NumPy array that holds it (``array.ctypes.data``).
        rows: rows of the matrix.
        row_bytes: bytes of a row. What a box reaches past it reads as 0 and is not stored.
        box_rows: rows of a box, up to 256.
        stride: bytes from one row to the next, a multiple of 16; default ``row_bytes``.
        target: ``gpu`` asks the CUDA driver, ``emulator`` writes the format that twins read.

    Returns:
        128 bytes (u8). On a GPU they must lie at a multiple of 64.

    Raises:
        ValueError: an argument that TMA cannot express.
        RuntimeError: the driver refuses.
    """
    stride = row_bytes if stride is None else stride
    if address % 16 or stride % 16:
        raise ValueError(
            "encode_tensor_map: address and stride: expected multiples of 16, "
            f"got {address:#x} and {stride}"
        )
    if not 1 <= box_rows <= _MAX_BOX_ROWS:
        raise ValueError(f"encode_tensor_map: box_rows: expected 1..256, got {box_rows}")
    if rows < 1 or not 1 <= row_bytes <= stride:
        raise ValueError(
            "encode_tensor_map: expected rows >= 1 and 1 <= row_bytes <= stride, "
            f"got {rows}, {row_bytes}, {stride}"
        )
    words = np.zeros(MAP_BYTES // 8, np.uint64)
    if target == "gpu":
        words[:] = _encode_with_driver(address, rows, row_bytes, box_rows, stride)
        return words.view(np.uint8)
    words[Word.MAGIC], words[Word.ADDRESS] = _MAGIC, address
    words[Word.ROW_BYTES], words[Word.ROWS] = row_bytes, rows
    words[Word.STRIDE], words[Word.BOX_ROWS] = stride, box_rows
    return words.view(np.uint8)


def _encode_with_driver(
    address: int, rows: int, row_bytes: int, box_rows: int, stride: int
) -> list[int]:
    from cuda.bindings import driver

    error, tensor_map = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2,
        address,
        [driver.cuuint64_t(row_bytes), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(stride)],
        [driver.cuuint32_t(ROW_BYTES), driver.cuuint32_t(box_rows)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error:
        raise RuntimeError(f"cuTensorMapEncodeTiled failed: {error!r}")
    return [int(word) for word in tensor_map.opaque]


@intrinsic
def _as_pointer(typing_context, address):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.uint8)(types.uint64), codegen


@njit
def memory_at(address, nbytes):
    """Bytes at an address, as an array that owns nothing; for twins."""
    return carray(_as_pointer(np.uint64(address)), (nbytes,), np.uint8)


@njit
def map_words(tensor_map, index, box_rows):
    """The words of an emulator's map, for twins.

    Raises:
        ValueError: the bytes are no such map, or one for boxes of other rows.
    """
    first = np.int64(index)
    words = tensor_map[first : first + MAP_BYTES].view(np.uint64)
    if words.size != MAP_BYTES // 8 or words[0] != np.uint64(_MAGIC):
        raise ValueError("TMA: the operand is no tensor map made for the emulator")
    if words[5] != np.uint64(box_rows):
        raise ValueError("TMA: the tensor map was made for boxes with another number of rows")
    return words


def inside_box(
    tensor_map: Any, index: int, column: int, row: int, box_rows: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The bytes of a box that lie inside the matrix.

    Returns:
        Of each: its row of the box, its byte of that row, and its address in global memory (u64).
    """
    words = np.asarray(tensor_map)[index : index + MAP_BYTES].view(np.uint64).astype(np.int64)
    rows, columns = np.indices((box_rows, ROW_BYTES))
    y, x = row + rows, column + columns
    inside = (y >= 0) & (y < words[Word.ROWS]) & (x >= 0) & (x < words[Word.ROW_BYTES])
    addresses = words[Word.ADDRESS] + y * words[Word.STRIDE] + x
    return rows[inside], columns[inside], addresses[inside].astype(np.uint64)
