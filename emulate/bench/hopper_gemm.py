"""A warp-specialised GEMM for Hopper: the yardstick of the engines.

out (m x n, bf16) = a (m x k) @ b (n x k).T, operands e4m3, f16 or bf16. Blocks are persistent. Of
their three warpgroups the last is the producer: one of its threads copies tiles of 128 bytes along
k by TMA into a ring of stages. The other two multiply 64 rows each with wgmma. A stage has two
mbarriers: `full` counts the bytes of its copies, `empty` the eight warps that are done with it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numba import cuda

from nbmoe_kernels.device.op import unroll

if TYPE_CHECKING:
    from nbmoe_kernels.kernel import Kernel

Form = Literal["e4m3", "f16", "bf16"]
THREADS = 384
BLOCK_M = 128
TILE_BYTES = 128
"""Bytes of a tile's row: the width of a TMA box."""
_CONSUMER_WARPS = 8
_STEP_BYTES = 32
_ELEMENT_BYTES = {"e4m3": 1, "f16": 2, "bf16": 2}


def hopper_gemm(form: Form = "e4m3", block_n: int = 256, stages: int = 4) -> "Kernel":
    """Make the kernel.

    Args:
        form: type of the operands.
        block_n: columns of a tile, a multiple of 8 up to 256.
        stages: stages of the ring; one is 128 * (128 + block_n) bytes of shared memory.
    """
    from nbmoe_kernels.device.mbarrier import (
        fence_mbarrier_init,
        mbarrier_arrive,
        mbarrier_arrive_expect,
        mbarrier_init,
        mbarrier_wait,
    )
    from nbmoe_kernels.device.sync import set_max_registers
    from nbmoe_kernels.device.tile import store_accumulators_bf16
    from nbmoe_kernels.device.tma import fence_tensor_map, tma_load
    from nbmoe_kernels.device.wgmma import wgmma, wgmma_commit, wgmma_fence, wgmma_wait
    from nbmoe_kernels.kernel import kernel

    a_bytes, b_bytes = BLOCK_M * TILE_BYTES, block_n * TILE_BYTES
    stage_bytes = a_bytes + b_bytes
    first_barrier = stages * stage_bytes // 8
    accumulators = block_n // 2
    load_a, load_b = tma_load(BLOCK_M), tma_load(block_n)
    product, wait = wgmma(block_n, form), wgmma_wait(0)
    store = store_accumulators_bf16(block_n)
    fewer_registers = set_max_registers(40, increase=False)
    more_registers = set_max_registers(232, increase=True)

    @kernel(
        "global u8* map_a, global u8* map_b, global u32* out, u32 m, u32 n, u32 row_bytes",
        threads=THREADS,
        name=f"hopper_gemm_{form}_n{block_n}_s{stages}",
        shared_bytes=stages * stage_bytes + 16 * stages,
        min_cc=(9, 0),
    )
    def gemm(map_a, map_b, out, m, n, row_bytes):  # type: ignore[no-untyped-def]
        tiles = cuda.shared.array(0, np.uint8, alignment=1024)
        # The same memory: the barriers lie behind the stages, `full` before `empty`.
        bars = cuda.shared.array(0, np.uint64, alignment=1024)
        thread = np.uint32(cuda.threadIdx.x)
        group = np.uint32(thread >> np.uint32(7))
        if thread == np.uint32(0):
            for i in range(stages):
                mbarrier_init(bars, np.uint32(first_barrier + i), np.uint32(1))
                mbarrier_init(
                    bars, np.uint32(first_barrier + stages + i), np.uint32(_CONSUMER_WARPS)
                )
            fence_mbarrier_init()
        cuda.syncthreads()
        row_tiles = np.uint32(np.uint32(m + np.uint32(BLOCK_M - 1)) // np.uint32(BLOCK_M))
        column_tiles = np.uint32(np.uint32(n + np.uint32(block_n - 1)) // np.uint32(block_n))
        num_tiles = np.uint32(row_tiles * column_tiles)
        num_steps = np.uint32(np.uint32(row_bytes + np.uint32(TILE_BYTES - 1)) >> np.uint32(7))
        tile = np.uint32(cuda.blockIdx.x)
        stage = np.uint32(0)
        if group == np.uint32(2):
            fewer_registers()
            if thread == np.uint32(256):
                fence_tensor_map(map_a, np.uint64(0))
                fence_tensor_map(map_b, np.uint64(0))
                # New barriers run phase 0; the wait for the phase before it passes at once.
                parity = np.uint32(1)
                while tile < num_tiles:
                    column_tile = np.uint32(tile // row_tiles)
                    row_tile = np.uint32(tile - np.uint32(column_tile * row_tiles))
                    step = np.uint32(0)
                    while step < num_steps:
                        full = np.uint32(np.uint32(first_barrier) + stage)
                        mbarrier_wait(bars, np.uint32(full + np.uint32(stages)), parity)
                        mbarrier_arrive_expect(bars, full, np.uint32(stage_bytes))
                        a_place = np.uint32(stage * np.uint32(stage_bytes))
                        b_place = np.uint32(a_place + np.uint32(a_bytes))
                        column = np.int32(step * np.uint32(TILE_BYTES))
                        a_row = np.int32(row_tile * np.uint32(BLOCK_M))
                        b_row = np.int32(column_tile * np.uint32(block_n))
                        load_a(tiles, a_place, map_a, np.uint64(0), column, a_row, bars, full)
                        load_b(tiles, b_place, map_b, np.uint64(0), column, b_row, bars, full)
                        stage = np.uint32(stage + np.uint32(1))
                        if stage == np.uint32(stages):
                            stage = np.uint32(0)
                            parity = np.uint32(parity ^ np.uint32(1))
                        step = np.uint32(step + np.uint32(1))
                    tile = np.uint32(tile + np.uint32(cuda.gridDim.x))
        else:
            more_registers()
            lane = np.uint32(thread & np.uint32(31))
            warp = np.uint32(np.uint32(thread >> np.uint32(5)) & np.uint32(3))
            acc = cuda.local.array(accumulators, np.float32)
            parity = np.uint32(0)
            while tile < num_tiles:
                column_tile = np.uint32(tile // row_tiles)
                row_tile = np.uint32(tile - np.uint32(column_tile * row_tiles))
                step = np.uint32(0)
                while step < num_steps:
                    full = np.uint32(np.uint32(first_barrier) + stage)
                    mbarrier_wait(bars, full, parity)
                    b_place = np.uint32(
                        np.uint32(stage * np.uint32(stage_bytes)) + np.uint32(a_bytes)
                    )
                    a_place = np.uint32(
                        np.uint32(stage * np.uint32(stage_bytes))
                        + np.uint32(group * np.uint32(64 * TILE_BYTES))
                    )
                    wgmma_fence()
                    for i in unroll(range(TILE_BYTES // _STEP_BYTES)):
                        along_k = np.uint32(_STEP_BYTES * i)
                        # The first product does not add what the accumulators hold.
                        adds = np.uint32(np.uint32(step + np.uint32(i)) != np.uint32(0))
                        product(
                            acc,
                            tiles,
                            np.uint32(a_place + along_k),
                            tiles,
                            np.uint32(b_place + along_k),
                            adds,
                        )
                    wgmma_commit()
                    wait()
                    if lane == np.uint32(0):
                        mbarrier_arrive(bars, np.uint32(full + np.uint32(stages)))
                    stage = np.uint32(stage + np.uint32(1))
                    if stage == np.uint32(stages):
                        stage = np.uint32(0)
                        parity = np.uint32(parity ^ np.uint32(1))
                    step = np.uint32(step + np.uint32(1))
                row = np.uint32(
                    np.uint32(row_tile * np.uint32(BLOCK_M))
                    + np.uint32(group * np.uint32(64))
                    + np.uint32(warp * np.uint32(16))
                    + np.uint32(lane >> np.uint32(2))
                )
                first_column = np.uint32(
                    np.uint32(column_tile * np.uint32(block_n))
                    + np.uint32(np.uint32(lane & np.uint32(3)) * np.uint32(2))
                )
                rows = np.uint32(m - row) if row < m else np.uint32(0)
                columns = np.uint32(n - first_column) if first_column < n else np.uint32(0)
                at = np.uint64(np.uint64(row) * np.uint64(n) + np.uint64(first_column))
                pitch = np.uint32(n >> np.uint32(1))
                store(acc, out, np.uint64(at >> np.uint64(1)), pitch, rows, columns)
                tile = np.uint32(tile + np.uint32(cuda.gridDim.x))

    return gemm


@dataclass
class Problem:
    """Operands of one product.

    Attributes:
        form: type of a and b.
        a: bit patterns (m, k), u8 or u16.
        b: bit patterns (n, k).
        block_n: columns of the kernel's tiles.
    """

    form: Form
    a: np.ndarray[Any, Any]
    b: np.ndarray[Any, Any]
    block_n: int = 256

    @property
    def products(self) -> int:
        """Multiplications of two elements."""
        return int(self.a.shape[0] * self.b.shape[0] * self.a.shape[1])

    @property
    def tiles(self) -> int:
        """Tiles of the output, the most blocks that have something to do."""
        m, n = self.a.shape[0], self.b.shape[0]
        return int(-(-m // BLOCK_M) * -(-n // self.block_n))

    def sizes(self) -> tuple[np.uint32, np.uint32, np.uint32]:
        """The kernel's scalar arguments."""
        row_bytes = self.a.shape[1] * self.a.itemsize
        return np.uint32(self.a.shape[0]), np.uint32(self.b.shape[0]), np.uint32(row_bytes)

    def arguments(self) -> tuple[Any, ...]:
        """All arguments for the emulator: maps, an output of u32 with ones in all bits, sizes."""
        maps = self.maps(self.a.ctypes.data, self.b.ctypes.data, "emulator")
        out = np.full(self.a.shape[0] * self.b.shape[0] // 2, 0xFFFFFFFF, np.uint32)
        return (*maps, out, *self.sizes())

    def maps(
        self, a_address: int, b_address: int, target: Literal["gpu", "emulator"]
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The tensor maps of a and b at these addresses."""
        from nbmoe_kernels.device.tensor_map import encode_tensor_map

        m, n, row_bytes = (int(size) for size in self.sizes())
        return (
            encode_tensor_map(a_address, m, row_bytes, BLOCK_M, target=target),
            encode_tensor_map(b_address, n, row_bytes, self.block_n, target=target),
        )

    def expected(self) -> np.ndarray[Any, Any]:
        """The output's words, by Hopper's model."""
        from nbmoe_kernels.device import tensor_core

        step = getattr(tensor_core, f"step_{self.form}")
        total = np.zeros((self.a.shape[0], self.b.shape[0]), np.float32)
        k_step = _STEP_BYTES // self.a.itemsize
        for k in range(0, self.a.shape[1], k_step):
            part = slice(k, k + k_step)
            step(
                np.ascontiguousarray(self.a[:, part]), np.ascontiguousarray(self.b[:, part]), total
            )
        bits = total.view(np.uint32)
        odd = (bits >> 16) & 1
        rounded = ((bits + 0x7FFF + odd) >> 16).astype(np.uint16)
        rounded[np.isnan(total)] = 0x7FFF
        return rounded.reshape(-1).view(np.uint32)


def make_problem(
    m: int, n: int, k: int, form: Form = "e4m3", *, block_n: int = 256, seed: int = 0
) -> Problem:
    """A product of normally distributed numbers.

    Args:
        m: rows of a, any number.
        n: rows of b, even.
        k: elements of a row, a multiple of a wgmma's step (32 e4m3 or 16 others).
        form: type of the operands.
        block_n: columns of the kernel's tiles.
        seed: of the generator.
    """
    import ml_dtypes

    if k % (_STEP_BYTES // _ELEMENT_BYTES[form]) or n % 2:
        raise ValueError(f"make_problem: n must be even and k whole steps, got n={n}, k={k}")
    dtypes = {"e4m3": ml_dtypes.float8_e4m3fn, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
    rng = np.random.default_rng(seed)
    bits = np.uint8 if form == "e4m3" else np.uint16
    a, b = (rng.standard_normal((rows, k)).astype(dtypes[form]).view(bits) for rows in (m, n))
    return Problem(form, a, b, block_n)
