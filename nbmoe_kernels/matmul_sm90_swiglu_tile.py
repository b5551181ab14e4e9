"""The epilogue of the fused Hopper matmul: a tile's sums wait in shared memory, and are taken from
there to be activated, quantized and stored, by spare warps where there are some.

`nbmoe_kernels.matmul_sm90_epilogue` keeps the sums: a token of a warpgroup has 32 words, a gate and
its up value each. Without ``match_bf16`` the words are activated values already.

Thread i of those that take has four z of token i / 8, from 4 (i % 8) on, and of tokens further on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.activation import make_gated_activation
from nbmoe_kernels.block_quantizer import make_block_quantizer
from nbmoe_kernels.device.math import bits_f32, div_rn, f32_bits
from nbmoe_kernels.device.memory import load_shared_v4
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.sync import named_barrier_sync
from nbmoe_kernels.device.warp import reduce_lanes
from nbmoe_kernels.matmul_epilogue import ONE, row_scale_of
from nbmoe_kernels.matmul_sm90_body import make_body
from nbmoe_kernels.matmul_sm90_config import RESULT_BYTES, HopperMatmulConfig
from nbmoe_kernels.matmul_sm90_consumer import MakeEpilogue
from nbmoe_kernels.matmul_sm90_epilogue import (
    load_bias_pair,
    make_keep_tile,
    make_kept_place,
    make_scaled,
    prepare_nothing,
)
from nbmoe_kernels.matmul_sm90_finisher import FINISHERS, MakeTake
from nbmoe_kernels.matmul_sm90_swiglu_activation import make_activate
from nbmoe_kernels.matmul_sm90_swiglu_config import FusedMatmulConfig
from nbmoe_kernels.matmul_sm90_swiglu_quantize import make_quantize_quads
from nbmoe_kernels.matmul_sm90_swiglu_store import (
    make_packed_stores,
    make_prepared_stores,
)
from nbmoe_kernels.prepared_tokens import token_base
from nbmoe_kernels.search import first_tile as first_tile_of

_PITCH = RESULT_BYTES // 4
LANES, QUAD = 8, 4
"""Of a token, and the values of each."""
_ZERO, _ONE, _TWO = (np.uint32(n) for n in range(3))


@dataclass(frozen=True)
class Fusion:
    """What happens to the sums.

    Attributes:
        match_bf16: whether gate and up are rounded to bf16 first.
        activation: "silu", "swigluoai" or "gelu_tanh".
        layout: of the result, "packed" or "prepared".
    """

    match_bf16: bool = True
    activation: str = "silu"
    layout: str = "packed"


def _make_locate(config: HopperMatmulConfig) -> Callable[..., Any]:
    """``locate(expert, row, args) -> slot, tensor_scale``: of a tile's row, by whole warps."""
    starts_at = config.table_at // 4 + config.max_slots + 1
    has_tensor_scale = config.a_format == "nvfp4"
    slots_of_lane = config.max_slots // 32
    sum_of_lanes = reduce_lanes("add")

    @device_function
    def locate(expert, row, args):
        words = cuda.shared.array(0, np.uint32, alignment=1024)
        num_slots, c_input_scales = args[0][3], args[0][6]
        # Loads that do not wait for each other: as many slots begin no later as there are before.
        lane = np.uint32(np.uint32(cuda.threadIdx.x) & np.uint32(31))
        begun = _ZERO
        for i in unroll(range(slots_of_lane)):
            candidate = np.uint32(lane + np.uint32(32 * i))
            if candidate < num_slots:
                if words[np.uint32(np.uint32(starts_at) + candidate)] <= row:
                    begun = np.uint32(begun + _ONE)
        slot = np.uint32(sum_of_lanes(begun) - _ONE)
        tensor_scale = ONE
        if has_tensor_scale and expert >= np.int32(0):
            tensor_scale = c_input_scales[np.uint64(slot)]
        return slot, tensor_scale

    return locate


