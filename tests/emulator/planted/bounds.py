"""Indices outside of an array. NumPy and Numba take -1 for the last element; kernels must not."""

import numpy as np
from numba import cuda, int32, uint8, uint32

from nbmoe_kernels.device.memory import cp_async, cp_async_commit, cp_async_wait, load_v4, store_v2
from tests.emulator.planted.case import case, ramp, zeros

copy_8, copy_16 = cp_async(8), cp_async(16)
wait_all = cp_async_wait(0)


@case(
    "OOB_WRITE",
    also=("OOB_READ",),
    grid=2,
    args=lambda: (ramp(100), zeros(100)),
    want=lambda x, out: {1: x + 1},
)
def partial_last_block(bug):
    """100 elements, 128 threads, no guard."""

    def kernel(x, out):
        i = cuda.grid(1)
        if bug or i < out.size:
            value = x[i] if i < x.size else 0
            out[i] = value + 1  # BUG-A

    return kernel


@case("OOB_READ", args=lambda: (ramp(64, 10), zeros(64)), want=lambda x, out: {1: x.sum(axis=1)})
def tail_of_k(bug):
    """K = 10 is walked in steps of 4: the last step reads past the row's end."""

    def kernel(x, out):
        t = cuda.threadIdx.x
        total = int32(0)
        for step in range(3):
            for i in range(4):
                k = 4 * step + i
                if bug or k < x.shape[1]:
                    total += x[t, k]  # BUG-A
        out[t] = total

    return kernel


@case(
    "OOB_READ",
    block=4,
    args=lambda: (np.array([0, 3, 3, 10], np.uint32), zeros(4, dtype=np.uint32)),
    want=lambda starts, counts: {1: [3, 0, 7, 0]},
)
def starts_without_the_end(bug):
    """An expert's rows end where the next one's start; the last expert has no next one."""

    def kernel(starts, counts):
        e = cuda.threadIdx.x
        if e < (4 if bug else 3):
            counts[e] = starts[e + 1] - starts[e]  # BUG-A

    return kernel


@case(
    "OOB_WRITE",
    block=128,
    args=lambda: (ramp(70, dtype=np.uint8), zeros(70, dtype=np.uint8)),
    want=lambda x, out: {1: x},
)
def rows_padded_to_the_tile(bug):
    """All 128 rows of a scale tile are stored, but the array has the real rows only."""

    def kernel(x, out):
        row = cuda.threadIdx.x
        value = uint8(0)
        if row < x.size:
            value = x[row]
        if bug or row < out.size:
            out[row] = value  # BUG-A

    return kernel


@case(
    "OOB_NEGATIVE", args=lambda: (ramp(64), zeros(64)), want=lambda x, out: {1: x[[0, *range(63)]]}
)
def negative_halo(bug):
    """The first element's left neighbour; Python's rule would quietly take the last element."""

    def kernel(x, out):
        t = cuda.threadIdx.x
        left = t - 1 if bug else max(t - 1, 0)
        out[t] = x[left]  # BUG-A

    return kernel


