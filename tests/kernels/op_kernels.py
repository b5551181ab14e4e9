"""Small kernels in which ops that need memory and each other meet, each with its expected output.

A case is a function that returns a `Case`; the fast engine and a GPU run the same ones.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device import atomics, bulk, matrix, mbarrier, sync, tma, warp
from nbmoe_kernels.device.math import f32_bits
from nbmoe_kernels.device.op import unroll
from nbmoe_kernels.device.tensor_map import encode_tensor_map
from nbmoe_kernels.device.wgmma import wgmma, wgmma_commit, wgmma_fence, wgmma_wait
from nbmoe_kernels.kernel import Kernel, kernel
from tests.kernels.test_mma_twins import wgmma_tile
from tests.kernels.tiles import places, row_fragments


@dataclass
class Case:
    """A launch.

    Attributes:
        kernel: what to run.
        blocks: how many.
        arrays: its array arguments; an entry ``(name, box_rows)`` is the tensor map of an array.
        scalars: its scalar arguments, after the arrays.
        expected: what named arrays hold afterwards.
    """

    kernel: Kernel
    blocks: int
    arrays: dict[str, Any]
    scalars: tuple[Any, ...]
    expected: dict[str, np.ndarray]


def encode(array: np.ndarray, address: int, box_rows: int, target: Any) -> np.ndarray:
    """The map of a matrix of bytes at an address."""
    return encode_tensor_map(address, *array.shape, box_rows, target=target)


_load_transposed = matrix.load_matrices(4, transpose=True)
_store_four = matrix.store_matrices(4)


@kernel("global u32* source, global u32* out", threads=32, name="transposes", min_cc=(9, 0))
def transposes(source, out):
    words = cuda.shared.array(128, np.uint32, alignment=16)
    lane = np.uint32(cuda.threadIdx.x)
    for i in range(4):
        words[np.uint32(i * 32) + lane] = source[np.uint64(np.uint32(i * 32) + lane)]
    warp.sync_warp()
    r0, r1, r2, r3 = _load_transposed(words, np.uint32(lane * np.uint32(4)))
    warp.sync_warp()
    _store_four(words, np.uint32(lane * np.uint32(4)), r0, r1, r2, r3)
    warp.sync_warp()
    for i in range(4):
        out[np.uint64(np.uint32(i * 32) + lane)] = words[np.uint32(i * 32) + lane]


def transposes_case() -> Case:
    """Four 8 x 8 matrices of u16 are transposed on their way through registers."""
    held = np.random.default_rng(0).integers(0, 65536, (4, 8, 8)).astype(np.uint16)
    want = np.ascontiguousarray(held.transpose(0, 2, 1)).reshape(-1).view(np.uint32)
    arrays = {"source": held.reshape(-1).view(np.uint32), "out": np.zeros(128, np.uint32)}
    return Case(transposes, 1, arrays, (), {"out": want})


_bulk_wait = bulk.bulk_wait(0)
_BYTES = 4096


@kernel(
    "global u8* source, global u8* out",
    threads=128,
    name="inverts",
    shared_bytes=_BYTES + 16,
    min_cc=(9, 0),
)
def inverts(source, out):
    data = cuda.shared.array(0, np.uint8, alignment=128)
    words = cuda.shared.array(0, np.uint32, alignment=128)
    bars = cuda.shared.array(0, np.uint64, alignment=128)
    thread = np.uint32(cuda.threadIdx.x)
    bar = np.uint32(_BYTES // 8)
    start = np.uint64(np.uint32(cuda.blockIdx.x) * np.uint32(_BYTES))
    if thread == np.uint32(0):
        mbarrier.mbarrier_init(bars, bar, np.uint32(1))
        mbarrier.fence_mbarrier_init()
    cuda.syncthreads()
    if thread == np.uint32(0):
        mbarrier.mbarrier_arrive_expect(bars, bar, np.uint32(_BYTES))
        bulk.bulk_load(data, np.uint32(0), source, start, np.uint32(_BYTES), bars, bar)
    mbarrier.mbarrier_wait(bars, bar, np.uint32(0))
    for i in range(_BYTES // 512):
        at = np.uint32(np.uint32(i * 128) + thread)
        words[at] = np.uint32(words[at] ^ np.uint32(0xFFFFFFFF))
    sync.fence_proxy_async_shared()
    # Three warps leave after they have arrived; the first one waits for them.
    if thread >= np.uint32(32):
        sync.named_barrier_arrive(np.uint32(1), np.uint32(128))
    else:
        sync.named_barrier_sync(np.uint32(1), np.uint32(128))
        if thread == np.uint32(0):
            bulk.bulk_store(out, start, data, np.uint32(0), np.uint32(_BYTES))
            bulk.bulk_commit()
            _bulk_wait()


def inverts_case() -> Case:
    """Bulk copies in and out, an mbarrier and a named barrier."""
    source = np.random.default_rng(1).integers(0, 256, 3 * _BYTES).astype(np.uint8)
    arrays = {"source": source, "out": np.zeros(3 * _BYTES, np.uint8)}
    return Case(inverts, 3, arrays, (), {"out": ~source})


_load_box, _store_box = tma.tma_load(16), tma.tma_store(16)


@kernel(
    "global u8* source_map, global u8* target_map, i32 column, i32 row",
    threads=32,
    name="moves_a_box",
    shared_bytes=2048 + 16,
    min_cc=(9, 0),
)
def moves_a_box(source_map, target_map, column, row):
    data = cuda.shared.array(0, np.uint8, alignment=1024)
    bars = cuda.shared.array(0, np.uint64, alignment=1024)
    bar, zero = np.uint32(256), np.uint64(0)
    if np.uint32(cuda.threadIdx.x) == np.uint32(0):
        mbarrier.mbarrier_init(bars, bar, np.uint32(1))
        mbarrier.fence_mbarrier_init()
        tma.fence_tensor_map(source_map, zero)
        tma.fence_tensor_map(target_map, zero)
        mbarrier.mbarrier_arrive_expect(bars, bar, np.uint32(2048))
        _load_box(data, np.uint32(0), source_map, zero, column, row, bars, bar)
        mbarrier.mbarrier_wait(bars, bar, np.uint32(0))
        _store_box(target_map, zero, np.int32(16), np.int32(30), data, np.uint32(0))
        bulk.bulk_commit()
        _bulk_wait()


def moves_a_box_case() -> Case:
    """A box that reaches over the source's edges goes over the target's edge."""
    rng = np.random.default_rng(2)
    source, target = rng.integers(0, 256, (2, 40, 208)).astype(np.uint8)
    column, row = -48, 31
    box = np.zeros((16, 128), np.uint8)
    box[:9, 48:] = source[31:, :80]
    want = target.copy()
    want[30:, 16:144] = box[:10]
    arrays = {
        "source": source,
        "target": target,
        "source_map": ("source", 16),
        "target_map": ("target", 16),
    }
    scalars = (np.int32(column), np.int32(row))
    return Case(moves_a_box, 1, arrays, scalars, {"target": want})


_load_b = tma.tma_load(64)
_product, _product_wait = wgmma(64, "e4m3", a_in_registers=True), wgmma_wait(0)


@kernel(
    "global u8* b_map, global u32* a, global u32* out",
    threads=128,
    name="multiplies_registers",
    shared_bytes=8192 + 16,
    min_cc=(9, 0),
)
def multiplies_registers(b_map, a, out):
    data = cuda.shared.array(0, np.uint8, alignment=1024)
    bars = cuda.shared.array(0, np.uint64, alignment=1024)
    thread, bar, zero = np.uint32(cuda.threadIdx.x), np.uint32(1024), np.uint64(0)
    if thread == np.uint32(0):
        mbarrier.mbarrier_init(bars, bar, np.uint32(1))
        mbarrier.fence_mbarrier_init()
        tma.prefetch_tensor_map(b_map, zero)
    cuda.syncthreads()
    if sync.elect() != np.uint32(0) and thread < np.uint32(32):
        tma.fence_tensor_map(b_map, zero)
        mbarrier.mbarrier_arrive_expect(bars, bar, np.uint32(8192))
        _load_b(data, np.uint32(0), b_map, zero, np.int32(0), np.int32(0), bars, bar)
    acc = cuda.local.array(32, np.float32)
    for i in unroll(range(32)):
        acc[i] = np.float32(i)
    mbarrier.mbarrier_wait(bars, bar, np.uint32(0))
    for step in range(4):
        at = np.uint64(np.uint32(step * 512) + thread)
        a0, a1 = a[at], a[np.uint64(at + np.uint64(128))]
        a2, a3 = a[np.uint64(at + np.uint64(256))], a[np.uint64(at + np.uint64(384))]
        wgmma_fence()
        # The first step does not add what the accumulators hold.
        scale = np.uint32(step > 0)
        _product(acc, a0, a1, a2, a3, data, np.uint32(32 * step), scale)
        wgmma_commit()
        _product_wait()
    for i in unroll(range(32)):
        out[np.uint64(np.uint32(i * 128) + thread)] = f32_bits(acc[i])


def multiplies_registers_case() -> Case:
    """wgmma with A in registers; the expected bytes are those with A in shared memory."""
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 0x7F, (2, 64, 128)).astype(np.uint8)
    a ^= rng.integers(0, 2, a.shape).astype(np.uint8) << 7
    words = [row_fragments(np.ascontiguousarray(a[:, k : k + 32])) for k in range(0, 128, 32)]
    tile = wgmma_tile("e4m3", "shared", a, b, None)
    row, column = places(128, 64)
    arrays = {
        "b": b,
        "b_map": ("b", 64),
        "a": np.concatenate([np.concatenate(step) for step in words]),
        "out": np.zeros(32 * 128, np.uint32),
    }
    return Case(multiplies_registers, 1, arrays, (), {"out": tile[row, column].T.reshape(-1)})


_arrive = atomics.atomic("add", order="acq_rel")
_peak = atomics.reduction("max", "u64")
_total = atomics.reduction("add", "u32", space="shared", scope="cta")
_swap = atomics.compare_and_swap(order="acquire", scope="gpu")
_wait = atomics.wait_ge()


@kernel(
    "global u32* counter, global u64* peak, global u32* lock, global u32* out",
    threads=64,
    name="takes_turns",
)
def takes_turns(counter, peak, lock, out):
    total = cuda.shared.array(1, np.uint32)
    thread, zero = np.uint32(cuda.threadIdx.x), np.uint64(0)
    # Later blocks go first.
    turn = np.uint32(cuda.gridDim.x - cuda.blockIdx.x - 1)
    _wait(counter, zero, np.uint32(turn * np.uint32(64)))
    if thread == np.uint32(0):
        total[np.uint32(0)] = np.uint32(0)
        # Nobody else's turn: the lock is free.
        out[np.uint64(2 * turn)] = _swap(lock, zero, turn, np.uint32(turn + np.uint32(1)))
    cuda.syncthreads()
    _total(total, np.uint32(0), np.uint32(thread + turn))
    _peak(peak, zero, np.uint64(np.uint64(turn) * np.uint64(1 << 33)))
    cuda.syncthreads()
    if thread == np.uint32(0):
        out[np.uint64(np.uint32(2 * turn) + np.uint32(1))] = total[np.uint32(0)]
    cuda.syncthreads()
    _arrive(counter, zero, np.uint32(1))


def takes_turns_case() -> Case:
    """Blocks wait for each other with acquire and release, in reverse order."""
    blocks = 4
    out = [n for turn in range(blocks) for n in (turn, 63 * 32 + 64 * turn)]
    arrays = {
        "counter": np.zeros(1, np.uint32),
        "peak": np.zeros(1, np.uint64),
        "lock": np.zeros(1, np.uint32),
        "out": np.full(2 * blocks, 99, np.uint32),
    }
    expected = {
        "counter": np.array([64 * blocks], np.uint32),
        "peak": np.array([(blocks - 1) << 33], np.uint64),
        "lock": np.array([blocks], np.uint32),
        "out": np.array(out, np.uint32),
    }
    return Case(takes_turns, blocks, arrays, (), expected)


CASES = (
    transposes_case,
    inverts_case,
    moves_a_box_case,
    multiplies_registers_case,
    takes_turns_case,
)
