"""MXFP4 weights for e4m3 tokens, in the order in which the sm_90 matmul reads them, in numpy.

A block's scale becomes a power of two relative to its row, from 2^-8 to 2^6, which the kernel folds
into the codes: they are then e4m3 numbers, exactly. The row's own power of two is a float32 scale.

    data    (E, 2 ceil(N/128), ceil(K/128), 4352) uint8, flat: `nbmoe_kernels.prepared_w4a8` draws a
            unit; zero codes past N and K
    scales  (E, N, 1) float32

Rows lie as in `nbmoe.prepared.fp8`: row 16 w + 2 g + i of a unit is row 16 w + 8 i + g there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nbmoe import codecs, layouts
from nbmoe.layouts import ceil_div
from nbmoe_kernels.prepared_w4a8 import (
    CODE_BYTES,
    LARGEST_POWER,
    LEAST_USUAL,
    NAN_POWER,
    POWER_BIAS,
    UNIT_BYTES,
    UNUSUAL,
)

Array = npt.NDArray[Any]
BLOCK: Final = 32
_NAN_BYTE = 0xFF
_UNIT_ROWS, _UNIT_K = 64, 128


@dataclass(frozen=True, eq=False)
class PreparedW4A8Weights:
    """MXFP4 weights for the sm_90 matmul of FP8 tokens, made by `nbmoe.ops.prepare_w4a8_weights`.

    Attributes:
        data: (bytes,) uint8, an array of whatever kind the weights were.
        scales: (E, N, 1) float32, a power of two a row.
        num_experts: E.
        n: N, rows of an expert's weight.
        k: K, columns [elements].
    """

    data: Any
    scales: Any
    num_experts: int
    n: int
    k: int


def unit_grid(n: int, k: int) -> tuple[int, int]:
    """Units down and across a weight."""
    return 2 * ceil_div(n, 128), ceil_div(k, _UNIT_K)


def w4a8_weight_bytes(num_experts: int, n: int, k: int) -> int:
    """Size of the data [bytes]."""
    down, across = unit_grid(n, k)
    return num_experts * down * across * UNIT_BYTES


def row_powers(codes: Array, scales: Array) -> tuple[Array, Array]:
    """What folds where.

    Args:
        codes: (E, N, K) e2m1 codes, one a byte.
        scales: (E, N, K/32) e8m0 bytes.

    Returns:
        The rows' e8m0 bytes (E, N), int32 and 0 or less for tiny ones; the powers of the blocks
        (E, N, K/32), int32, relative to them: at most 6, 0 of blocks of zeros and of NaN.
    """
    used = (codes.reshape(*scales.shape, BLOCK) & 7).any(axis=-1) & (scales != _NAN_BYTE)
    bytes = scales.astype(np.int32)
    top = np.where(used, bytes, -1).max(axis=-1)
    rows = np.where(top < 0, 127, top - LARGEST_POWER)
    return rows, np.where(used, bytes - rows[..., np.newaxis], 0)


def pack_w4a8_weights(weight: Array, b_scales: Array) -> PreparedW4A8Weights:
    """Puts MXFP4 weights into the prepared layout.

    Args:
        weight: (E, N, K/2) packed codes.
        b_scales: (E, ceil(N/128), ceil(K/128), 32, 4, 4) scale tiles.

    Raises:
        ValueError: a row's scales span more than 2^14.
    """
    codes = codecs.unpack_nibbles(weight.view(np.uint8))
    experts, n, k = codes.shape
    scales = layouts.deinterleave_scales(b_scales.view(np.uint8), n, k // BLOCK)
    rows, powers = row_powers(codes, scales)
    if (powers < -POWER_BIAS).any():
        raise ValueError("a row's scales span more than 2^14")
    indices = np.where(scales == _NAN_BYTE, NAN_POWER, powers + POWER_BIAS).astype(np.uint8)
    indices[(indices < LEAST_USUAL) | (indices == NAN_POWER)] |= UNUSUAL
    down, across = unit_grid(n, k)
    grid = np.zeros((experts, down * _UNIT_ROWS, across * (_UNIT_K // BLOCK)), np.uint8)
    grid[:, :n, : k // BLOCK] = indices
    padded = np.zeros((experts, down * _UNIT_ROWS, across * _UNIT_K), np.uint8)
    padded[:, :n, :k] = codes
    # Rows 16 w + 2 g + i; K 128 q + 32 j + 16 h + 4 t + m.
    split = padded.reshape(experts, down, 4, 8, 2, across, 2, 2, 2, 4, 4)
    units = split.transpose(0, 1, 5, 6, 2, 3, 9, 7, 4, 8, 10)  # ... plane, w, g, t, odd, i, h, m
    magnitudes, signs = (units & 7).astype(np.uint32), (units >> 3).astype(np.uint32)
    h, m = np.arange(2, dtype=np.uint32)[:, np.newaxis], np.arange(4, dtype=np.uint32)
    words = (magnitudes << (16 * h + 4 * m)) | (signs << (8 * m + 4 * h + 3))
    packed = np.bitwise_or.reduce(words.reshape(*units.shape[:-2], 8), axis=-1)
    data = np.empty((experts, down, across, UNIT_BYTES), np.uint8)
    data[..., :CODE_BYTES] = (
        np.ascontiguousarray(packed).view(np.uint8).reshape(experts, down, across, -1)
    )
    tails = grid.reshape(experts, down, 4, 8, 2, across, 4).transpose(0, 1, 5, 2, 3, 6, 4)
    data[..., CODE_BYTES:] = tails.reshape(experts, down, across, -1)
    of_rows = np.ldexp(np.float32(1), rows - 127).astype(np.float32)
    return PreparedW4A8Weights(data.reshape(-1), of_rows[..., np.newaxis], experts, n, k)


def folded_codes(prepared: PreparedW4A8Weights) -> Array:
    """The e4m3 codes (E, N, K) that the kernel multiplies, of numpy arrays."""
    experts, n, k = prepared.num_experts, prepared.n, prepared.k
    down, across = unit_grid(n, k)
    data = prepared.data.reshape(experts, down, across, UNIT_BYTES)
    words = np.ascontiguousarray(data[..., :CODE_BYTES]).view(np.uint32)
    words = words.reshape(experts, down, across, 2, 4, 8, 4, 2, 2, 1, 1)
    h, m = np.arange(2, dtype=np.uint32)[:, np.newaxis], np.arange(4, dtype=np.uint32)
    magnitude = (words >> (16 * h + 4 * m)) & 7
    sign = (words >> (8 * m + 4 * h + 3)) & 1
    # Expert, unit, q, plane, w, g, t, odd, i, h, m -> rows 16 w + 2 g + i, K.
    order = (0, 1, 4, 5, 8, 2, 3, 7, 9, 6, 10)
    shape = (experts, down * _UNIT_ROWS, across * _UNIT_K)
    magnitude, sign = (x.transpose(order).reshape(shape) for x in (magnitude, sign))
    tails = data[..., CODE_BYTES:].reshape(experts, down, across, 4, 8, 4, 2)
    powers = tails.transpose(0, 1, 3, 4, 6, 2, 5).reshape(*shape[:2], -1).repeat(BLOCK, axis=-1)
    powers = powers & ~np.uint8(UNUSUAL)
    values = codecs.decode_e2m1(magnitude.astype(np.uint8)).astype(np.float32)
    values = np.ldexp(values, powers.astype(np.int32) - POWER_BIAS)
    codes = codecs.encode_e4m3(values.astype(np.float32)).view(np.uint8)
    codes[powers == NAN_POWER] = 0x7F
    return np.ascontiguousarray((codes | (sign << 7).astype(np.uint8))[:, :n, :k])
