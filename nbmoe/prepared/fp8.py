"""FP8 operands in the order in which the sm_90 matmuls read them, in numpy, with the inverses.

Both operands are e4m3 codes in K order, in 128-blocks of K, zeros past K:

    weights  (E, 2 ceil(N/128), ceil(K/128), 64, 128): units of 64 rows, zero rows past N
    tokens   (ceil(K/128), R, 128) with R and the rows of slots of `nbmoe_kernels.prepared_tokens`

* The 16-byte chunk c of row r of a unit or panel lies at chunk c ^ (r % 8): `wgmma`'s swizzle.
* Row 16 w + 2 g + i of a unit (i = 0, 1) lies at row 16 w + 8 i + g, so that `wgmma` leaves a pair
  of rows in one thread.
* Scales of tokens are f32 (G, R), G = ceil(K/128) for groups of 128 and 1 for rows, by panel row;
  up to 3 rows past a slot's last are 0. Or (1,), one for all. Scales of weights stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nbmoe import codecs
from nbmoe.layouts import ceil_div
from nbmoe.prepared.tokens import panel_rows
from nbmoe.prepared.weights import PreparedWeights
from nbmoe_kernels.prepared_tokens import ROW_GROUP, token_rows

Array = npt.NDArray[Any]
BLOCK: Final = 128
UNIT_ROWS: Final = 64
_CHUNKS = 8


@dataclass(frozen=True, eq=False)
class PreparedFp8Tokens:
    """FP8 tokens for the sm_90 matmuls, made by `nbmoe.ops.prepare_fp8_tokens` and the quantizer.

    Attributes:
        data: (ceil(K/128), R, 128) uint8, an array of whatever kind the tokens were, with
            R = token_rows(num_rows, num_slots).
        scales: float32 (ceil(K/128), R) for groups of 128, (1, R) for rows, or (1,).
        num_rows: M, rows of all slots [rows].
        num_slots: S.
        k: K, columns [elements].
    """

    data: Any
    scales: Any
    num_rows: int
    num_slots: int
    k: int


def fp8_token_shape(num_rows: int, num_slots: int, k: int) -> tuple[int, int, int]:
    """Shape of the data of `PreparedFp8Tokens`."""
    return ceil_div(k, BLOCK), token_rows(num_rows, num_slots), BLOCK


def fp8_weight_shape(num_experts: int, n: int, k: int) -> tuple[int, int, int, int, int]:
    """Shape of the data of prepared weights before it is flattened."""
    return num_experts, 2 * ceil_div(n, BLOCK), ceil_div(k, BLOCK), UNIT_ROWS, BLOCK


def fp8_weight_bytes(num_experts: int, n: int, k: int) -> int:
    """Size of prepared weights [bytes]."""
    return int(np.prod(fp8_weight_shape(num_experts, n, k)))


def pack_fp8_weights(weight: Array) -> PreparedWeights:
    """Puts (E, N, K) e4m3 codes into the prepared layout."""
    experts, n, k = weight.shape
    shape = fp8_weight_shape(experts, n, k)
    padded = np.zeros((experts, shape[1] * UNIT_ROWS, shape[2] * BLOCK), np.uint8)
    padded[:, :n, :k] = weight.view(np.uint8)
    # Expert, unit, w, g, i, block, K -> expert, unit, block, w, i, g, K.
    rows = padded.reshape(experts, shape[1], 4, 8, 2, shape[2], BLOCK)
    units = rows.transpose(0, 1, 5, 2, 4, 3, 6).reshape(shape)
    return PreparedWeights(_swizzled(units).reshape(-1), "e4m3", experts, n, k)


def unpack_fp8_weights(prepared: PreparedWeights) -> Array:
    """Undoes `pack_fp8_weights` of a numpy array."""
    shape = fp8_weight_shape(prepared.num_experts, prepared.n, prepared.k)
    units = _swizzled(prepared.data.view(np.uint8).reshape(shape))
    rows = units.reshape(shape[0], shape[1], shape[2], 4, 2, 8, BLOCK).transpose(
        0, 1, 3, 5, 4, 2, 6
    )
    matrix = rows.reshape(shape[0], shape[1] * UNIT_ROWS, shape[2] * BLOCK)
    return np.ascontiguousarray(matrix[:, : prepared.n, : prepared.k])


def pack_fp8_tokens(
    hidden: Array, a_scales: Array, expert_start: Array | None = None
) -> PreparedFp8Tokens:
    """Puts tokens into the prepared layout; rows that no slot owns are 0.

    Args:
        hidden: (M, K) e4m3 codes.
        a_scales: float32 or bfloat16 (ceil(K/128), Mpad), (1, Mpad), (M, 1), or (1,) for all.
        expert_start: (S + 1,) prefix sums [rows], None for rows without slots.
    """
    num_rows, k = hidden.shape
    slots = 1 if expert_start is None else len(expert_start) - 1
    shape = fp8_token_shape(num_rows, slots, k)
    rows = panel_rows(num_rows, expert_start)
    first = 0 if expert_start is None else int(expert_start[0])
    used = slice(first, first + len(rows))
    padded = np.zeros((len(rows), shape[0] * BLOCK), np.uint8)
    padded[:, :k] = hidden.view(np.uint8)[used]
    panels = np.zeros(shape, np.uint8)
    panels[:, rows] = padded.reshape(len(rows), shape[0], BLOCK).transpose(1, 0, 2)
    return PreparedFp8Tokens(
        _swizzled(panels),
        _pack_scales(a_scales, num_rows, shape[1], rows, used),
        num_rows,
        slots,
        k,
    )


def _pack_scales(
    a_scales: Array, num_rows: int, panel_height: int, rows: Array, used: slice
) -> Array:
    values: Array = a_scales if a_scales.dtype == np.float32 else codecs.decode_bf16(a_scales)
    if values.ndim == 1:
        return values.copy()
    groups = values.reshape(1, -1) if values.shape == (num_rows, 1) else values
    scales = np.zeros((len(groups), panel_height), np.float32)
    scales[:, rows] = groups[:, used]
    return scales


def unpack_fp8_tokens(
    prepared: PreparedFp8Tokens, expert_start: Array | None = None
) -> tuple[Array, Array]:
    """Undoes `pack_fp8_tokens` of numpy arrays: codes (M, K) and scales (G, M) or (1,).

    Rows of no slot are 0, and so are their scales.
    """
    rows = panel_rows(prepared.num_rows, expert_start)
    first = 0 if expert_start is None else int(expert_start[0])
    used = slice(first, first + len(rows))
    panels = _swizzled(prepared.data.view(np.uint8))[:, rows]
    codes = np.zeros((prepared.num_rows, prepared.k), np.uint8)
    codes[used] = panels.transpose(1, 0, 2).reshape(len(rows), -1)[:, : prepared.k]
    if prepared.scales.ndim == 1:
        return codes, prepared.scales
    scales: Array = np.zeros((len(prepared.scales), prepared.num_rows), np.float32)
    scales[:, used] = prepared.scales[:, rows]
    return codes, scales


def _swizzled(rows: Array) -> Array:
    """Rows of 128 bytes with chunk c of row r at c ^ (r % 8); its own inverse."""
    chunks = rows.reshape(*rows.shape[:-1], _CHUNKS, -1)
    places = np.arange(_CHUNKS) ^ (np.arange(rows.shape[-2])[:, np.newaxis] % ROW_GROUP)
    swizzled = np.take_along_axis(
        chunks, np.broadcast_to(places[..., np.newaxis], (*chunks.shape[:-1], 1)), axis=-2
    )
    return swizzled.reshape(rows.shape)
