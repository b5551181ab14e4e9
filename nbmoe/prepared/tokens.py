"""`PreparedTokens`: rows of activations in the order in which the sm_90 matmuls read them.

`nbmoe_kernels.prepared_tokens` draws the layout; here it is numpy, with its inverse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe import codecs, layouts
from nbmoe.formats import FORMATS
from nbmoe.reference.matmul import OPERAND_EXPONENT, decode_blocks
from nbmoe.reference.quantize import load_scale_tiles
from nbmoe_kernels.prepared_tokens import (
    PANEL_K,
    ROW_BYTES,
    ROW_GROUP,
    token_panels,
    token_rows,
)

Array = npt.NDArray[Any]
U16Array = npt.NDArray[np.uint16]

NAN_BITS = 0x7FFF
"""NaN of both operand types, where a code or a scale is NaN."""


@dataclass(frozen=True, eq=False)
class PreparedTokens:
    """Tokens for the sm_90 matmuls, made by `nbmoe.ops.prepare_tokens` and the quantizers.

    Attributes:
        data: (ceil(K/64), R, 128) uint8, an array of whatever kind the tokens were, with
            R = token_rows(num_rows, num_slots).
        format: Format of the tokens that it was made from: "nvfp4", "mxfp4", "mxfp8" or "bf16".
        num_rows: M, rows of all slots [rows].
        num_slots: S, 1 for rows without slots.
        k: K, columns [elements].
    """

    data: Any
    format: str
    num_rows: int
    num_slots: int
    k: int


def token_shape(num_rows: int, num_slots: int, k: int) -> tuple[int, int, int]:
    """Shape of the data of `PreparedTokens`."""
    return token_panels(k), token_rows(num_rows, num_slots), ROW_BYTES


def panel_rows(num_rows: int, expert_start: Array | None) -> npt.NDArray[np.int64]:
    """The panel row of every row that a slot owns; without slots, of every row."""
    if expert_start is None:
        return np.arange(num_rows)
    start = np.asarray(expert_start).astype(np.int64)
    slots = np.arange(len(start) - 1)
    bases = (start[:-1] + ROW_GROUP * slots) // ROW_GROUP * ROW_GROUP
    used: npt.NDArray[np.int64] = np.repeat(bases - start[:-1], np.diff(start))
    return used + np.arange(start[0], start[-1])


def pack_tokens(
    hidden: Array,
    a_scales: Array | None = None,
    expert_start: Array | None = None,
    a_scale_offsets: Array | None = None,
    *,
    format: str,
) -> PreparedTokens:
    """Puts tokens into the prepared layout; rows that no slot owns are 0.

    Args:
        hidden: (M, K) bfloat16 or codes, packed (M, K/2) for FP4 formats.
        a_scales: 5-D tiles of the block scales; None for bf16.
        expert_start: (S + 1,) prefix sums [rows], None for rows without slots.
        a_scale_offsets: (S,), see `nbmoe.layouts.scales_offset`; None without slots and for bf16.
        format: "nvfp4", "mxfp4", "mxfp8" or "bf16".
    """
    slots = 1 if expert_start is None else len(expert_start) - 1
    if format == "bf16":
        operand = codecs.bf16_bits(hidden)
    else:
        assert a_scales is not None, "block formats have scales"
        operand = _decode(hidden, a_scales, expert_start, a_scale_offsets, format)
    rows, k = operand.shape
    return PreparedTokens(_pack(operand, expert_start, slots), format, rows, slots, k)


def unpack_tokens(prepared: PreparedTokens, expert_start: Array | None = None) -> Array:
    """Undoes the packing: the operands of every row, in the order of K.

    Args:
        prepared: Tokens whose data is a numpy array.
        expert_start: (S + 1,) prefix sums [rows], None for rows without slots.

    Returns:
        (M, K) float16 for nvfp4, code * scale * 2^-14, else bfloat16. Rows of no slot are 0.
    """
    rows = panel_rows(prepared.num_rows, expert_start)
    count = token_panels(prepared.k)
    panels = prepared.data.view(np.uint16)[:, rows].reshape(count, len(rows), 8, 8)
    chunks = np.arange(8) ^ (rows[:, np.newaxis] % ROW_GROUP)
    logical = np.take_along_axis(panels, chunks[np.newaxis, :, :, np.newaxis], axis=2)
    # Panel, row, step j, h / 2, t, h % 2 to row, panel, t, h / 2, h % 2, j.
    elements = logical.reshape(count, len(rows), 4, 2, 4, 2).transpose(1, 0, 4, 3, 5, 2)
    first = 0 if expert_start is None else int(expert_start[0])
    bits = np.zeros((prepared.num_rows, prepared.k), np.uint16)
    bits[first : first + len(rows)] = elements.reshape(len(rows), count * PANEL_K)[:, : prepared.k]
    return bits.view(np.float16 if prepared.format == "nvfp4" else codecs.BF16)


def _pack(operand: U16Array, expert_start: Array | None, slots: int) -> Array:
    num_rows, k = operand.shape
    rows = panel_rows(num_rows, expert_start)
    first = 0 if expert_start is None else int(expert_start[0])
    padded = np.zeros((len(rows), token_panels(k) * PANEL_K), np.uint16)
    padded[:, :k] = operand[first : first + len(rows)]
    elements = padded.reshape(len(rows), token_panels(k), 4, 2, 2, 4).transpose(1, 0, 5, 3, 2, 4)
    logical = elements.reshape(token_panels(k), len(rows), 8, 8)
    chunks = np.arange(8) ^ (rows[:, np.newaxis] % ROW_GROUP)
    data = np.zeros(token_shape(num_rows, slots, k), np.uint8)
    swizzled = np.take_along_axis(logical, chunks[np.newaxis, :, :, np.newaxis], axis=2)
    data.view(np.uint16)[:, rows] = swizzled.reshape(token_panels(k), len(rows), PANEL_K)
    return data


def _decode(
    hidden: Array,
    a_scales: Array,
    expert_start: Array | None,
    a_scale_offsets: Array | None,
    format: str,
) -> U16Array:
    """Operands (M, K) of the codes of rows in slots, in the order of K; other rows are 0."""
    fmt = FORMATS[format]
    tiles = a_scales.view(np.uint8)
    rows, k = len(hidden), hidden.shape[1] * fmt.per_byte
    starts = np.asarray([0, rows] if expert_start is None else expert_start).astype(np.int64)
    offsets = np.zeros(1, np.uint32) if a_scale_offsets is None else a_scale_offsets
    scales = np.zeros((rows, fmt.scale_columns(k)), np.uint8)
    for slot, first_tile in enumerate(layouts.tile_starts(starts, offsets)):
        begin, end = starts[slot], starts[slot + 1]
        scales[begin:end] = load_scale_tiles(tiles, first_tile, end - begin, scales.shape[1])
    values = decode_blocks(hidden, scales, fmt)
    if format != "nvfp4":
        return codecs.bf16_bits(codecs.encode_bf16(values))
    with np.errstate(over="ignore", invalid="ignore"):
        operand = (values * np.float32(2.0**OPERAND_EXPONENT)).astype(np.float16)
    bits: U16Array = operand.view(np.uint16)
    bits[np.isnan(values)] = NAN_BITS
    return bits
