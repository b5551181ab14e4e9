"""Row-major block scales to 5-D tiles of 128 rows by 4 columns.

    tiles[e, r // 128, c // 4, r % 32, r % 128 // 32, c % 4] = scales[e, r, c]

Shapes: tiles (E, ceil(R/128), ceil(C/4), 32, 4, 4) u8, scales (E, R, C) u8.

Thread map: block (x, y) makes the tile x % ceil(R/128) down and y across of expert
x // ceil(R/128); thread t makes word t of it, the four columns of row 32 (t % 4) + t // 4.

Padding: rows past R and columns past C are 0.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.mx import pack_low_bytes
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.search import TILE_ROWS

THREADS = 128
ONE, TWO, THREE = np.uint32(1), np.uint32(2), np.uint32(3)


@device_function
def scale_or_zero(scales, at, column, num_cols):
    """The scale at ``at``, 0 if its column is past the last."""
    byte = np.uint32(0)
    if column < num_cols:
        byte = np.uint32(scales[at])
    return byte


@functools.cache
def make_interleave_scales() -> Kernel:
    """The kernel."""

    @kernel(
        "global u32* tiles, global u8* scales, u32 num_rows, u32 num_cols, u32 tiles_down",
        threads=THREADS,
        name="interleave_scales",
    )
    def interleave_scales(tiles, scales, num_rows, num_cols, tiles_down):
        thread = np.uint32(cuda.threadIdx.x)
        stack = np.uint32(cuda.blockIdx.x)
        across = np.uint32(cuda.blockIdx.y)
        expert = np.uint32(stack // tiles_down)
        down = np.uint32(stack - np.uint32(expert * tiles_down))
        in_tile = np.uint32(
            np.uint32(np.uint32(thread & np.uint32(3)) << np.uint32(5)) + (thread >> np.uint32(2))
        )
        row = np.uint32(np.uint32(down * TILE_ROWS) + in_tile)
        column = np.uint32(across * np.uint32(4))
        word = np.uint32(0)
        if row < num_rows:
            at = np.uint64(expert) * np.uint64(num_rows) + np.uint64(row)
            at = at * np.uint64(num_cols) + np.uint64(column)
            b0 = scale_or_zero(scales, at, column, num_cols)
            b1 = scale_or_zero(scales, at + np.uint64(1), np.uint32(column + ONE), num_cols)
            b2 = scale_or_zero(scales, at + np.uint64(2), np.uint32(column + TWO), num_cols)
            b3 = scale_or_zero(scales, at + np.uint64(3), np.uint32(column + THREE), num_cols)
            word = pack_low_bytes(b0, b1, b2, b3)
        tile = np.uint64(stack) * np.uint64(cuda.gridDim.y) + np.uint64(across)
        tiles[tile * np.uint64(THREADS) + np.uint64(thread)] = word

    return interleave_scales


def launch_interleave_scales(
    executor: Executor,
    tiles: Any,
    scales: Any,
    *,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    stream: Any = None,
) -> None:
    """Launch on flat arrays; the arguments are the sizes of ``scales``."""
    tiles_down = -(-num_rows // 128)
    make_interleave_scales().launch(
        executor,
        (num_experts * tiles_down, -(-num_cols // 4), 1),
        tiles,
        scales,
        num_rows,
        num_cols,
        tiles_down,
        stream=stream,
    )