@case(
    "OOB_READ",
    args=lambda: (ramp(32, dtype=np.uint8), zeros(64, dtype=np.uint8)),
    want=lambda packed, out: {1: np.stack([packed & 15, packed >> 4], 1).ravel()},
)
def nibble_index_for_byte_index(bug):
    """Two codes a byte: element i is in byte i // 2, not in byte i."""

    def kernel(packed, out):
        i = cuda.threadIdx.x
        byte = packed[i if bug else i // 2]  # BUG-A
        out[i] = byte >> 4 if i % 2 else byte & 15

    return kernel


@case(
    "OOB_NEGATIVE",
    block=32,
    args=lambda: (ramp(32), np.int32(2), np.int32(1 << 30), np.int64(1 << 31), zeros(32)),
    want=lambda x, row, stride, first, out: {4: x},
)
def row_times_stride_wraps(bug):
    """row * stride in 32 bits; x is the part of a tensor from its element 2^31 on."""

    def kernel(x, row, stride, first, out):
        t = cuda.threadIdx.x
        if bug:
            start = np.int64(int32(row * stride))
        else:
            start = np.int64(row) * np.int64(stride)
        out[t] = x[start - first + t]  # BUG-A

    return kernel


@case(
    "OOB_NEGATIVE",
    block=4,
    args=lambda: (np.array([0, 2, -1, 1], np.int32), np.float32([1, 2, 3]), zeros(4)),
    want=lambda ids, scales, out: {2: [1, 3, 0, 2]},
)
def masked_expert_as_index(bug):
    """Expert id -1 means "none"; as an index it is the last expert."""

    def kernel(ids, scales, out):
        t = cuda.threadIdx.x
        expert = ids[t]
        if bug or expert >= 0:
            out[t] = int32(scales[expert])  # BUG-A

    return kernel


@case(
    "MISALIGNED",
    block=4,
    args=lambda: (ramp(20, dtype=np.uint32), zeros(4, dtype=np.uint32)),
    want=lambda x, out: {1: x[:16].reshape(4, 4).sum(axis=1)},
)
def vector_load_off_by_one_word(bug):
    """A 16-byte load needs an address that is a multiple of 16."""

    def kernel(x, out):
        t = cuda.threadIdx.x
        at = np.uint64(4 * t)
        if bug:
            at += np.uint64(1)
        a, b, c, d = load_v4(x, at)  # BUG-A
        out[t] = uint32(uint32(a + b) + uint32(c + d))

    return kernel


@case(
    "MISALIGNED",
    block=4,
    args=lambda: (ramp(96, dtype=np.uint8), zeros(4, 4, dtype=np.uint32)),
    want=lambda x, out: {1: x.reshape(4, 24)[:, :16].copy().view(np.uint32)},
)
def copy_of_unaligned_rows(bug):
    """Rows of 24 bytes start at multiples of 8: too little for a copy of 16 bytes."""

    def kernel(x, out):
        tile = cuda.shared.array(16, uint32, alignment=16)
        t = cuda.threadIdx.x
        word, byte = uint32(4 * t), np.uint64(24 * t)
        if bug:
            copy_16(tile, word, x, byte, uint32(16))  # BUG-A
        else:
            copy_8(tile, word, x, byte, uint32(8))
            copy_8(tile, uint32(word + uint32(2)), x, byte + np.uint64(8), uint32(8))
        cp_async_commit()
        wait_all()
        for i in range(4):
            out[t, i] = tile[4 * t + i]

    return kernel


@case(
    "OOB_WRITE",
    args=lambda: (ramp(64), zeros(64)),
    want=lambda x, out: {1: x[::-1]},
)
def shared_array_too_small(bug):
    """The block has grown; the array in shared memory has not."""

    size = 32 if bug else 64

    def kernel(x, out):
        part = cuda.shared.array(size, int32)
        t = cuda.threadIdx.x
        part[t] = x[t]  # BUG-A
        cuda.syncthreads()
        if 63 - t < size:
            out[t] = part[63 - t]

    return kernel


@case(
    "OOB_WRITE",
    shared_bytes=256,
    args=lambda: (ramp(64), zeros(64)),
    want=lambda x, out: {1: x + x[::-1]},
)
def dynamic_shared_too_small(bug):
    """Two arrays are carved from dynamic shared memory; the launch gives room for one."""

    def kernel(x, out):
        memory = cuda.shared.array(0, int32)
        t = cuda.threadIdx.x
        second = 64 if bug else 0
        memory[second + t] = x[t]  # BUG-A
        cuda.syncthreads()
        out[t] = x[t] + memory[second + 63 - t]

    return kernel


@case(
    "OOB_WRITE",
    block=1,
    args=lambda: (ramp(9), zeros(1)),
    want=lambda x, out: {1: [x.max()]},
)
def local_array_too_small(bug):
    """A thread keeps a sorted list of the best in registers, one place too short."""

    def kernel(x, out):
        best = cuda.local.array(8, int32)
        for i in range(8):
            best[i] = 0
        for i in range(9 if bug else 8):
            best[i] = x[i]  # BUG-A
        largest = x[8]
        for i in range(8):
            largest = max(largest, best[i])
        out[0] = largest

    return kernel


@case(
    "OOB_WRITE",
    block=4,
    args=lambda: (ramp(8, dtype=np.uint32), zeros(8, dtype=np.uint32)),
    want=lambda x, out: {1: x},
)
def vector_store_past_the_end(bug):
    """A two-word store whose second word is past the array's end."""

    def kernel(x, out):
        t = cuda.threadIdx.x
        first = 2 * t
        if bug and t == 3:
            store_v2(out, np.uint64(first + 2), x[first], x[first + 1])  # BUG-A
        else:
            store_v2(out, np.uint64(first), x[first], x[first + 1])

    return kernel


@case(
    "OOB_READ",
    block=(8, 8),
    args=lambda: (ramp(8, 6), zeros(6, 8)),
    want=lambda x, out: {1: x.T},
)
def transposed_extents(bug):
    """The guard compares the row with the number of columns, and the other way round."""

    def kernel(x, out):
        row, column = cuda.threadIdx.y, cuda.threadIdx.x
        if bug:
            inside = row < x.shape[1] and column < x.shape[0]
        else:
            inside = row < x.shape[0] and column < x.shape[1]
        if inside:
            value = x[row, column]  # BUG-A
            if column < out.shape[0]:
                out[column, row] = value

    return kernel


@case(
    "OOB_WRITE",
    block=32,
    args=lambda: (ramp(32), zeros(8)),
    want=lambda x, out: {1: np.bincount(x % 8, minlength=8)},
)
def atomic_past_the_end(bug):
    """A histogram with one bin too few: value 8 of an inclusive range."""

    def kernel(x, out):
        t = cuda.threadIdx.x
        which = x[t] % (9 if bug else 8)
        cuda.atomic.add(out, which, 1)  # BUG-A

    return kernel
