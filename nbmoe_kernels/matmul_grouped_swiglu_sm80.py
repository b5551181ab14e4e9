"""Grouped matmul with a gated activation and requantize in its epilogue, for sm_80 and up.

The weight is sigma-permuted: row 2i is gate row i, row 2i + 1 up row i. For row m and pair i:

    gate, up = acc (* 2^28 for NVFP4) (* expert_scales[e]) (* a_row_scales[m]) (+ bias[e, .])
    gate, up = bf16(gate), bf16(up)                                        if MATCH_BF16
    z        = activation(gate, up, alpha, limit)                          f32
    c_packed, c_swiglu_scales = blocks of consecutive z in the format of the rows

in f32 and in this order; NVFP4 blocks are scaled under c_input_scales[slot].

Shapes: c_packed (M, bytes of D codes) u8; c_swiglu_scales (tiles, ceil(D/X), 32, 4, 4) u8 with X
the elements of four scale bytes; c_input_scales (S,) f32, NVFP4 only; weight (E, 2D, K) codes and
its scales; bias (E, 2D) bf16; the rest as in `matmul_grouped_sm80`. D is a multiple of the block.

Thread map: as in `matmul_grouped_sm80`, so lane (g, t) holds gate and up of pair 4c + t of fragment
column c, and BLOCK / 4 fragment columns make a block: the four lanes of a quad hold a quarter each,
find the maximum and join their codes to words by butterfly shuffles; lanes t = 0 (and 1) store
them. A block's 128 columns are 64 z: the 64 / BLOCK scale bytes of a row, 4 (a word) or 2.

A slot with expert id -1 has products of 0 and uses no factor and no bias, so its z are 0 whatever
these hold.

Padding: scale columns past D / BLOCK are 0. Scale rows from the slot's last row to its tile's end
are written as 0 by the block that holds the last row. Other tiles are not written.

Synchronisation: the mainloop's, and one block barrier between the scale bytes' stores to shared
memory and the threads that gather a row's. The mainloop's last stage may still be read when the
first scale is stored, so scales have their own words.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.activation import make_gated_activation
from nbmoe_kernels.block_quantizer import BlockQuantizer, make_block_quantizer
from nbmoe_kernels.device.convert import bf16x2_of_f32
from nbmoe_kernels.device.math import bits_f32, div_rn, f32_bits, max_nan, mul_rn
from nbmoe_kernels.device.memory import store_v2, store_v4
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.warp import shuffle_xor
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.matmul_config import BLOCK_N, MatmulConfig
from nbmoe_kernels.matmul_epilogue import (
    ONE,
    ZERO,
    expert_scale_of,
    make_lane_place,
    make_load_bias,
    make_scaled,
    row_scale_of,
)
from nbmoe_kernels.matmul_tile_sm80 import make_multiply_tile
from nbmoe_kernels.search import TILE_ROWS, row_blocks

_BLOCK_Z = BLOCK_N // 2
_SCALE_WORDS = 4
"""Words of shared memory for a row's scale bytes, one each."""


@device_function
def magnitude(x):
    """|x| by its bits."""
    return bits_f32(np.uint32(f32_bits(x) & np.uint32(0x7FFFFFFF)))


@device_function
def quad_max(x):
    """The largest x of a quad's lanes; NaN wins."""
    x = max_nan(x, bits_f32(shuffle_xor(f32_bits(x), np.uint32(1))))
    return max_nan(x, bits_f32(shuffle_xor(f32_bits(x), np.uint32(2))))


@device_function
def quad_or(word):
    """The union of a quad's words."""
    word = np.uint32(word | shuffle_xor(word, np.uint32(1)))
    return np.uint32(word | shuffle_xor(word, np.uint32(2)))


