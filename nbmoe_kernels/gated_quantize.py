"""Gated activation and block quantize: bf16 gate and up to codes and 5-D tiles of block scales.

For row m and column i:

    z = activation(gate, up)                                       f32, `activation` has the formula
    output, scales = blocks of 16 (NVFP4) or 32 (MX) z             NVFP4 under input_scales[slot]

z is not rounded before it is quantized. gate and up are the halves of a row, or its even and odd
columns with is_interleaved.

Shapes: output (M, D/2) u8, for e4m3 codes (M, D); scales (tiles, ceil(D/(4 block)), 32, 4, 4) u8;
input (M, 2D) bf16; row_offsets (S + 1,) u32; scales_offsets (S,) u32; expert_ids (S,) i32;
input_scales (S,) f32, not read for MX. D is a multiple of the block.

Thread map: as in `quantize_grouped`, with 16 gates and 16 up values a thread and row; two rows are
in flight.

Padding: rows past the slot's last and columns past D get scale 0 and no codes; tiles that belong to
no slot are not written. A slot with expert id -1 gets zeros.

Synchronisation: blocks of 32 join two lanes' maxima by a butterfly shuffle of the whole warp; one
block barrier between the scale bytes' stores and the tile's stores (128 threads arrive and wait).
"""

import functools
import hashlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.activation import make_gated_activation
from nbmoe_kernels.device.convert import f32_of_bf16, permute_bytes
from nbmoe_kernels.device.math import bits_f32, div_rn
from nbmoe_kernels.device.memory import load_shared_word
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.quantize_tile import (
    THREADS,
    amax_of_values,
    load_16,
    make_quantize_tile,
    pair_max,
)
from nbmoe_kernels.search import locate_rows

Activation = str | Callable[[Any, Any], Any]
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
PASSES = 2
"""Rows of a thread whose loads are in flight together."""

THREAD_WORDS = 16 * PASSES


@device_function
def load_gated(input, row, num_cols, column, is_interleaved, words, first):
    """16 pairs from ``column`` on: words[first + i] gets gate i (low half) and up i.

    ``num_cols`` is D; the row has 2 D columns.
    """
    start = np.uint64(row) * np.uint64(num_cols)
    if is_interleaved != np.uint32(0):
        load_16(input, start + np.uint64(column), words, first)
        load_16(input, start + np.uint64(column) + np.uint64(8), words, first + 8)
    else:
        pairs = cuda.local.array(16, np.uint32)
        at = start + np.uint64(column >> np.uint32(1))
        load_16(input, at, pairs, 0)
        load_16(input, at + np.uint64(num_cols >> np.uint32(1)), pairs, 8)
        for i in unroll(range(8)):
            words[first + 2 * i] = permute_bytes(pairs[i], pairs[i + 8], np.uint32(0x5410))
            words[first + 2 * i + 1] = permute_bytes(pairs[i], pairs[i + 8], np.uint32(0x7632))


def activation_name(activation: Activation) -> str:
    """A name for kernels' names: the activation's, or a function's with a hash of its content."""
    if isinstance(activation, str):
        return activation
    code = activation.__code__
    cells = (cell.cell_contents for cell in activation.__closure__ or ())
    named = [(n, activation.__globals__[n]) for n in code.co_names if n in activation.__globals__]
    named += zip(code.co_freevars, cells, strict=True)
    numbers = [(n, repr(v)) for n, v in named if isinstance(v, int | float | np.generic)]
    content = repr((code.co_code, code.co_consts, code.co_names, activation.__defaults__, numbers))
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    return f"{re.sub('[^A-Za-z0-9_]', '', activation.__name__)}_{digest}"