def _make_place(config: HopperMatmulConfig, fusion: Fusion) -> Callable[..., Any]:
    """``place_of(slot, row, args) -> first_tile, place, end``: of a row of a slot.

    ``place`` is the row in its slot or, for prepared tokens, in the panels; ``end`` is the place
    behind the slot's last row.
    """
    starts_at = config.table_at // 4 + config.max_slots + 1
    is_prepared = fusion.layout == "prepared"

    @device_function
    def place_of(slot, row, args):
        words = cuda.shared.array(0, np.uint32, alignment=1024)
        at = np.uint32(np.uint32(starts_at) + slot)
        start, end = words[at], words[np.uint32(at + _ONE)]
        first_tile, base = _ZERO, _ZERO
        if is_prepared:
            base = token_base(start, slot)
        else:
            first_tile = first_tile_of(args[0][4], args[0][5], slot)
        return (
            first_tile,
            np.uint32(base + np.uint32(row - start)),
            np.uint32(base + np.uint32(end - start)),
        )

    return place_of


def _make_keep_activated(
    config: HopperMatmulConfig, width: int, fusion: Fusion
) -> Callable[..., Any]:
    """The epilogue of `make_keep_tile` for values that are activated first, and kept as f32."""
    kept_place = make_kept_place(config)
    gated, scaled = make_gated_activation(fusion.activation), make_scaled(config)

    @device_function
    def keep(acc, smem, prepared, expert, expert_scale, row, rows, m_tile, n, args):
        words = cuda.shared.array(0, np.uint32, alignment=1024)
        out, a_row_scales, bias, has_row_scales, has_bias = args
        alpha, limit = out[7], out[8]
        column, first, at = kept_place(m_tile)
        if expert < np.int32(0):
            has_row_scales = _ZERO
        bias0, bias1 = load_bias_pair(bias, has_bias, expert, column, n)
        for j in unroll(range(width // 8)):
            for c in unroll(range(2)):
                token = np.uint32(first + np.uint32(8 * j + c))
                if token < rows:
                    row_scale = row_scale_of(a_row_scales, has_row_scales, np.uint32(row + token))
                    gate = scaled(acc[4 * j + c], expert_scale, row_scale, bias0)
                    up = scaled(acc[4 * j + 2 + c], expert_scale, row_scale, bias1)
                    place = np.uint32(at + np.uint32((8 * j + c) * _PITCH))
                    words[place] = f32_bits(gated(gate, up, alpha, limit))

    return keep


def _make_take_rows(
    config: HopperMatmulConfig, fusion: Fusion, threads: int, tokens: int
) -> Callable[..., Any]:
    """``take_rows(group, thread, located, row, rows, m_tile, n, args)``: a share of a tile, for
    whole warps, ``tokens`` at a time a lane; ``located`` is what `_make_locate` gives.

    ``args`` are those of the plain matmul, with ``out`` = (output, scales, panel_rows, num_slots,
    expert_start, a_scale_offsets, c_input_scales, alpha, limit).
    """
    results_at, group_words = config.results_at // 4, config.max_width * _PITCH
    warpgroups, apart = config.warpgroups, threads // LANES
    values, place_of = QUAD * tokens, _make_place(config, fusion)
    activates_here = fusion.match_bf16
    activate = make_activate(fusion.activation, values)
    quantize = make_quantize_quads(config.a_format, tokens)
    if fusion.layout == "prepared":
        assert apart * tokens % 8 == 0, "later tokens of a lane have the swizzle of its first"
        begin, store, clear = make_prepared_stores(config.a_format)
    else:
        begin, store, clear = make_packed_stores(make_block_quantizer(config.a_format).block)

    @device_function
    def take_rows(group, thread, located, row, rows, m_tile, n, args):
        slot, tensor_scale = located
        first_tile, place, end = place_of(slot, row, args)
        words = cuda.shared.array(0, np.uint32, alignment=1024)
        out = args[0]
        alpha, limit = out[7], out[8]
        unit = np.uint32(np.uint32(m_tile * np.uint32(warpgroups)) + group)
        z_count = np.uint32(n >> _ONE)
        if np.uint32(unit << np.uint32(5)) < z_count:
            inverse = div_rn(ONE, tensor_scale)
            token = np.uint32(thread >> np.uint32(3))
            chunk = np.uint32(thread & np.uint32(7))
            column = np.uint32(np.uint32(unit << np.uint32(5)) + np.uint32(chunk << _TWO))
            first = np.uint32(
                np.uint32(np.uint32(results_at) + np.uint32(group * np.uint32(group_words)))
                + np.uint32(chunk << _TWO)
            )
            last = np.uint32(rows - _ONE)
            to = cuda.local.array(tokens, np.uint64)
            step = np.uint64(0)
            for t in unroll(range(tokens)):
                ahead = np.uint32(token + np.uint32(apart * t))
                to[t], step = begin(
                    out, np.uint32(row + ahead), np.uint32(place + ahead), unit, chunk, z_count
                )  # fmt: skip
            step = step * np.uint64(apart * tokens)
            quads = cuda.local.array(values, np.uint32)
            z = cuda.local.array(values, np.float32)
            scales = cuda.local.array(tokens, np.uint32)
            codes = cuda.local.array(tokens, np.uint32)
            # The warp's first token: its lanes meet in shuffles, also those without a token.
            warp_token = np.uint32(np.uint32(thread >> np.uint32(5)) << _TWO)
            while warp_token < rows:
                for t in unroll(range(tokens)):
                    # Lanes without a token work on the last one, for nobody.
                    source = min(np.uint32(token + np.uint32(apart * t)), last)
                    at = np.uint32(first + np.uint32(source * np.uint32(_PITCH)))
                    i = QUAD * t
                    quads[i], quads[i + 1], quads[i + 2], quads[i + 3] = load_shared_v4(words, at)
                if activates_here:
                    activate(quads, z, alpha, limit)
                else:
                    for i in unroll(range(values)):
                        z[i] = bits_f32(quads[i])
                quantize(z, scales, codes, tensor_scale, inverse)
                for t in unroll(range(tokens)):
                    byte, word = scales[t], codes[t]
                    # Past the last column sums may be NaN, if a token or a factor is.
                    if column >= z_count:
                        byte, word = _ZERO, _ZERO
                    is_token = token < rows
                    store(
                        out, to[t], word, byte, is_token, np.uint32(place + token), first_tile,
                        unit, chunk, z_count,
                    )  # fmt: skip
                    token = np.uint32(token + np.uint32(apart))
                    to[t] = to[t] + step
                warp_token = np.uint32(warp_token + np.uint32(apart * tokens))
            if np.uint32(place + rows) == end:
                clear(out, end, first_tile, unit, z_count, thread, np.uint32(threads))

    return take_rows


def _make_keep(config: HopperMatmulConfig, width: int, fusion: Fusion) -> Callable[..., Any]:
    if fusion.match_bf16:
        _, keep = make_keep_tile(config, width)
        return keep
    return _make_keep_activated(config, width, fusion)


def make_fused_parts(
    config: FusedMatmulConfig, fusion: Fusion
) -> tuple[MakeEpilogue, MakeTake | None]:
    """A fusion's epilogue, and what spare warps do if the config has them finish tiles."""

    def make_keep(
        config: HopperMatmulConfig, width: int
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return prepare_nothing, _make_keep(config, width, fusion)

    def make_take(config: HopperMatmulConfig) -> tuple[Callable[..., Any], Callable[..., Any]]:
        # Two tokens hide latencies; scale tiles leave no registers for the second.
        tokens = 2 if fusion.layout == "prepared" else 1
        take_rows = _make_take_rows(config, fusion, FINISHERS, tokens)

        @device_function
        def take(smem, group, finisher, prepared, row, rows, m_tile, n, args):
            take_rows(group, finisher, prepared, row, rows, m_tile, n, args)

        return _make_locate(config), take

    def make_both(
        config: HopperMatmulConfig, width: int
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        keep = _make_keep(config, width, fusion)
        take_rows = _make_take_rows(config, fusion, 128, 1)

        @device_function
        def keep_and_take(acc, smem, located, expert, expert_scale, row, rows, m_tile, n, args):
            thread = np.uint32(cuda.threadIdx.x)
            group = np.uint32(thread >> np.uint32(7))
            barrier = np.uint32(group + _ONE)
            # Nobody reads the tile before any more; then all of this one is there.
            named_barrier_sync(barrier, np.uint32(128))
            keep(acc, smem, located, expert, expert_scale, row, rows, m_tile, n, args)
            named_barrier_sync(barrier, np.uint32(128))
            thread = np.uint32(thread & np.uint32(127))
            take_rows(group, thread, located, row, rows, m_tile, n, args)

        return _make_locate(config), keep_and_take

    if config.stores_later:
        return make_keep, make_take
    return make_both, None


def make_fused_body(config: FusedMatmulConfig, fusion: Fusion) -> Callable[..., Any]:
    """The body of `nbmoe_kernels.matmul_sm90_body` with a fusion's epilogue."""
    return make_body(config, *make_fused_parts(config, fusion))