def _make_quantize_block(quantizer: BlockQuantizer) -> Callable[..., Any]:
    """``quantize_block(z, words, tensor_scale, inverse)``: a quad's block to code words.

    Lane t gives z[c] = element 4c + t; every lane gets all words and the scale byte, which is
    returned.
    """
    per_lane, bits = quantizer.block // 4, quantizer.code_bits
    per_word = 32 // bits // 4
    block_scale, code_of_f32 = quantizer.block_scale, quantizer.code_of_f32

    @device_function
    def quantize_block(z, words, tensor_scale, inverse):
        t = np.uint32(np.uint32(cuda.threadIdx.x) & np.uint32(3))
        amax = ZERO
        for c in unroll(range(per_lane)):
            amax = max_nan(amax, magnitude(z[c]))
        scale, multiplier = block_scale(quad_max(amax), tensor_scale, inverse)
        for w in unroll(range(per_lane // per_word)):
            word = np.uint32(0)
            for i in unroll(range(per_word)):
                code = code_of_f32(mul_rn(z[w * per_word + i], multiplier))
                shift = np.uint32(np.uint32(np.uint32(bits) * t) + np.uint32(4 * bits * i))
                word = np.uint32(word | np.uint32(code << shift))
            words[w] = quad_or(word)
        return scale

    return quantize_block


def _make_store_codes(quantizer: BlockQuantizer) -> Callable[..., Any]:
    """``store_codes(c_packed, at, words)``: a block's words, at word ``at``, by a quad."""
    num_words = quantizer.block * quantizer.code_bits // 32

    @device_function
    def store_two(c_packed, at, words):
        if np.uint32(np.uint32(cuda.threadIdx.x) & np.uint32(3)) == np.uint32(0):
            store_v2(c_packed, at, words[0], words[1])

    @device_function
    def store_fours(c_packed, at, words):
        t = np.uint32(np.uint32(cuda.threadIdx.x) & np.uint32(3))
        for part in unroll(range(num_words // 4)):
            if t == np.uint32(part):
                i = 4 * part
                place = at + np.uint64(i)
                store_v4(c_packed, place, words[i], words[i + 1], words[i + 2], words[i + 3])

    return store_two if num_words == 2 else store_fours


def _make_store_scales(config: MatmulConfig, quantizer: BlockQuantizer) -> Callable[..., Any]:
    """``store_scales(...)``: the block's scale bytes from shared memory to their tile."""
    block_m, threads = config.block_m, config.threads
    scales_at = config.stages * config.stage_words
    num_bytes = _BLOCK_Z // quantizer.block
    blocks_of_tile = 4 // num_bytes
    columns_up, blocks_up = BLOCK_N - 1, blocks_of_tile - 1

    @device_function
    def store_scales(c_swiglu_scales, smem, tile, tile_row, rows, first_column, n):
        column_block = np.uint32(first_column >> np.uint32(7))
        num_column_blocks = np.uint32(np.uint32(n + np.uint32(columns_up)) // np.uint32(BLOCK_N))
        tiles_across = np.uint32(
            np.uint32(num_column_blocks + np.uint32(blocks_up)) // np.uint32(blocks_of_tile)
        )
        tile_column = np.uint32(column_block // np.uint32(blocks_of_tile))
        part = np.uint32(column_block % np.uint32(blocks_of_tile))
        tile_at = (np.uint64(tile) * np.uint64(tiles_across) + np.uint64(tile_column)) * np.uint64(
            128 * blocks_of_tile
        )
        # The block with the slot's last row in this tile also clears the rows after it.
        rows_here = np.uint32(block_m)
        if rows <= np.uint32(block_m):
            rows_here = np.uint32(TILE_ROWS - tile_row)
        row = np.uint32(cuda.threadIdx.x)
        while row < rows_here:
            word = np.uint32(0)
            if row < np.uint32(block_m):
                first = np.uint32(np.uint32(scales_at) + np.uint32(row * np.uint32(_SCALE_WORDS)))
                for i in unroll(range(num_bytes)):
                    byte = smem[np.uint32(first + np.uint32(i))]
                    word = np.uint32(word | np.uint32(byte << np.uint32(8 * i)))
            in_tile = np.uint32(tile_row + row)
            inside = np.uint32(
                np.uint32(np.uint32(in_tile & np.uint32(31)) * np.uint32(4))
                + np.uint32(in_tile >> np.uint32(5))
            )
            at = tile_at + np.uint64(np.uint32(inside * np.uint32(blocks_of_tile)) + part)
            c_swiglu_scales[at] = word
            if blocks_of_tile == 2:
                # The last block of an odd number clears the other half of its tile's words.
                is_last = np.uint32(column_block + np.uint32(1)) == num_column_blocks
                if is_last and part == np.uint32(0):
                    c_swiglu_scales[at + np.uint64(1)] = np.uint32(0)
            row = np.uint32(row + np.uint32(threads))

    return store_scales


def make_fuse_tile(config: MatmulConfig, match_bf16: bool, activation: str) -> Callable[..., Any]:
    """``fuse_tile(acc, smem, c_packed, c_swiglu_scales, located, first_column, n, c_input_scales,
    factors, alpha, limit)``.

    ``located`` is what `nbmoe_kernels.matmul_tile_sm80.make_locate` gives, ``factors`` are those of
    `nbmoe_kernels.matmul_grouped_sm80.make_store_tile`.
    """
    quantizer = make_block_quantizer(config.a_format)
    row_tiles, column_tiles = config.row_tiles, config.column_tiles
    lane_columns = 2 * config.column_tiles
    per_lane, code_words = quantizer.block // 4, quantizer.block * quantizer.code_bits // 32
    groups = column_tiles // per_lane
    assert groups, "a warp holds whole blocks"
    block_columns = 2 * quantizer.block
    codes_per_word = 32 // quantizer.code_bits
    scales_at = config.stages * config.stage_words
    has_tensor_scale = config.a_format == "nvfp4"
    scaled, load_bias = make_scaled(config), make_load_bias(config)
    lane_place = make_lane_place(config)
    gated = make_gated_activation(activation)
    quantize_block = _make_quantize_block(quantizer)
    store_codes = _make_store_codes(quantizer)
    store_scales = _make_store_scales(config, quantizer)

    @device_function
    def activated(gate, up, alpha, limit):
        if match_bf16:
            rounded = bf16x2_of_f32(up, gate)
            gate = bits_f32(np.uint32(rounded << np.uint32(16)))
            up = bits_f32(np.uint32(rounded & np.uint32(0xFFFF0000)))
        return gated(gate, up, alpha, limit)

    @device_function
    def fuse_tile(
        acc, smem, c_packed, c_swiglu_scales, located, first_column, n, c_input_scales, factors,
        alpha, limit,
    ):  # fmt: skip
        slot, expert, tile, tile_row, first_row, rows = located
        expert_scales, a_row_scales, bias, has_expert_scales, has_row_scales, has_bias = factors
        if rows > np.uint32(0):
            tensor_scale = ONE
            if expert < np.int32(0):
                has_row_scales = np.uint32(0)
            elif has_tensor_scale:
                tensor_scale = c_input_scales[np.uint64(slot)]
            inverse = div_rn(ONE, tensor_scale)
            expert_scale = expert_scale_of(expert_scales, has_expert_scales, expert)
            lane_row, lane_column = lane_place()
            column = np.uint32(first_column + lane_column)
            biases = cuda.local.array(lane_columns, np.float32)
            load_bias(biases, bias, has_bias, expert, column, n)
            t = np.uint32(np.uint32(cuda.threadIdx.x) & np.uint32(3))
            z = cuda.local.array(per_lane, np.float32)
            words = cuda.local.array(code_words, np.uint32)
            row_words = np.uint32(np.uint32(n >> np.uint32(1)) // np.uint32(codes_per_word))
            for half in unroll(range(2 * row_tiles)):
                row_in_block = np.uint32(lane_row + np.uint32(8 * half))
                row = np.uint32(first_row + row_in_block)
                row_scale = ONE
                if row_in_block < rows:
                    row_scale = row_scale_of(a_row_scales, has_row_scales, row)
                for group in unroll(range(groups)):
                    for c in unroll(range(per_lane)):
                        at = per_lane * group + c
                        i = (half // 2) * column_tiles + at
                        gate, up = acc[i, 2 * (half % 2)], acc[i, 2 * (half % 2) + 1]
                        gate = scaled(gate, expert_scale, row_scale, biases[2 * at])
                        up = scaled(up, expert_scale, row_scale, biases[2 * at + 1])
                        z[c] = activated(gate, up, alpha, limit)
                    scale = quantize_block(z, words, tensor_scale, inverse)
                    block_in_tile = np.uint32(
                        np.uint32(lane_column // np.uint32(block_columns)) + np.uint32(group)
                    )
                    block = np.uint32(
                        np.uint32(first_column // np.uint32(block_columns)) + block_in_tile
                    )
                    is_stored = row_in_block < rows and block < np.uint32(
                        n // np.uint32(block_columns)
                    )
                    if is_stored:
                        at_codes = np.uint64(row) * np.uint64(row_words) + np.uint64(
                            np.uint32(block * np.uint32(code_words))
                        )
                        store_codes(c_packed, at_codes, words)
                    if t == np.uint32(0):
                        at_scale = np.uint32(
                            np.uint32(
                                np.uint32(scales_at)
                                + np.uint32(row_in_block * np.uint32(_SCALE_WORDS))
                            )
                            + block_in_tile
                        )
                        smem[at_scale] = scale if is_stored else np.uint32(0)
            cuda.syncthreads()
            store_scales(c_swiglu_scales, smem, tile, tile_row, rows, first_column, n)

    return fuse_tile


def scale_type_of(config: MatmulConfig) -> str:
    """Element of the scales' pointer: the bytes of a block's columns of a row."""
    return {4: "u32", 2: "u16"}[_BLOCK_Z // make_block_quantizer(config.a_format).block]


def fused_shared_bytes(config: MatmulConfig) -> int:
    """Of a block: the stages, and words of scales."""
    return config.shared_bytes + 4 * _SCALE_WORDS * config.block_m


@functools.cache
def make_matmul_grouped_swiglu(
    config: MatmulConfig, match_bf16: bool = True, activation: str = "silu"
) -> Kernel:
    """The kernel for a pair of operands, a tile shape and an activation.

    ``match_bf16`` rounds gate and up to bf16.
    """
    fragments = config.fragments
    multiply_tile = make_multiply_tile(config)
    fuse_tile = make_fuse_tile(config, match_bf16, activation)

    @kernel(
        f"global u32* c_packed, global {scale_type_of(config)}* c_swiglu_scales, "
        "global u8* hidden, global u8* weight, global u8* a_scales, global u8* b_scales, "
        "global u32* expert_start, "
        "global u32* a_scale_offsets, global i32* expert_ids, global f32* expert_scales, "
        "global f32* c_input_scales, global u16* a_row_scales, global u16* bias, "
        "u32 num_active, u32 num_rows, u32 n, u32 k, u32 has_row_scales, u32 has_expert_scales, "
        "u32 has_bias, f32 alpha, f32 limit",
        threads=config.threads,
        shared_bytes=fused_shared_bytes(config),
        name=f"matmul_grouped_swiglu_{config.name}_{'bf16' if match_bf16 else 'f32'}"
        + ("" if activation == "silu" else f"_{activation}"),
    )
    def matmul_grouped_swiglu(
        c_packed,
        c_swiglu_scales,
        hidden,
        weight,
        a_scales,
        b_scales,
        expert_start,
        a_scale_offsets,
        expert_ids,
        expert_scales,
        c_input_scales,
        a_row_scales,
        bias,
        num_active,
        num_rows,
        n,
        k,
        has_row_scales,
        has_expert_scales,
        has_bias,
        alpha,
        limit,
    ):
        smem = cuda.shared.array(0, np.uint32, alignment=16)
        acc = cuda.local.array((fragments, 4), np.float32)
        slot, expert, tile, tile_row, first_row, rows, first_column = multiply_tile(
            acc,
            smem,
            hidden,
            weight,
            a_scales,
            b_scales,
            np.uint32(0),
            expert_start,
            a_scale_offsets,
            expert_ids,
            num_active,
            num_rows,
            n,
            k,
        )
        factors = (
            expert_scales, a_row_scales, bias, has_expert_scales, has_row_scales, has_bias,
        )  # fmt: skip
        located = (slot, expert, tile, tile_row, first_row, rows)
        fuse_tile(
            acc, smem, c_packed, c_swiglu_scales, located, first_column, n, c_input_scales, factors,
            alpha, limit,
        )  # fmt: skip

    return matmul_grouped_swiglu


def launch_matmul_grouped_swiglu(
    executor: Executor,
    c_packed: Any,
    c_swiglu_scales: Any,
    hidden: Any,
    weight: Any,
    a_scales: Any,
    b_scales: Any,
    expert_start: Any,
    a_scale_offsets: Any,
    expert_ids: Any,
    expert_scales: Any,
    c_input_scales: Any,
    a_row_scales: Any,
    bias: Any,
    *,
    num_active: int,
    num_rows: int,
    n: int,
    k: int,
    has_row_scales: bool,
    has_expert_scales: bool,
    has_bias: bool,
    match_bf16: bool,
    activation: str,
    alpha: float,
    limit: float,
    config: MatmulConfig,
    stream: Any = None,
) -> None:
    """Launch on flat arrays; ``n`` = 2 D, ``num_rows`` = M.

    Arrays whose ``has_`` flag is off are not read, nor is ``c_input_scales`` for MX formats.
    """
    blocks = row_blocks(num_rows, num_active, config.block_m)
    make_matmul_grouped_swiglu(config, match_bf16, activation).launch(
        executor,
        (-(-n // BLOCK_N) * blocks, 1, 1),
        c_packed,
        c_swiglu_scales,
        hidden,
        weight,
        a_scales,
        b_scales,
        expert_start,
        a_scale_offsets,
        expert_ids,
        expert_scales,
        c_input_scales,
        a_row_scales,
        bias,
        num_active,
        num_rows,
        n,
        k,
        has_row_scales,
        has_expert_scales,
        has_bias,
        alpha,
        limit,
        stream=stream,
    )
