"""The mainloop of the portable grouped NVFP4 matmul: cp.async pipeline, mma.sync, exact decode.

A block computes BLOCK_M rows of one expert slot times BLOCK_N weight rows. K is walked in stages of
K64 64-blocks; a stage's packed codes and scale words are copied to shared memory as they are and
decoded in registers, so shared memory holds 4.5 bits an element.

K grouping (`nbmoe.layouts`): a tensor-core step sums 16 of a 64-block's elements, step j those with
k % 4 == j. Lane t of a quad owns the 16-block t of a row: 8 bytes and one scale byte give its share
of all four steps. The elements j, j + 4, j + 8, j + 12 of the block are the low and high halves of
the two registers that the fragment wants (`nbmoe_kernels.device.nvfp4.decode_8`), in a and in b
alike, and the order inside a step does not matter.

Shared memory of a stage (u32 words), q the 64-block in the stage:

    a codes   [q][row of BLOCK_M][8]     b codes   [q][row of BLOCK_N][8]
    a scales  [q][row of BLOCK_M]        b scales  [q][row of BLOCK_N]

A quad reads 32 contiguous bytes and 8 quads 256, so 8-byte loads have no bank conflicts.

Warps: WARPS_M x WARPS_N, each with a (BLOCK_M / WARPS_M) x (BLOCK_N / WARPS_N) tile of m16n8
fragments; lane (g, t) = (lane / 4, lane % 4) holds rows g, g + 8 and columns 2t, 2t + 1 of each.

Zeros: rows past the slot's last, weight rows past N and bytes past K are filled with zero codes; a
16-block past K in the last 64-block gets scale 0, because padding scale bytes may hold anything.
Zero products change no sum.

Synchronisation: STAGES stages. A thread commits one copy group a stage and waits until its own
copies of the next stage are complete; one block barrier a stage makes all threads' copies visible
and shows that everyone is done with the stage that is overwritten next.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.convert import f16x2_of_e4m3
from nbmoe_kernels.device.memory import (
    cp_async,
    cp_async_commit,
    cp_async_wait,
    load_shared_v2,
)
from nbmoe_kernels.device.mma import mma_m16n8k16_f16
from nbmoe_kernels.device.nvfp4 import decode_8
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.search import locate_rows

BLOCK_N = 128
K64 = 2
"""64-blocks of K in a stage."""
PRODUCT_SCALE = np.float32(2.0**28)
"""Both operands are decoded times 2^-14."""


@dataclass(frozen=True)
class MatmulConfig:
    """Tile shape of the portable grouped matmul. It changes speed, never bytes.

    Attributes:
        block_m: rows of a block's tile; divides 128.
        warps_m: warps along the rows.
        warps_n: warps along the columns.
        stages: depth of the copy pipeline.
        copy_bytes: width of a copy; 16 where rows of K / 2 bytes allow it, else 8.
    """

    block_m: int
    warps_m: int
    warps_n: int
    stages: int
    copy_bytes: int

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def row_tiles(self) -> int:
        """m16 fragments of a warp."""
        return self.block_m // self.warps_m // 16

    @property
    def column_tiles(self) -> int:
        """n8 fragments of a warp."""
        return BLOCK_N // self.warps_n // 8

    @property
    def stage_words(self) -> int:
        return K64 * (self.block_m + BLOCK_N) * 9

    @property
    def shared_bytes(self) -> int:
        return 4 * self.stages * self.stage_words

    @property
    def name(self) -> str:
        return (
            f"m{self.block_m}n{BLOCK_N}_w{self.warps_m}x{self.warps_n}"
            f"_s{self.stages}_c{self.copy_bytes}"
        )


def make_multiply_tile(config: MatmulConfig) -> Callable[..., Any]:
    """The device function that finds the block's tile and computes its product.

    It takes a warp's fragments ``acc``, (row_tiles * column_tiles, 4) f32, and the kernel's
    operands, and returns what an epilogue needs to store them; see its docstring.
    """
    block_m, threads, stages = config.block_m, config.threads, config.stages
    row_tiles, column_tiles = config.row_tiles, config.column_tiles
    warps_n, copy_bytes = config.warps_n, config.copy_bytes
    warp_rows, warp_columns = 16 * row_tiles, 8 * column_tiles
    fragments = row_tiles * column_tiles
    blocks_per_tile = 128 // block_m
    copies_per_row = 32 // copy_bytes
    copy_words = copy_bytes // 4
    stage_words = config.stage_words
    a_scales_at = K64 * block_m * 8
    b_codes_at = a_scales_at + K64 * block_m
    b_scales_at = b_codes_at + K64 * BLOCK_N * 8
    last_group = stages - 2
    a_words = 16 * row_tiles
    copy_codes = cp_async(copy_bytes)
    copy_scale = cp_async(4)
    wait_for_stage = cp_async_wait(last_group)

    @device_function
    def load_codes(smem, at, rows_in_block, codes, first_byte, rows, row_bytes, k_byte):
        """Copy K64 x rows_in_block x 32 bytes of packed rows; rows past ``rows`` are zero."""
        thread = np.uint32(cuda.threadIdx.x)
        for i in unroll(range((rows_in_block * K64 * copies_per_row + threads - 1) // threads)):
            item = np.uint32(thread + np.uint32(i * threads))
            if item < np.uint32(rows_in_block * K64 * copies_per_row):
                part = np.uint32(item % np.uint32(copies_per_row))
                row = np.uint32(
                    np.uint32(item // np.uint32(copies_per_row)) % np.uint32(rows_in_block)
                )
                q = np.uint32(item // np.uint32(copies_per_row * rows_in_block))
                byte = np.uint32(
                    np.uint32(k_byte + np.uint32(q * np.uint32(32)))
                    + np.uint32(part * np.uint32(copy_bytes))
                )
                source = np.uint64(0)
                nbytes = np.uint32(0)
                if row < rows and byte < row_bytes:
                    source = first_byte + np.uint64(row) * np.uint64(row_bytes) + np.uint64(byte)
                    nbytes = min(np.uint32(copy_bytes), np.uint32(row_bytes - byte))
                word = np.uint32(
                    np.uint32(np.uint32(item // np.uint32(copies_per_row)) * np.uint32(8))
                    + np.uint32(part * np.uint32(copy_words))
                )
                copy_codes(smem, np.uint32(at + word), codes, source, nbytes)

    @device_function
    def load_scales(
        smem, at, rows_in_block, scales, first_byte, row_in_tile, rows, k_tiles, k_tile
    ):
        """Copy K64 x rows_in_block scale words (4 scale columns a row) of one 128-row tile."""
        thread = np.uint32(cuda.threadIdx.x)
        for i in unroll(range((rows_in_block * K64 + threads - 1) // threads)):
            item = np.uint32(thread + np.uint32(i * threads))
            if item < np.uint32(rows_in_block * K64):
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
                copy_scale(smem, np.uint32(at + item), scales, source, nbytes)

    @device_function
    def scale_of_block(word, block_in_tile, is_inside):
        """Byte ``block_in_tile`` of a scale word as f16 pair; zero for a block past K."""
        code = np.uint32(
            np.uint32(word >> np.uint32(np.uint32(8) * block_in_tile)) & np.uint32(0xFF)
        )
        return f16x2_of_e4m3(code if is_inside else np.uint32(0))

    @device_function
    def multiply_stage(acc, smem, stage_at, first_column_tile, num_blocks):
        """Add the products of one stage's 64-blocks, in ascending order."""
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
        for q in range(K64):
            block = np.uint32(
                np.uint32(np.uint32(first_column_tile + np.uint32(q)) * np.uint32(4)) + t
            )
            is_inside = block < num_blocks
            for half in unroll(range(2 * row_tiles)):
                # Fragment registers 0 and 2 hold row g, 1 and 3 row g + 8.
                row = np.uint32(
                    np.uint32(a_row + np.uint32(8 * half))
                    + np.uint32(np.uint32(q) * np.uint32(block_m))
                )
                scale = scale_of_block(
                    smem[np.uint32(stage_at + np.uint32(a_scales_at) + row)], t, is_inside
                )
                at = np.uint32(
                    np.uint32(stage_at + np.uint32(row * np.uint32(8)))
                    + np.uint32(np.uint32(2) * t)
                )
                w0, w1 = load_shared_v2(smem, at)
                first = 16 * (half // 2) + half % 2
                decode_8(w0, scale, a, first, 4)
                decode_8(w1, scale, a, first + 2, 4)
            for column in unroll(range(column_tiles)):
                row = np.uint32(
                    np.uint32(b_row + np.uint32(8 * column))
                    + np.uint32(np.uint32(q) * np.uint32(BLOCK_N))
                )
                scale = scale_of_block(
                    smem[np.uint32(stage_at + np.uint32(b_scales_at) + row)], t, is_inside
                )
                at = np.uint32(
                    np.uint32(stage_at + np.uint32(b_codes_at))
                    + np.uint32(np.uint32(row * np.uint32(8)) + np.uint32(np.uint32(2) * t))
                )
                w0, w1 = load_shared_v2(smem, at)
                decode_8(w0, scale, b, 0, 2)
                decode_8(w1, scale, b, 1, 2)
                for m in unroll(range(row_tiles)):
                    fragment = acc[m * column_tiles + column]
                    for j in unroll(range(4)):
                        at_a = 16 * m + 4 * j
                        mma_m16n8k16_f16(
                            fragment,
                            a[at_a],
                            a[at_a + 1],
                            a[at_a + 2],
                            a[at_a + 3],
                            b[2 * j],
                            b[2 * j + 1],
                        )

    @device_function
    def accumulate(
        acc,
        smem,
        hidden,
        weight,
        a_scales,
        b_scales,
        tile,
        tile_row,
        first_row,
        rows,
        expert,
        first_column,
        n,
        k,
    ):
        """acc += the product of ``rows`` rows from ``first_row`` on, at ``tile_row`` of scale tile
        ``tile``, and the expert's weight rows from ``first_column`` on, over all of K."""
        row_bytes = np.uint32(k >> np.uint32(1))
        num_blocks = np.uint32(k >> np.uint32(4))
        k_tiles = np.uint32(np.uint32(k + np.uint32(63)) >> np.uint32(6))
        num_stages = np.uint32(np.uint32(k_tiles + np.uint32(K64 - 1)) // np.uint32(K64))
        n_tiles = np.uint64(np.uint32(n + np.uint32(127)) >> np.uint32(7))
        columns = np.uint32(n - first_column)
        a_first = np.uint64(first_row) * np.uint64(row_bytes)
        a_scale_first = np.uint64(tile) * np.uint64(k_tiles) * np.uint64(512)
        weight_row = np.uint64(expert) * np.uint64(n) + np.uint64(first_column)
        b_first = weight_row * np.uint64(row_bytes)
        weight_tile = np.uint64(expert) * n_tiles + np.uint64(first_column >> np.uint32(7))
        b_scale_first = weight_tile * np.uint64(k_tiles) * np.uint64(512)
        for loaded in range(np.uint32(num_stages + np.uint32(stages - 1))):
            stage = np.uint32(np.uint32(loaded) % np.uint32(stages))
            at = np.uint32(stage * np.uint32(stage_words))
            k_tile = np.uint32(np.uint32(loaded) * np.uint32(K64))
            done = np.uint32(np.uint32(loaded) - np.uint32(stages - 1))
            if np.uint32(loaded) >= np.uint32(stages - 1):
                wait_for_stage()
                cuda.syncthreads()
            if np.uint32(loaded) < num_stages:
                k_byte = np.uint32(k_tile * np.uint32(32))
                load_codes(smem, at, block_m, hidden, a_first, rows, row_bytes, k_byte)
                load_codes(
                    smem,
                    np.uint32(at + np.uint32(b_codes_at)),
                    BLOCK_N,
                    weight,
                    b_first,
                    columns,
                    row_bytes,
                    k_byte,
                )
                load_scales(
                    smem,
                    np.uint32(at + np.uint32(a_scales_at)),
                    block_m,
                    a_scales,
                    a_scale_first,
                    tile_row,
                    rows,
                    k_tiles,
                    k_tile,
                )
                load_scales(
                    smem,
                    np.uint32(at + np.uint32(b_scales_at)),
                    BLOCK_N,
                    b_scales,
                    b_scale_first,
                    np.uint32(0),
                    columns,
                    k_tiles,
                    k_tile,
                )
            # Past the last stage the group is empty, so the wait's count keeps its meaning.
            cp_async_commit()
            if np.uint32(loaded) >= np.uint32(stages - 1):
                multiply_stage(
                    acc,
                    smem,
                    np.uint32(np.uint32(done % np.uint32(stages)) * np.uint32(stage_words)),
                    np.uint32(done * np.uint32(K64)),
                    num_blocks,
                )

    @device_function
    def multiply_tile(
        acc,
        smem,
        hidden,
        weight,
        a_scales,
        b_scales,
        expert_start,
        a_scale_offsets,
        expert_ids,
        num_active,
        n,
        k,
    ):
        """acc = the product of the block's tile.

        Blocks run over columns first: with X = ceil(n / 128), block b has columns 128 (b % X) and
        on, and rows BLOCK_M i and on of the 128-row tile (b / X) / (128 / BLOCK_M),
        i = (b / X) % (128 / BLOCK_M). The tile's slot is found by bisection.

        Returns:
            slot, expert (-1 if masked: acc is 0), tile, tile_row (BLOCK_M i), first_row of the
            block, rows from there to the slot's end (0: the block has nothing to do),
            first_column.
        """
        block = np.uint32(cuda.blockIdx.x)
        n_tiles = np.uint32(np.uint32(n + np.uint32(BLOCK_N - 1)) // np.uint32(BLOCK_N))
        row_block = np.uint32(block // n_tiles)
        first_column = np.uint32(np.uint32(block % n_tiles) * np.uint32(BLOCK_N))
        tile = np.uint32(row_block // np.uint32(blocks_per_tile))
        tile_row = np.uint32(np.uint32(row_block % np.uint32(blocks_per_tile)) * np.uint32(block_m))
        slot, first_row, rows = locate_rows(
            expert_start, a_scale_offsets, num_active, tile, tile_row
        )
        expert = expert_ids[np.uint64(slot)]
        for i in unroll(range(fragments)):
            for j in unroll(range(4)):
                acc[i, j] = np.float32(0.0)
        if rows > np.uint32(0) and expert >= np.int32(0):
            accumulate(
                acc,
                smem,
                hidden,
                weight,
                a_scales,
                b_scales,
                tile,
                tile_row,
                first_row,
                rows,
                expert,
                first_column,
                n,
                k,
            )
        return slot, expert, tile, tile_row, first_row, rows, first_column

    return multiply_tile
