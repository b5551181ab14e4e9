"""Block quantization: 16 (NVFP4) or 32 (MX) values share a scale byte.

For a block with largest magnitude amax, every operation rounded once to float32:

    NVFP4   s = e4m3(tensor_sf * (amax * (1/6)));  r = min(1 / (s * (1/tensor_sf)), FLT_MAX), or 0
            where s is 0
    MX      s = 2**e by a scale rule (`nbmoe.codecs.encode_e8m0`);  r = 1 / s, a power of two

and the code of x is that of x * r, to nearest even, saturating, with the sign of zero kept. A NaN
makes its block's scale NaN and all its codes the element's NaN code (7 where there is none).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nbmoe import codecs, layouts
from nbmoe.arrays import named_dtype
from nbmoe.codecs import F32Array, U8Array
from nbmoe.errors import ConfigError, ScaleError, ShapeError, UnsupportedError, message
from nbmoe.formats import FORMATS, MXFP4, NVFP4, SCALE_RULES, BlockFormat
from nbmoe.reference.float32 import FLT_MAX

Quantized = tuple[npt.NDArray[Any], npt.NDArray[Any]]
ONE_SIXTH: Final = np.float32(1) / np.float32(NVFP4.max_value)
ROW_RANGE: Final = np.float32(2688)
"""Largest magnitude that NVFP4 represents without a tensor scale: 6 * 448."""
SMALLEST_ROW_SCALE: Final = np.float32(1e-30)


def quantize_blocks(
    x: F32Array, fmt: BlockFormat, tensor_sf: np.float32 | float = 1.0, rule: str = "rceil"
) -> tuple[U8Array, U8Array]:
    """Quantizes float32 values in blocks along the last axis.

    Args:
        x: (..., K) float32, K a multiple of the block.
        fmt: The format.
        tensor_sf: NVFP4's inverse tensor scale. MX formats have none and ignore it.
        rule: How MX formats choose a scale; NVFP4 ignores it.

    Returns:
        Codes, packed two a byte (..., K/2) or (..., K), and scale bytes (..., K/block), as uint8.
    """
    blocks = x.reshape(*x.shape[:-1], fmt.scale_columns(x.shape[-1]), fmt.block)
    with np.errstate(all="ignore"):
        amax = np.abs(blocks).max(axis=-1)
        scales, factors = _nvfp4_scales(amax, tensor_sf) if fmt is NVFP4 else _mx(amax, fmt, rule)
        codes = codecs.encode(blocks * factors[..., np.newaxis], fmt.element).reshape(x.shape)
    return codecs.pack_nibbles(codes) if fmt.per_byte == 2 else codes, scales


def _nvfp4_scales(amax: F32Array, tensor_sf: np.float32 | float) -> tuple[U8Array, F32Array]:
    tensor_sf = np.float32(tensor_sf)
    scale_bytes = codecs.encode_e4m3(tensor_sf * (amax * ONE_SIXTH))
    scale = codecs.decode_e4m3(scale_bytes)
    inverse = np.float32(1) / (scale * (np.float32(1) / tensor_sf))
    return scale_bytes, np.where(scale == 0, np.float32(0), np.minimum(inverse, FLT_MAX))


def _mx(amax: F32Array, fmt: BlockFormat, rule: str) -> tuple[U8Array, F32Array]:
    scale_bytes = codecs.encode_e8m0(amax, fmt.element, rule)
    return scale_bytes, np.float32(1) / codecs.decode_e8m0(scale_bytes)


def result_format(
    api: str, sf_vector_size: int, scales_type: str, out_type: str, scale_rule: str
) -> BlockFormat:
    """The format that three properties name.

    Args:
        api: Public function, for messages.
        sf_vector_size: Elements that share a scale.
        scales_type: Element type of scales: "float8_e4m3fn" for NVFP4, "float8_e8m0fnu" for MX.
        out_type: Element type of codes: "uint8" for packed e2m1, "float8_e4m3fn" for MXFP8.
        scale_rule: How e8m0 scales are chosen.

    Raises:
        UnsupportedError: No format has blocks of that size.
        ConfigError: The three contradict each other, or the rule is unknown or does not apply.
    """
    if sf_vector_size not in (NVFP4.block, MXFP4.block):
        rule = f"{NVFP4.block} (NVFP4) or {MXFP4.block} (MXFP4, MXFP8)"
        hint = "groups of 128 are those of quantize_dynamic_scaled_float8"
        raise UnsupportedError(message(api, "sf_vector_size", rule, sf_vector_size, hint))
    scales = "float8_e4m3fn" if sf_vector_size == NVFP4.block else "float8_e8m0fnu"
    if scales_type != scales:
        rule = f"{scales!r} with blocks of {sf_vector_size}"
        raise ConfigError(message(api, "scales_type", rule, repr(scales_type)))
    formats = {fmt.codes_dtype: fmt for fmt in FORMATS.values() if fmt.block == sf_vector_size}
    if out_type not in formats:
        names = " or ".join(f"{name!r} ({fmt.name})" for name, fmt in formats.items())
        rule = f"{names} with blocks of {sf_vector_size}"
        raise ConfigError(message(api, "out_type", rule, repr(out_type)))
    found = formats[out_type]
    check_scale_rule(api, found, scale_rule)
    return found


def check_scale_rule(api: str, fmt: BlockFormat, scale_rule: str) -> None:
    """Refuses a scale rule that a format does not have.

    Raises:
        ConfigError: The rule is unknown, or one of e8m0 scales is asked for e4m3 scales.
    """
    if scale_rule not in SCALE_RULES:
        raise ConfigError(message(api, "scale_rule", f"one of {SCALE_RULES}", repr(scale_rule)))
    if fmt is NVFP4 and scale_rule != "rceil":
        rule = "'rceil' for NVFP4, whose scales are no powers of two"
        raise ConfigError(message(api, "scale_rule", rule, repr(scale_rule)))


def check_tensor_factor(api: str, arg: str, fmt: BlockFormat, factor: Any) -> None:
    """Refuses a missing factor of NVFP4, and a factor of a format that has none.

    Raises:
        ScaleError: NVFP4 and no factor.
        ConfigError: An MX format and a factor.
    """
    if fmt.has_tensor_scale and factor is None:
        raise ScaleError(message(api, arg, "float32 factors", "None", f"{arg} is required"))
    if not fmt.has_tensor_scale and factor is not None:
        names = tuple(name for name, f in FORMATS.items() if not f.has_tensor_scale)
        rule = f"None: {' and '.join(names)} have block scales only"
        raise ConfigError(message(api, arg, rule, "an array"))


def typed(fmt: BlockFormat, codes: U8Array, scales: U8Array) -> Quantized:
    """Bytes as the element types of results."""
    return codes.view(named_dtype(fmt.codes_dtype)), scales.view(named_dtype(fmt.scales_dtype))


def check_k(api: str, arg: str, k: int, fmt: BlockFormat) -> None:
    """Refuses rows that are not whole blocks.

    Raises:
        ShapeError: K is no multiple of the block.
    """
    if k % fmt.block:
        raise ShapeError(message(api, arg, f"K % {fmt.block} == 0", f"K = {k}"))


def grouped_quantize_dynamic_block_scaled(
    input: npt.NDArray[Any],
    row_offsets: npt.NDArray[np.uint32],
    scales_offsets: npt.NDArray[np.uint32],
    expert_ids: npt.NDArray[np.int32],
    sf_tensor: F32Array | None = None,
    *,
    sf_vector_size: int = 16,
    scales_type: str = "float8_e4m3fn",
    out_type: str = "uint8",
    scale_rule: str = "rceil",
    indices: npt.NDArray[np.uint32] | None = None,
    indices_divisor: int = 1,
) -> Quantized:
    """Quantizes the rows of each group with its expert's factor, gathering on the way.

    Args:
        input: (R, K) bf16, K a multiple of sf_vector_size.
        row_offsets: (S + 1,) prefix sums: slot s owns rows row_offsets[s]..row_offsets[s + 1].
        scales_offsets: (S,) see `nbmoe.layouts.scales_offset` [128-row tiles].
        expert_ids: (S,) expert of each slot. The rows of a slot with -1 get codes 0 and scales 0.
        sf_tensor: (E,) float32 inverse input scales, by expert id, for NVFP4; None for MX.
        sf_vector_size: Elements that share a scale; this and the next two name the format as in
            `result_format`.
        scales_type: Element type of scales.
        out_type: Element type of codes.
        scale_rule: How MX formats choose a scale.
        indices: (M,) gather: output row i reads input row indices[i] // indices_divisor. Without
            it, output row i reads input row i.
        indices_divisor: Sources per input row, the top-k of the routing.

    Returns:
        Codes (rows, K), packed (rows, K/2) for e2m1, and scale tiles
        (tiles, ceil(K / (4 sf_vector_size)), 32, 4, 4), with rows = M or R and
        tiles = ceil(rows/128) + min(S, rows). Padding in the tiles, and everything that belongs to
        no slot, is 0.

    Raises:
        ShapeError, UnsupportedError, ConfigError, ScaleError: see `result_format`; K is no multiple
            of the block; the factor is missing or superfluous.
    """
    api = "grouped_quantize_dynamic_block_scaled"
    fmt = result_format(api, sf_vector_size, scales_type, out_type, scale_rule)
    check_tensor_factor(api, "sf_tensor", fmt, sf_tensor)
    check_k(api, "input", input.shape[1], fmt)
    rows = len(input) if indices is None else len(indices)
    source = np.arange(rows) if indices is None else np.asarray(indices) // indices_divisor
    groups = Groups(row_offsets, scales_offsets, expert_ids)
    codes, tiles = groups.zeros(rows, input.shape[1], fmt)
    for slot, own in groups.active():
        factor = 1.0 if sf_tensor is None else sf_tensor[expert_ids[slot]]
        x = codecs.decode_bf16(input[source[own]])
        codes[own], scales = quantize_blocks(x, fmt, factor, scale_rule)
        store_scale_tiles(tiles, groups.first_tile(slot), scales)
    return typed(fmt, codes, tiles)


def grouped_quantize_nvfp4_row_scaled(
    input: npt.NDArray[Any],
    row_offsets: npt.NDArray[np.uint32],
    scales_offsets: npt.NDArray[np.uint32],
    expert_ids: npt.NDArray[np.int32] | None = None,
    *,
    indices: npt.NDArray[np.uint32] | None = None,
    indices_divisor: int = 1,
    relu2: bool = False,
) -> tuple[U8Array, U8Array, npt.NDArray[Any]]:
    """Quantizes rows to NVFP4, each after division by its own bf16 scale.

    For a row with largest magnitude amax: row_scale = bf16(max(amax / 2688, 1e-30)), and the row
    x' = bf16(x * (1 / row_scale)) is quantized with tensor_sf = 1. A matmul multiplies the scale
    back in (`a_row_scales`).

    Args:
        input: (R, K) bf16, K % 16 == 0.
        row_offsets: (S + 1,) prefix sums.
        scales_offsets: (S,) see `nbmoe.layouts.scales_offset` [128-row tiles].
        expert_ids: (S,) of which only -1 matters: codes, scales and row scales of such a slot are
            0. None for slots that are all active.
        indices: (M,) gather, as in `grouped_quantize_dynamic_block_scaled`.
        indices_divisor: Sources per input row.
        relu2: Replace x by bf16(max(x, 0)**2) first.

    Returns:
        Packed codes (rows, K/2) uint8, scale tiles (tiles, ceil(K/64), 32, 4, 4) uint8, and row
        scales (rows,) bf16.

    Raises:
        ShapeError: K % 16 != 0.
    """
    check_k("grouped_quantize_nvfp4_row_scaled", "input", input.shape[1], NVFP4)
    rows = len(input) if indices is None else len(indices)
    source = np.arange(rows) if indices is None else np.asarray(indices) // indices_divisor
    ids = np.zeros(len(scales_offsets), np.int32) if expert_ids is None else expert_ids
    groups = Groups(row_offsets, scales_offsets, ids)
    codes, tiles = groups.zeros(rows, input.shape[1], NVFP4)
    row_scales = np.zeros(rows, codecs.BF16)
    for slot, own in groups.active():
        x = codecs.decode_bf16(input[source[own]])
        with np.errstate(all="ignore"):
            if relu2:
                positive = np.maximum(x, np.float32(0))
                x = codecs.decode_bf16(codecs.encode_bf16(positive * positive))
            amax = np.abs(x).max(axis=1, initial=0)
            row_scales[own] = codecs.encode_bf16(np.maximum(amax / ROW_RANGE, SMALLEST_ROW_SCALE))
            inverse = np.float32(1) / codecs.decode_bf16(row_scales[own])
            x = codecs.decode_bf16(codecs.encode_bf16(x * inverse[:, np.newaxis]))
        codes[own], scales = quantize_blocks(x, NVFP4)
        store_scale_tiles(tiles, groups.first_tile(slot), scales)
    return codes, tiles, row_scales


def quantize_dynamic_block_scaled(
    input: npt.NDArray[Any],
    *,
    tensor_sf: float | None = 1.0,
    sf_vector_size: int = 16,
    scales_type: str = "float8_e4m3fn",
    out_type: str = "uint8",
    scale_rule: str = "rceil",
) -> Quantized:
    """Quantizes all rows alike.

    Args:
        input: (M, K) bf16, K a multiple of sf_vector_size.
        tensor_sf: Inverse tensor scale of NVFP4; MX formats have none and take 1 or None.
        sf_vector_size: As in `grouped_quantize_dynamic_block_scaled`, and the next three.
        scales_type: Element type of scales.
        out_type: Element type of codes.
        scale_rule: How MX formats choose a scale.

    Returns:
        Codes (M, K), packed (M, K/2) for e2m1, and scale tiles
        (ceil(M/128), ceil(K / (4 sf_vector_size)), 32, 4, 4) with padding 0.

    Raises:
        ShapeError, UnsupportedError, ConfigError: as `result_format`; K is no multiple of the
            block; a tensor_sf other than 1 for MX.
    """
    api = "quantize_dynamic_block_scaled"
    fmt = result_format(api, sf_vector_size, scales_type, out_type, scale_rule)
    check_k(api, "input", input.shape[1], fmt)
    factor = 1.0 if tensor_sf is None else tensor_sf
    if not fmt.has_tensor_scale and factor != 1:
        raise ConfigError(message(api, "tensor_sf", f"1: {fmt.name} has block scales only", factor))
    codes, scales = quantize_blocks(codecs.decode_bf16(input), fmt, factor, scale_rule)
    return typed(fmt, codes, layouts.interleave_scales(scales))


def block_scales_interleave(scales: npt.NDArray[Any], sf_vector_size: int = 16) -> npt.NDArray[Any]:
    """Lays row-major block scales out in tiles, padding with byte 0.

    Args:
        scales: (N, C) or (E, N, C), one byte a scale, C = K / sf_vector_size.
        sf_vector_size: Elements that share a scale, 16 or 32. The layout is the same for both.

    Returns:
        (ceil(N/128), ceil(C/4), 32, 4, 4), with E in front of three axes, of the same type.

    Raises:
        UnsupportedError: `sf_vector_size` is neither 16 nor 32.
        ShapeError: `scales` has neither 2 nor 3 axes.
    """
    if sf_vector_size not in (NVFP4.block, MXFP4.block):
        api = "block_scales_interleave"
        raise UnsupportedError(message(api, "sf_vector_size", "16 or 32", sf_vector_size))
    return layouts.interleave_scales(scales)


class Groups:
    """Which rows and which scale tiles a slot has."""

    def __init__(
        self,
        starts: npt.NDArray[np.uint32],
        offsets: npt.NDArray[np.uint32],
        expert_ids: npt.NDArray[np.int32],
    ) -> None:
        """Takes prefix sums (S + 1,), scale offsets (S,) and expert ids (S,)."""
        self.starts = [int(start) for start in starts]
        self.expert_ids = expert_ids
        self.tiles = layouts.tile_starts(starts, offsets)

    def active(self) -> list[tuple[int, slice]]:
        """Slots that have rows and are not masked, with those rows."""
        return [
            (slot, slice(*self.starts[slot : slot + 2]))
            for slot, expert in enumerate(self.expert_ids)
            if expert >= 0 and self.starts[slot] < self.starts[slot + 1]
        ]

    def first_tile(self, slot: int) -> int:
        """First scale tile of a slot."""
        return int(self.tiles[slot])

    def zeros(
        self, rows: int, k: int, fmt: BlockFormat, tiles: int | None = None
    ) -> tuple[U8Array, U8Array]:
        """Codes and scale tiles of 0, for all rows."""
        if tiles is None:
            tiles = layouts.activation_tiles(rows, len(self.expert_ids))
        across = layouts.ceil_div(k, fmt.tile_columns)
        return (
            np.zeros((rows, fmt.packed_k(k)), np.uint8),
            np.zeros((tiles, across, *layouts.TILE_SHAPE), np.uint8),
        )


def store_scale_tiles(tiles: U8Array, first_tile: int, scales: U8Array) -> None:
    """Writes one group's row-major scales as whole tiles, from `first_tile` on."""
    group = layouts.interleave_scales(scales)
    tiles[first_tile : first_tile + len(group)] = group


def load_scale_tiles(tiles: U8Array, first_tile: int, rows: int, columns: int) -> U8Array:
    """Reads one group's scales back as (rows, columns), touching no byte of padding."""
    used = layouts.ceil_div(rows, layouts.TILE_ROWS)
    return layouts.deinterleave_scales(tiles[first_tile : first_tile + used], rows, columns)
