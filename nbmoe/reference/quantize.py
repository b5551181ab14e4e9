"""NVFP4 quantization: 16 values share an e4m3 scale, an expert's rows share a float32 factor."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nbmoe import codecs, layouts
from nbmoe.codecs import F32Array, U8Array
from nbmoe.errors import ShapeError, UnsupportedError, message
from nbmoe.formats import NVFP4
from nbmoe.reference.float32 import FLT_MAX

ONE_SIXTH: Final = np.float32(1) / np.float32(NVFP4.max_value)


def quantize_nvfp4(x: F32Array, tensor_sf: np.float32) -> tuple[U8Array, U8Array]:
    """Quantizes float32 values in blocks of 16 along the last axis.

    Every operation rounds once, to float32. A NaN makes its block's scale NaN and all codes 7. A
    block whose scale rounds to zero gets codes 0.

    Args:
        x: (..., K) float32, K % 16 == 0.
        tensor_sf: The inverse of the calibrated input scale.

    Returns:
        Packed codes (..., K/2) and e4m3 scale bytes (..., K/16), both uint8.
    """
    blocks = x.reshape(*x.shape[:-1], NVFP4.scale_columns(x.shape[-1]), NVFP4.block)
    tensor_sf = np.float32(tensor_sf)
    with np.errstate(all="ignore"):
        amax = np.abs(blocks).max(axis=-1)
        scale_bytes = codecs.encode_e4m3(tensor_sf * (amax * ONE_SIXTH))
        scale = codecs.decode_e4m3(scale_bytes)
        inverse = np.float32(1) / (scale * (np.float32(1) / tensor_sf))
        inverse = np.where(scale == 0, np.float32(0), np.minimum(inverse, FLT_MAX))
        codes = codecs.encode_e2m1(blocks * inverse[..., np.newaxis])
    return codecs.pack_nibbles(codes.reshape(x.shape)), scale_bytes


def grouped_quantize_dynamic_block_scaled(
    input: npt.NDArray[Any],
    row_offsets: npt.NDArray[np.uint32],
    scales_offsets: npt.NDArray[np.uint32],
    expert_ids: npt.NDArray[np.int32],
    sf_tensor: F32Array,
    *,
    sf_vector_size: int = 16,
    indices: npt.NDArray[np.uint32] | None = None,
    indices_divisor: int = 1,
) -> tuple[U8Array, U8Array]:
    """Quantizes the rows of each group to NVFP4 with its expert's factor, gathering on the way.

    Args:
        input: (R, K) bf16, K % 16 == 0.
        row_offsets: (S + 1,) prefix sums: slot s owns rows row_offsets[s]..row_offsets[s + 1].
        scales_offsets: (S,) see `nbmoe.layouts.scales_offset` [128-row tiles].
        expert_ids: (S,) expert of each slot. The rows of a slot with -1 get codes 0 and scales 0.
        sf_tensor: (E,) float32 inverse input scales, by expert id.
        sf_vector_size: Elements that share a scale; 16.
        indices: (M,) gather: output row i reads input row indices[i] // indices_divisor. Without
            it, output row i reads input row i.
        indices_divisor: Sources per input row, the top-k of the routing.

    Returns:
        Packed codes (rows, K/2) and scale tiles (tiles, ceil(K/64), 32, 4, 4), both uint8, with
        rows = M or R and tiles = ceil(rows/128) + min(S, rows). Padding in the tiles, and
        everything that belongs to no slot, is 0.

    Raises:
        ShapeError: K % 16 != 0.
        UnsupportedError: `sf_vector_size` is not 16.
    """
    if sf_vector_size != NVFP4.block:
        api = "grouped_quantize_dynamic_block_scaled"
        raise UnsupportedError(message(api, "sf_vector_size", "16", sf_vector_size))
    k = input.shape[1]
    if k % NVFP4.block:
        api = "grouped_quantize_dynamic_block_scaled"
        raise ShapeError(message(api, "input", "K % 16 == 0", input.shape))
    rows = len(input) if indices is None else len(indices)
    source = np.arange(rows) if indices is None else np.asarray(indices) // indices_divisor

    packed = np.zeros((rows, k // 2), np.uint8)
    tiles = np.zeros(
        (
            layouts.activation_tiles(rows, len(expert_ids)),
            layouts.ceil_div(k, NVFP4.tile_columns),
            *layouts.TILE_SHAPE,
        ),
        np.uint8,
    )
    first_tiles = layouts.tile_starts(row_offsets, scales_offsets)
    for slot, expert in enumerate(expert_ids):
        start, stop = int(row_offsets[slot]), int(row_offsets[slot + 1])
        if expert < 0 or start == stop:
            continue
        x = codecs.decode_bf16(input[source[start:stop]])
        packed[start:stop], scales = quantize_nvfp4(x, sf_tensor[expert])
        store_scale_tiles(tiles, int(first_tiles[slot]), scales)
    return packed, tiles


def store_scale_tiles(tiles: U8Array, first_tile: int, scales: U8Array) -> None:
    """Writes one group's row-major scales as whole tiles, from `first_tile` on."""
    group = layouts.interleave_scales(scales)
    tiles[first_tile : first_tile + len(group)] = group


def load_scale_tiles(tiles: U8Array, first_tile: int, rows: int, columns: int) -> U8Array:
    """Reads one group's scales back as (rows, columns), touching no byte of padding."""
    used = layouts.ceil_div(rows, layouts.TILE_ROWS)
    return layouts.deinterleave_scales(tiles[first_tile : first_tile + used], rows, columns)
