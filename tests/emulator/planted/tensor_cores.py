"""wgmma: a warpgroup's product runs on its own, reads shared memory and owns the accumulators.

All cases multiply a 64 x 16 by a 16 x 8 matrix of f16. Operands lie in rows of 128 bytes whose
16-byte pieces are swizzled: piece i of row r is at place i ^ (r % 8).
"""

import numpy as np
from numba import cuda, float32, uint8, uint32

from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.device.sync import fence_proxy_async_shared
from nbmoe_kernels.device.wgmma import wgmma, wgmma_commit, wgmma_fence, wgmma_wait
from tests.emulator.planted.case import case

multiply = wgmma(8, "f16")
wait_all, wait_all_but_1 = wgmma_wait(0), wgmma_wait(1)
A_BYTES, TILE_BYTES = 64 * 128, 72 * 128


def _args():
    random = np.random.default_rng(9)
    a = random.integers(-4, 5, (64, 16)).astype(np.float16)
    b = random.integers(-4, 5, (8, 16)).astype(np.float16)
    return a.view(np.uint8), b.view(np.uint8), np.zeros((64, 8), np.float32)


def _product(a, b, out):
    return {2: a.view(np.float16).astype(np.float32) @ b.view(np.float16).astype(np.float32).T}


@device_function
def store_piece(tile, t, source):
    """Thread t stores 16 bytes: piece t % 2 of row t // 2."""
    row, piece = t // 2, t % 2
    at = 128 * row + 16 * (piece ^ (row % 8))
    for i in range(16):
        tile[at + i] = source[row, 16 * piece + i]  # BUG-A of operands_without_*


