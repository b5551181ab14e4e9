"""A gated activation of a matmul's bf16 result: rounded to bf16, or quantized without rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe import codecs
from nbmoe.activation import GatedActivation
from nbmoe.codecs import F32Array
from nbmoe.errors import ShapeError, message
from nbmoe.formats import BlockFormat, block_format
from nbmoe.reference import activation as elementwise
from nbmoe.reference.quantize import (
    Groups,
    Quantized,
    check_scale_rule,
    check_tensor_factor,
    quantize_blocks,
    store_scale_tiles,
    typed,
)


def split(gate_up: npt.NDArray[Any], interleaved: bool) -> tuple[F32Array, F32Array]:
    """Gate and up (M, D) as float32: even and odd columns if interleaved, else the halves."""
    x = codecs.decode_bf16(gate_up)
    half = x.shape[1] // 2
    return (x[:, 0::2], x[:, 1::2]) if interleaved else (x[:, :half], x[:, half:])


def gated_activation(
    gate_up: npt.NDArray[Any],
    *,
    activation: GatedActivation | None = None,
    interleaved: bool = False,
) -> npt.NDArray[Any]:
    """Activates every gate, times its up value, and rounds once to bf16.

    Args:
        gate_up: (M, 2D) bf16, gate columns then up columns.
        activation: What to apply, None for silu.
        interleaved: Whether the columns are gate 0, up 0, gate 1, ... instead.

    Returns:
        (M, D) bf16.

    Raises:
        ShapeError: The number of columns is odd.
    """
    _check_even("gated_activation", gate_up)
    z = elementwise.gated_activation(*split(gate_up, interleaved), activation)
    return codecs.encode_bf16(z)


def fused_silu_quantize(
    gate_up: npt.NDArray[Any],
    expert_start: npt.NDArray[np.uint32],
    a_scale_offsets: npt.NDArray[np.uint32],
    expert_ids: npt.NDArray[np.int32],
    input_scales: F32Array | None = None,
    *,
    format: str | BlockFormat = "nvfp4",
    interleaved: bool = False,
    activation: GatedActivation | None = None,
    scale_rule: str = "rceil",
) -> Quantized:
    """Activates every gate, times its up value, in float32 and quantizes that in blocks.

    Args:
        gate_up: (M, 2D) bf16, gate columns then up columns, D a multiple of the block.
        expert_start: (S + 1,) prefix sums: slot s owns rows expert_start[s]..expert_start[s + 1].
        a_scale_offsets: (S,) see `nbmoe.layouts.scales_offset` [128-row tiles].
        expert_ids: (S,) expert of each slot. The rows of a slot with -1 get codes 0 and scales 0.
        input_scales: (S,) float32 inverse input scales, by slot, for NVFP4; None for MX.
        format: Format of the result.
        interleaved: Whether the columns are gate 0, up 0, gate 1, ... instead.
        activation: What to apply, None for silu.
        scale_rule: How MX formats choose a scale.

    Returns:
        Codes (M, D), packed (M, D/2) for e2m1, and scale tiles (ceil(M/128) + min(S, M),
        ceil(D / (4 block)), 32, 4, 4). Padding in the tiles, and everything that belongs to no
        slot, is 0.

    Raises:
        ConfigError, ScaleError, ShapeError: as `grouped_quantize_dynamic_block_scaled`.
    """
    api = "fused_silu_quantize"
    fmt = block_format(format, api)
    check_scale_rule(api, fmt, scale_rule)
    check_tensor_factor(api, "input_scales", fmt, input_scales)
    _check_even(api, gate_up)
    groups = Groups(expert_start, a_scale_offsets, expert_ids)
    codes, tiles = groups.zeros(len(gate_up), gate_up.shape[1] // 2, fmt)
    for slot, own in groups.active():
        z = elementwise.gated_activation(*split(gate_up[own], interleaved), activation)
        factor = 1.0 if input_scales is None else input_scales[slot]
        codes[own], scales = quantize_blocks(z, fmt, factor, scale_rule)
        store_scale_tiles(tiles, groups.first_tile(slot), scales)
    return typed(fmt, codes, tiles)


def _check_even(api: str, gate_up: npt.NDArray[Any]) -> None:
    if gate_up.shape[1] % 2:
        raise ShapeError(message(api, "gate_up", "(M, 2D)", gate_up.shape))