@functools.cache
def make_gated_quantize(format: str, rule: str, activation: Activation) -> Kernel:
    """The kernel of a format, a scale rule and an activation.

    Args:
        format: "nvfp4", "mxfp4" or "mxfp8".
        rule: how MX formats choose a scale, "rceil", "even" or "floor".
        activation: as for `nbmoe_kernels.activation.make_gated_activation`.
    """
    tile_map = make_quantize_tile(format, rule)
    block_scale = tile_map.quantizer.block_scale
    encode_values, store_codes = tile_map.encode_values, tile_map.store_codes
    shares_block, scale_shift = tile_map.shares_block, np.uint32(tile_map.shares_block)
    pass_rows, columns = tile_map.pass_rows, tile_map.columns
    groups = 128 // (pass_rows * PASSES)
    lane_bits = tile_map.lanes.bit_length() - 1
    word_shift = np.uint32(tile_map.word_shift)
    has_factors = format == "nvfp4"
    activate = make_gated_activation(activation)
    suffix = format if rule == "rceil" else f"{format}_{rule}"

    @kernel(
        "global u32* output, global u32* scales, global u32* input, global u32* row_offsets, "
        "global u32* scales_offsets, global i32* expert_ids, global f32* input_scales, "
        "u32 num_active, u32 num_cols, u32 is_interleaved, f32 alpha, f32 limit",
        threads=THREADS,
        name=f"gated_quantize_{suffix}_{activation_name(activation)}",
    )
    def gated_quantize(
        output,
        scales,
        input,
        row_offsets,
        scales_offsets,
        expert_ids,
        input_scales,
        num_active,
        num_cols,
        is_interleaved,
        alpha,
        limit,
    ):
        scale_bytes = cuda.shared.array(512, np.uint8, alignment=16)
        tile = np.uint32(cuda.blockIdx.x)
        column_tile = np.uint32(cuda.blockIdx.y)
        thread = np.uint32(cuda.threadIdx.x)
        slot, first_row, rows = locate_rows(
            row_offsets, scales_offsets, num_active, tile, np.uint32(0)
        )
        if rows > np.uint32(0):
            is_active = expert_ids[np.uint64(slot)] >= np.int32(0)
            tensor_scale = _ONE
            if has_factors and is_active:
                tensor_scale = input_scales[np.uint64(slot)]
            inverse = div_rn(_ONE, tensor_scale)
            lane_row = np.uint32(thread >> np.uint32(lane_bits))
            lane = np.uint32(thread & np.uint32((1 << lane_bits) - 1))
            column = np.uint32(
                np.uint32(column_tile * np.uint32(columns)) + np.uint32(lane * np.uint32(16))
            )
            words = cuda.local.array(THREAD_WORDS, np.uint32)
            z = cuda.local.array(16, np.float32)
            group = np.uint32(0)
            # Not unrolled: an activation is long code.
            while group < np.uint32(groups):
                group_row = np.uint32(np.uint32(group * np.uint32(PASSES * pass_rows)) + lane_row)
                for p in unroll(range(PASSES)):
                    row = np.uint32(group_row + np.uint32(pass_rows * p))
                    if column < num_cols and is_active and row < rows:
                        source = np.uint32(first_row + row)
                        load_gated(input, source, num_cols, column, is_interleaved, words, 16 * p)
                for p in unroll(range(PASSES)):
                    row = np.uint32(group_row + np.uint32(pass_rows * p))
                    is_row = row < rows and column < num_cols
                    amax = _ZERO
                    if is_row and is_active:
                        for i in unroll(range(16)):
                            gate = f32_of_bf16(words[16 * p + i])
                            up = bits_f32(np.uint32(words[16 * p + i] & np.uint32(0xFFFF0000)))
                            z[i] = activate(gate, up, alpha, limit)
                        amax = amax_of_values(z)
                    if shares_block:
                        amax = pair_max(amax)
                    code = np.uint32(0)
                    if is_row:
                        w0 = np.uint32(0)
                        w1 = np.uint32(0)
                        w2 = np.uint32(0)
                        w3 = np.uint32(0)
                        if is_active:
                            code, multiplier = block_scale(amax, tensor_scale, inverse)
                            w0, w1, w2, w3 = encode_values(z, multiplier)
                        at = np.uint64(np.uint32(first_row + row)) * np.uint64(
                            num_cols >> word_shift
                        ) + np.uint64(column >> word_shift)
                        store_codes(output, at, w0, w1, w2, w3)
                    byte = np.uint32(
                        np.uint32(np.uint32(row & np.uint32(31)) << np.uint32(4))
                        + np.uint32(np.uint32(row >> np.uint32(5)) << np.uint32(2))
                    )
                    byte = np.uint32(byte + np.uint32(lane >> scale_shift))
                    if not shares_block or lane & np.uint32(1) == np.uint32(0):
                        scale_bytes[byte] = np.uint8(code)
                group = np.uint32(group + np.uint32(1))
            cuda.syncthreads()
            column_tiles = np.uint64(cuda.gridDim.y)
            at = (np.uint64(tile) * column_tiles + np.uint64(column_tile)) * np.uint64(128)
            scales[at + np.uint64(thread)] = load_shared_word(
                scale_bytes, np.uint32(thread * np.uint32(4))
            )

    return gated_quantize


def launch_gated_quantize(
    executor: Executor,
    output: Any,
    scales: Any,
    input: Any,
    row_offsets: Any,
    scales_offsets: Any,
    expert_ids: Any,
    input_scales: Any,
    *,
    format: str,
    scale_rule: str,
    activation: Activation,
    alpha: float,
    limit: float,
    num_active: int,
    num_cols: int,
    num_tiles: int,
    is_interleaved: bool,
    stream: Any = None,
) -> None:
    """Launch on flat arrays; ``num_cols`` is D, ``num_tiles`` the first dimension of ``scales``."""
    columns = make_quantize_tile(format, scale_rule).columns
    make_gated_quantize(format, scale_rule, activation).launch(
        executor,
        (num_tiles, -(-num_cols // columns), 1),
        output,
        scales,
        input,
        row_offsets,
        scales_offsets,
        expert_ids,
        input_scales,
        num_active,
        num_cols,
        is_interleaved,
        alpha,
        limit,
        stream=stream,
    )