@device_function
def store_fragment(out, t, acc):
    """Each thread holds two rows of two columns."""
    row, column = 16 * (t // 32) + t % 32 // 4, 2 * (t % 4)
    for i in range(4):
        out[row + 8 * (i // 2), column + i % 2] = acc[i]


@case("ASYNC_UNWAITED", block=128, args=_args, want=_product)
def accumulators_read_too_early(bug):
    """The accumulators are stored while the product is under way."""

    def kernel(a, b, out):
        tile = cuda.shared.array(TILE_BYTES, uint8, alignment=1024)
        acc = cuda.local.array(4, float32)
        t = cuda.threadIdx.x
        store_piece(tile, t, a)
        if t < 16:
            store_piece(tile[A_BYTES:], t, b)
        fence_proxy_async_shared()
        cuda.syncthreads()
        for i in range(4):
            acc[i] = float32(0)
        wgmma_fence()
        multiply(acc, tile, 0, tile, A_BYTES, uint32(1))  # BUG-A
        wgmma_commit()
        if not bug:
            wait_all()
        store_fragment(out, t, acc)
        wait_all()

    return kernel


@case("ASYNC_UNWAITED", block=128, args=_args, want=_product)
def product_without_commit(bug):
    """A product that no commit has closed is covered by no wait."""

    def kernel(a, b, out):
        tile = cuda.shared.array(TILE_BYTES, uint8, alignment=1024)
        acc = cuda.local.array(4, float32)
        t = cuda.threadIdx.x
        store_piece(tile, t, a)
        if t < 16:
            store_piece(tile[A_BYTES:], t, b)
        fence_proxy_async_shared()
        cuda.syncthreads()
        for i in range(4):
            acc[i] = float32(0)
        wgmma_fence()
        multiply(acc, tile, 0, tile, A_BYTES, uint32(1))  # BUG-A
        if not bug:
            wgmma_commit()
        wait_all()
        store_fragment(out, t, acc)
        wait_all()

    return kernel


@case("ASYNC_UNWAITED", block=128, args=_args, want=_product)
def product_wait_leaves_one_group(bug):
    """wait_group 1 leaves the only group open."""
    wait = wait_all_but_1 if bug else wait_all

    def kernel(a, b, out):
        tile = cuda.shared.array(TILE_BYTES, uint8, alignment=1024)
        acc = cuda.local.array(4, float32)
        t = cuda.threadIdx.x
        store_piece(tile, t, a)
        if t < 16:
            store_piece(tile[A_BYTES:], t, b)
        fence_proxy_async_shared()
        cuda.syncthreads()
        for i in range(4):
            acc[i] = float32(0)
        wgmma_fence()
        multiply(acc, tile, 0, tile, A_BYTES, uint32(1))  # BUG-A
        wgmma_commit()
        wait()
        store_fragment(out, t, acc)
        wait_all()

    return kernel


@case("WGMMA_FENCE", block=128, args=_args, want=_product)
def registers_without_fence(bug):
    """The accumulators are cleared by ordinary code, which wgmma.fence has to order."""

    def kernel(a, b, out):
        tile = cuda.shared.array(TILE_BYTES, uint8, alignment=1024)
        acc = cuda.local.array(4, float32)
        t = cuda.threadIdx.x
        store_piece(tile, t, a)
        if t < 16:
            store_piece(tile[A_BYTES:], t, b)
        fence_proxy_async_shared()
        cuda.syncthreads()
        for i in range(4):
            acc[i] = float32(0)
        if not bug:
            wgmma_fence()
        multiply(acc, tile, 0, tile, A_BYTES, uint32(1))  # BUG-A
        wgmma_commit()
        wait_all()
        store_fragment(out, t, acc)
        wait_all()

    return kernel


@case("RACE_PROXY", block=128, args=_args, want=_product)
def operands_without_proxy_fence(bug):
    """The operands were stored by threads; wgmma reads through the async proxy."""

    def kernel(a, b, out):
        tile = cuda.shared.array(TILE_BYTES, uint8, alignment=1024)
        acc = cuda.local.array(4, float32)
        t = cuda.threadIdx.x
        store_piece(tile, t, a)
        if t < 16:
            store_piece(tile[A_BYTES:], t, b)
        if not bug:
            fence_proxy_async_shared()
        cuda.syncthreads()
        for i in range(4):
            acc[i] = float32(0)
        wgmma_fence()
        multiply(acc, tile, 0, tile, A_BYTES, uint32(1))  # BUG-B
        wgmma_commit()
        wait_all()
        store_fragment(out, t, acc)
        wait_all()

    return kernel


@case("RACE_RAW", also=("UNINIT_READ", "RACE_WAR"), block=128, args=_args, want=_product)
def operands_without_barrier(bug):
    """A warp starts the product before the other warps have stored their rows."""

    def kernel(a, b, out):
        tile = cuda.shared.array(TILE_BYTES, uint8, alignment=1024)
        acc = cuda.local.array(4, float32)
        t = cuda.threadIdx.x
        store_piece(tile, t, a)
        if t < 16:
            store_piece(tile[A_BYTES:], t, b)
        fence_proxy_async_shared()
        if not bug:
            cuda.syncthreads()
        for i in range(4):
            acc[i] = float32(0)
        wgmma_fence()
        multiply(acc, tile, 0, tile, A_BYTES, uint32(1))  # BUG-B
        wgmma_commit()
        wait_all()
        store_fragment(out, t, acc)
        wait_all()

    return kernel


@case("RACE_WAR", also=("ASYNC_UNWAITED",), block=128, args=_args, want=_product)
def operands_overwritten(bug):
    """The next tile is stored before the product has read this one."""

    def kernel(a, b, out):
        tile = cuda.shared.array(TILE_BYTES, uint8, alignment=1024)
        acc = cuda.local.array(4, float32)
        t = cuda.threadIdx.x
        store_piece(tile, t, a)
        if t < 16:
            store_piece(tile[A_BYTES:], t, b)
        fence_proxy_async_shared()
        cuda.syncthreads()
        for i in range(4):
            acc[i] = float32(0)
        wgmma_fence()
        multiply(acc, tile, 0, tile, A_BYTES, uint32(1))  # BUG-A
        wgmma_commit()
        if not bug:
            wait_all()
            cuda.syncthreads()
        tile[64 * t] = 0  # BUG-B
        wait_all()
        store_fragment(out, t, acc)
        wait_all()

    return kernel
