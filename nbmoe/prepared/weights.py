"""`PreparedWeights`: weights in the order in which the sm_90 matmuls read them.

`nbmoe_kernels.prepared_weights` draws the layout; here it is numpy, with its inverse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe import codecs, layouts
from nbmoe.formats import FORMATS, MXFP8
from nbmoe_kernels.prepared_weights import FP4_BITS, UNIT_KINDS, k64_count, n64_count

Array = npt.NDArray[Any]

# Axes: expert, unit down, warp w, lane group g, row r of the pair, unit across, 16-block t, then
# the parts of an element's place in its 16-block.
_ROWS = (4, 8, 2)
_FP4_ELEMENTS = (2, 2, 4)  # word, half, nibble
_WIDE_ELEMENTS = (2, 2, 2, 2)  # 8 * high + 4 * second + 2 * plane + odd
_FP4_ORDER = (0, 1, 5, 2, 3, 6, 4, 7, 8, 9)
_MXFP8_ORDER = (0, 1, 5, 9, 2, 3, 6, 7, 4, 8, 10)
_BF16_ORDER = (0, 1, 5, 9, 10, 2, 3, 6, 7, 4, 8)
_SCALE_ORDER = (0, 1, 5, 2, 3, 6, 4)


@dataclass(frozen=True, eq=False)
class PreparedWeights:
    """Weights for the sm_90 matmuls, made by `nbmoe.ops.prepare_weights`.

    Attributes:
        data: (bytes,) uint8, an array of whatever kind the weights were.
        format: "nvfp4", "mxfp4", "mxfp8", "bf16" or "e4m3".
        num_experts: E.
        n: N, rows of an expert's weight.
        k: K, columns [elements].
    """

    data: Any
    format: str
    num_experts: int
    n: int
    k: int


def pack_weights(weight: Array, b_scales: Array | None = None, *, format: str) -> PreparedWeights:
    """Puts weights into the prepared layout.

    Args:
        weight: (E, N, K) codes or bfloat16, packed (E, N, K/2) for FP4 formats.
        b_scales: (E, ceil(N/128), ceil(K/(4 * block)), 32, 4, 4) scale tiles; None for bf16.
        format: "nvfp4", "mxfp4", "mxfp8" or "bf16".
    """
    kind = UNIT_KINDS[format]
    experts, n, _ = weight.shape
    if format == "bf16":
        k = weight.shape[2]
        elements = _pack_bf16(_in_units(codecs.bf16_bits(weight), _WIDE_ELEMENTS))
        return PreparedWeights(elements.reshape(-1), format, experts, n, k)
    fmt = FORMATS[format]
    codes = weight.view(np.uint8)
    codes = codecs.unpack_nibbles(codes) if fmt.per_byte == 2 else codes.copy()
    k = codes.shape[2]
    assert b_scales is not None, "block formats have scales"
    scales = layouts.deinterleave_scales(b_scales.view(np.uint8), n, k // fmt.block)
    if fmt is MXFP8:
        blocks = codes.reshape(*scales.shape, fmt.block)
        has_nan = ((blocks & 0x7F) == 0x7F).any(axis=-1)
        blocks[has_nan] = 0
        scales[has_nan] = 0xFF
        packed = _pack_mxfp8(_in_units(codes, _WIDE_ELEMENTS))
    else:
        packed = _pack_fp4(_in_units(codes, _FP4_ELEMENTS), format)
    grid = _in_units(scales, (), 64 // fmt.block).transpose(_SCALE_ORDER)
    units = (experts, n64_count(n), k64_count(k))
    parts = packed.reshape(*units, kind.code_bytes), grid.reshape(*units, kind.scale_bytes)
    return PreparedWeights(np.concatenate(parts, axis=-1).reshape(-1), format, experts, n, k)


def unpack_weights(prepared: PreparedWeights) -> tuple[Array, Array | None]:
    """Undoes `pack_weights`: weight and scale tiles.

    The only loss is in 32-blocks of mxfp8 with a NaN code, whose codes are 0 and whose scale is NaN
    afterwards.

    Args:
        prepared: Weights whose data is a numpy array.

    Returns:
        (E, N, K) bfloat16 or uint8 codes, packed (E, N, K/2) for FP4 formats, and scale tiles
        (E, ceil(N/128), ceil(K/(4 * block)), 32, 4, 4) uint8, or None for bf16.
    """
    format, experts, n, k = prepared.format, prepared.num_experts, prepared.n, prepared.k
    kind, down, across = UNIT_KINDS[format], n64_count(n), k64_count(k)
    units = prepared.data.reshape(experts, down, across, kind.unit_bytes)
    codes = np.ascontiguousarray(units[..., : kind.code_bytes])
    if format == "bf16":
        bits = codes.view(np.uint16).reshape(experts, down, across, 2, 2, 4, 8, 4, 2, 2, 2)
        return _from_units(bits.transpose(np.argsort(_BF16_ORDER)), n, k).view(codecs.BF16), None
    fmt = FORMATS[format]
    if fmt is MXFP8:
        shape = (experts, down, across, 2, 4, 8, 4, 2, 2, 2, 2)
        elements = codes.reshape(shape)[..., ::-1].transpose(np.argsort(_MXFP8_ORDER))
    else:
        elements = _unpack_fp4(codes, (experts, down, across, 4, 8, 4, 2, 2, 2), format)
    weight = _from_units(elements, n, k)
    if fmt.per_byte == 2:
        weight = codecs.pack_nibbles(weight)
    grid = np.ascontiguousarray(units[..., kind.code_bytes :])
    grid = grid.reshape(experts, down, across, 4, 8, 64 // fmt.block, 2)
    scales = _from_units(grid.transpose(np.argsort(_SCALE_ORDER)), n, k // fmt.block)
    return weight, layouts.interleave_scales(scales)


def _in_units(matrix: Array, element: tuple[int, ...], blocks: int = 4) -> Array:
    """Pads (E, N, K) with zeros and splits it by unit: (E, N64, 4, 8, 2, K64, blocks, *element)."""
    experts, n, columns = matrix.shape
    width = blocks * int(np.prod(element))
    down, across = n64_count(n), layouts.ceil_div(columns, width)
    padded = np.zeros((experts, 64 * down, across * width), matrix.dtype)
    padded[:, :n, :columns] = matrix
    return padded.reshape(experts, down, *_ROWS, across, blocks, *element)


def _from_units(units: Array, n: int, columns: int) -> Array:
    """Undoes `_in_units`."""
    experts, down = units.shape[:2]
    return np.ascontiguousarray(units.reshape(experts, 64 * down, -1)[:, :n, :columns])


def _pack_fp4(elements: Array, format: str) -> Array:
    halves = np.zeros(elements.shape[:-1], np.uint16)
    for i, (magnitude, sign) in enumerate(FP4_BITS[format]):
        code = elements[..., i].astype(np.uint16)
        halves |= ((code & 7) << magnitude) | ((code >> 3) << sign)
    return np.ascontiguousarray(halves.transpose(_FP4_ORDER[:-1])).view(np.uint8)


def _unpack_fp4(codes: Array, shape: tuple[int, ...], format: str) -> Array:
    halves = codes.view(np.uint16).reshape(shape)
    nibbles = [
        ((halves >> magnitude) & 7) | (((halves >> sign) & 1) << 3)
        for magnitude, sign in FP4_BITS[format]
    ]
    return np.stack(nibbles, axis=-1).astype(np.uint8).transpose(np.argsort(_FP4_ORDER))


def _pack_mxfp8(elements: Array) -> Array:
    return np.ascontiguousarray(elements.transpose(_MXFP8_ORDER)[..., ::-1])


def _pack_bf16(elements: Array) -> Array:
    return np.ascontiguousarray(elements.transpose(_BF16_ORDER)).view(np.uint8)
