"""The gate/up matmul with SwiGLU and requantization to NVFP4 in its epilogue."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe import codecs, layouts
from nbmoe.codecs import F32Array, U8Array
from nbmoe.formats import NVFP4
from nbmoe.reference.float32 import sigmoid
from nbmoe.reference.matmul import scaled_products
from nbmoe.reference.quantize import quantize_nvfp4, store_scale_tiles


def swiglu(gate: F32Array, up: F32Array) -> F32Array:
    """gate * sigmoid(gate) * up in float32, multiplied from left to right."""
    with np.errstate(all="ignore"):
        return (gate * sigmoid(gate)) * up


def grouped_matmul_blocked_swiglu(
    hidden: U8Array,
    weight: U8Array,
    a_scales: U8Array,
    b_scales: U8Array,
    expert_start: npt.NDArray[np.uint32],
    a_scale_offsets: npt.NDArray[np.uint32],
    expert_ids: npt.NDArray[np.int32],
    *,
    expert_scales: F32Array,
    c_input_scales: F32Array,
    estimated_total_m: int | None = None,
    a_row_scales: npt.NDArray[Any] | None = None,
    match_bf16: bool = True,
) -> tuple[U8Array, U8Array]:
    """Grouped matmul with gate/up weights, then SwiGLU, then NVFP4 quantization of the result.

    Args:
        hidden: (M, K/2) packed NVFP4 codes.
        weight: (E, 2D, K/2) packed NVFP4 codes, rows in sigma order (gate 0, up 0, gate 1, ...;
            `nbmoe.layouts.sigma_permute`), D % 16 == 0.
        a_scales: (tiles, ceil(K/64), 32, 4, 4) scale tiles of `hidden`.
        b_scales: (E, ceil(2D/128), ceil(K/64), 32, 4, 4) scale tiles of `weight`, sigma order.
        expert_start: (S + 1,) prefix sums: slot s owns rows expert_start[s]..expert_start[s + 1].
        a_scale_offsets: (S,) see `nbmoe.layouts.scales_offset`; the output's scales use it too.
        expert_ids: (S,) expert of each slot. The rows of a slot with -1 get codes 0, scales 0.
        expert_scales: (E,) float32 factors of gate and up, by expert id.
        c_input_scales: (S,) float32 inverse input scales of the down projection, by slot.
        estimated_total_m: Sizing hint of the kernels [rows]. It never changes the result.
        a_row_scales: (M,) bf16 further factors of gate and up, by row.
        match_bf16: Round gate and up to bf16 first, which makes the result equal to that of a
            matmul with bf16 output followed by the activation.

    Returns:
        Packed codes (M, D/2) and scale tiles (a_scales.shape[0], ceil(D/64), 32, 4, 4), uint8.
        Padding in the tiles, and everything that belongs to no slot, is 0.
    """
    del estimated_total_m
    v = scaled_products(
        hidden,
        weight,
        a_scales,
        b_scales,
        expert_start,
        a_scale_offsets,
        expert_ids,
        expert_scales,
        a_row_scales,
    )
    if match_bf16:
        v = codecs.decode_bf16(codecs.encode_bf16(v))
    z = swiglu(gate=v[:, 0::2], up=v[:, 1::2])

    m, d = z.shape
    packed = np.zeros((m, d // 2), np.uint8)
    across = layouts.ceil_div(d, NVFP4.tile_columns)
    tiles = np.zeros((len(a_scales), across, *layouts.TILE_SHAPE), np.uint8)
    first_tiles = layouts.tile_starts(expert_start, a_scale_offsets)
    for slot, expert in enumerate(expert_ids):
        start, stop = int(expert_start[slot]), int(expert_start[slot + 1])
        if expert < 0 or start == stop:
            continue
        packed[start:stop], scales = quantize_nvfp4(z[start:stop], c_input_scales[slot])
        store_scale_tiles(tiles, int(first_tiles[slot]), scales)
    return packed, tiles
