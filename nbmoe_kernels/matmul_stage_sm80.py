"""A pipeline stage of the portable matmul: its copy to shared memory and its products.

Zeros: rows past the last and bytes past K are filled with zero codes; a block past K gets scale
byte 0, because padding scale bytes may hold anything. Zero products change no sum.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.memory import cp_async
from nbmoe_kernels.device.mma import MMA_M16N8K16
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.matmul_config import BLOCK_N, MatmulConfig
from nbmoe_kernels.matmul_operands import Operand


def _make_copy_codes(operand: Operand, rows_in_block: int, config: MatmulConfig) -> Any:
    threads, copy_bytes, block_bytes = config.threads, config.copy_bytes, operand.block_bytes
    copies_per_row = block_bytes // copy_bytes
    copies = rows_in_block * config.stage_blocks * copies_per_row
    copy_words = copy_bytes // 4
    is_swizzled = operand.is_swizzled
    assert copy_bytes == 16 or not is_swizzled, "a copy is one chunk"
    copy = cp_async(copy_bytes)

    @device_function
    def copy_codes(smem, at, codes, first_byte, rows, row_bytes, k_byte):
        """Copy 64-blocks of ``rows_in_block`` rows; rows past ``rows`` are zero."""
        thread = np.uint32(cuda.threadIdx.x)
        for i in unroll(range((copies + threads - 1) // threads)):
            item = np.uint32(thread + np.uint32(i * threads))
            if item < np.uint32(copies):
                part = np.uint32(item % np.uint32(copies_per_row))
                row_of_stage = np.uint32(item // np.uint32(copies_per_row))
                row = np.uint32(row_of_stage % np.uint32(rows_in_block))
                q = np.uint32(item // np.uint32(copies_per_row * rows_in_block))
                byte = np.uint32(
                    np.uint32(k_byte + np.uint32(q * np.uint32(block_bytes)))
                    + np.uint32(part * np.uint32(copy_bytes))
                )
                source = np.uint64(0)
                nbytes = np.uint32(0)
                if row < rows and byte < row_bytes:
                    source = first_byte + np.uint64(row) * np.uint64(row_bytes) + np.uint64(byte)
                    nbytes = min(np.uint32(copy_bytes), np.uint32(row_bytes - byte))
                if is_swizzled:
                    part = np.uint32(part ^ np.uint32(row & np.uint32(1)))
                word = np.uint32(
                    np.uint32(row_of_stage * np.uint32(copies_per_row * copy_words))
                    + np.uint32(part * np.uint32(copy_words))
                )
                copy(smem, np.uint32(at + word), codes, source, nbytes)

    return copy_codes


def _make_copy_scales(operand: Operand, rows_in_block: int, config: MatmulConfig) -> Any:
    threads = config.threads
    words = operand.scale_words(config.stage_blocks)
    copy = cp_async(4)

    @device_function
    def copy_scales(smem, at, scales, first_byte, row_in_tile, rows, k_tiles, k_tile):
        """Copy scale words (4 scale columns of a row) of one 128-row tile."""
        thread = np.uint32(cuda.threadIdx.x)
        for i in unroll(range((rows_in_block * words + threads - 1) // threads)):
            item = np.uint32(thread + np.uint32(i * threads))
            if item < np.uint32(rows_in_block * words):
                row = np.uint32(item % np.uint32(rows_in_block))
                column_tile = np.uint32(k_tile + np.uint32(item // np.uint32(rows_in_block)))
                source = np.uint64(0)
                nbytes = np.uint32(0)
                if row < rows and column_tile < k_tiles:
                    tile_row = np.uint32(row_in_tile + row)
                    inside = np.uint32(
                        np.uint32(np.uint32(tile_row & np.uint32(31)) * np.uint32(16))
                        + np.uint32(np.uint32(tile_row >> np.uint32(5)) * np.uint32(4))
                    )
                    source = (
                        first_byte + np.uint64(column_tile) * np.uint64(512) + np.uint64(inside)
                    )
                    nbytes = np.uint32(4)
                copy(smem, np.uint32(at + item), scales, source, nbytes)

    return copy_scales


def make_copy_operand(
    operand: Operand, rows_in_block: int, codes_at: int, scales_at: int, config: MatmulConfig
) -> Callable[..., Any]:
    """The device function that copies a stage of one operand to where the config wants it.

    It takes ``(smem, stage_at, stage, k, rows, codes, first_row, scales, scale_tile,
    row_in_tile)``: ``rows`` rows of codes from ``first_row`` on, and their scales, of scale tile
    ``scale_tile`` from row ``row_in_tile`` on.
    """
    stage_blocks = config.stage_blocks
    # A row's bytes are k * factor / 2.
    factor = operand.block_bytes // 32
    stage_bytes = stage_blocks * operand.block_bytes
    copy_codes = _make_copy_codes(operand, rows_in_block, config)

    @device_function
    def copy_plain(
        smem, stage_at, stage, k, rows, codes, first_row, scales, scale_tile, row_in_tile
    ):
        row_bytes = np.uint32(np.uint32(k >> np.uint32(1)) * np.uint32(factor))
        first_byte = np.uint64(first_row) * np.uint64(row_bytes)
        k_byte = np.uint32(stage * np.uint32(stage_bytes))
        at = np.uint32(stage_at + np.uint32(codes_at))
        copy_codes(smem, at, codes, first_byte, rows, row_bytes, k_byte)

    if not operand.scale_block:
        return copy_plain
    scale_words = operand.scale_words(stage_blocks)
    tile_k, k_up = 4 * operand.scale_block, 4 * operand.scale_block - 1
    copy_scales = _make_copy_scales(operand, rows_in_block, config)

    @device_function
    def copy_scaled(
        smem, stage_at, stage, k, rows, codes, first_row, scales, scale_tile, row_in_tile
    ):
        copy_plain(
            smem, stage_at, stage, k, rows, codes, first_row, scales, scale_tile, row_in_tile
        )
        k_tiles = np.uint32(np.uint32(k + np.uint32(k_up)) // np.uint32(tile_k))
        copy_scales(
            smem,
            np.uint32(stage_at + np.uint32(scales_at)),
            scales,
            np.uint64(scale_tile) * np.uint64(k_tiles) * np.uint64(512),
            row_in_tile,
            rows,
            k_tiles,
            np.uint32(stage * np.uint32(scale_words)),
        )

    return copy_scaled


def _make_fetch_row(operand: Operand, rows_in_block: int, codes_at: int, scales_at: int) -> Any:
    """The device function that decodes a lane's 16-block of a row."""
    words, has_scales, span = (
        operand.block_words,
        operand.scale_block > 0,
        operand.scale_block // 16,
    )
    fetch, scale_of = operand.fetch, operand.scale_of

    @device_function
    def fetch_row(smem, stage_at, q, row, t, block, is_inside, out, first, pair, stride):
        scale = np.uint32(0)
        if has_scales:
            scale_row = np.uint32(
                np.uint32(np.uint32(q // np.uint32(span)) * np.uint32(rows_in_block)) + row
            )
            word = smem[np.uint32(np.uint32(stage_at + np.uint32(scales_at)) + scale_row)]
            byte = np.uint32(np.uint32(block // np.uint32(span)) & np.uint32(3))
            code = np.uint32(np.uint32(word >> np.uint32(np.uint32(8) * byte)) & np.uint32(0xFF))
            scale = scale_of(code if is_inside else np.uint32(0))
        code_row = np.uint32(np.uint32(q * np.uint32(rows_in_block)) + row)
        at = np.uint32(
            np.uint32(stage_at + np.uint32(codes_at)) + np.uint32(code_row * np.uint32(words))
        )
        fetch(smem, at, t, np.uint32(row & np.uint32(1)), scale, out, first, pair, stride)

    return fetch_row


def make_multiply_stage(config: MatmulConfig) -> Callable[..., Any]:
    """The device function that adds a stage's products to a warp's fragments."""
    row_tiles, column_tiles, warps_n = config.row_tiles, config.column_tiles, config.warps_n
    warp_rows, warp_columns = 16 * row_tiles, 8 * column_tiles
    stage_blocks, a_words = config.stage_blocks, 16 * row_tiles
    assert config.a.tensor_core == config.b.tensor_core, config
    mma = MMA_M16N8K16[config.a.tensor_core]
    fetch_a = _make_fetch_row(config.a, config.block_m, 0, config.a_scales_at)
    fetch_b = _make_fetch_row(config.b, BLOCK_N, config.b_codes_at, config.b_scales_at)

    @device_function
    def multiply_stage(acc, smem, stage_at, first_block, num_blocks):
        """Add the products of one stage's 64-blocks, in ascending order.

        ``first_block`` is the stage's first 64-block, ``num_blocks`` K's 16-blocks.
        """
        thread = np.uint32(cuda.threadIdx.x)
        lane = np.uint32(thread & np.uint32(31))
        warp = np.uint32(thread >> np.uint32(5))
        g = np.uint32(lane >> np.uint32(2))
        t = np.uint32(lane & np.uint32(3))
        a_row = np.uint32(
            np.uint32(np.uint32(warp // np.uint32(warps_n)) * np.uint32(warp_rows)) + g
        )
        b_row = np.uint32(
            np.uint32(np.uint32(warp % np.uint32(warps_n)) * np.uint32(warp_columns)) + g
        )
        a = cuda.local.array(a_words, np.uint32)
        b = cuda.local.array(8, np.uint32)
        for q in range(stage_blocks):
            block = np.uint32(np.uint32(np.uint32(first_block + np.uint32(q)) * np.uint32(4)) + t)
            is_inside = block < num_blocks
            for half in unroll(range(2 * row_tiles)):
                # Fragment registers 0 and 2 hold row g, 1 and 3 row g + 8.
                fetch_a(
                    smem,
                    stage_at,
                    np.uint32(q),
                    np.uint32(a_row + np.uint32(8 * half)),
                    t,
                    block,
                    is_inside,
                    a,
                    16 * (half // 2) + half % 2,
                    2,
                    4,
                )
            for column in unroll(range(column_tiles)):
                fetch_b(
                    smem,
                    stage_at,
                    np.uint32(q),
                    np.uint32(b_row + np.uint32(8 * column)),
                    t,
                    block,
                    is_inside,
                    b,
                    0,
                    1,
                    2,
                )
                for m in unroll(range(row_tiles)):
                    fragment = acc[m * column_tiles + column]
                    for j in unroll(range(4)):
                        at_a = 16 * m + 4 * j
                        mma(
                            fragment,
                            a[at_a],
                            a[at_a + 1],
                            a[at_a + 2],
                            a[at_a + 3],
                            b[2 * j],
                            b[2 * j + 1],
                        )

    return multiply_stage
