"""cp.async: a copy runs on its own until a wait of its thread covers the group that it belongs to.

What a wait has covered is visible to the waiting thread; the others need a barrier after it.
"""

import numpy as np
from numba import cuda, uint32, uint64

from nbmoe_kernels.device.memory import cp_async, cp_async_commit, cp_async_wait
from tests.emulator.planted.case import case, ramp, zeros

copy_4 = cp_async(4)
wait_all, wait_all_but_1, wait_all_but_2 = cp_async_wait(0), cp_async_wait(1), cp_async_wait(2)
FOUR = np.uint32(4)


def _one_tile_args():
    return ramp(128, dtype=np.uint8), zeros(32, dtype=np.uint32)


def _same(x, out):
    return {1: x.view(np.uint32)}


def _mirrored(x, out):
    return {1: x.view(np.uint32)[::-1]}


@case("RACE_RAW", also=("ASYNC_UNWAITED",), block=32, args=_one_tile_args, want=_same)
def read_without_wait(bug):
    """Committed is not complete."""

    def kernel(x, out):
        tile = cuda.shared.array(32, uint32)
        t = cuda.threadIdx.x
        copy_4(tile, uint32(t), x, uint64(4 * t), FOUR)  # BUG-A
        cp_async_commit()
        if not bug:
            wait_all()
        out[t] = tile[t]  # BUG-B

    return kernel


@case("RACE_RAW", also=("ASYNC_UNWAITED",), block=32, args=_one_tile_args, want=_same)
def commit_forgotten(bug):
    """A copy that no commit has put into a group is covered by no wait."""

    def kernel(x, out):
        tile = cuda.shared.array(32, uint32)
        t = cuda.threadIdx.x
        copy_4(tile, uint32(t), x, uint64(4 * t), FOUR)  # BUG-A
        if not bug:
            cp_async_commit()
        wait_all()
        out[t] = tile[t]  # BUG-B

    return kernel


@case("RACE_RAW", also=("ASYNC_UNWAITED",), block=32, args=_one_tile_args, want=_same)
def wait_leaves_one_group(bug):
    """wait_group 1 right after the only commit waits for nothing."""

    wait = wait_all_but_1 if bug else wait_all

    def kernel(x, out):
        tile = cuda.shared.array(32, uint32)
        t = cuda.threadIdx.x
        copy_4(tile, uint32(t), x, uint64(4 * t), FOUR)  # BUG-A
        cp_async_commit()
        wait()
        out[t] = tile[t]  # BUG-B

    return kernel


@case(
    "RACE_RAW",
    also=("UNINIT_READ",),
    args=lambda: (ramp(256, dtype=np.uint8), zeros(64, dtype=np.uint32)),
    want=_mirrored,
)
def waited_but_no_barrier(bug):
    """Each thread has waited for its own copy, and reads another thread's."""

    def kernel(x, out):
        tile = cuda.shared.array(64, uint32)
        t = cuda.threadIdx.x
        copy_4(tile, uint32(t), x, uint64(4 * t), FOUR)  # BUG-A
        cp_async_commit()
        wait_all()
        if not bug:
            cuda.syncthreads()
        out[t] = tile[63 - t]  # BUG-B

    return kernel


@case(
    "RACE_RAW",
    also=("UNINIT_READ",),
    args=lambda: (ramp(256, dtype=np.uint8), zeros(64, dtype=np.uint32)),
    want=_mirrored,
)
def barrier_before_the_wait(bug):
    """The right two lines in the wrong order: the barrier publishes copies still in flight."""

    def kernel(x, out):
        tile = cuda.shared.array(64, uint32)
        t = cuda.threadIdx.x
        copy_4(tile, uint32(t), x, uint64(4 * t), FOUR)  # BUG-A
        cp_async_commit()
        if bug:
            cuda.syncthreads()
            wait_all()
        else:
            wait_all()
            cuda.syncthreads()
        out[t] = tile[63 - t]  # BUG-B

    return kernel


@case(
    "RACE_WAR",
    block=32,
    args=lambda: (ramp(32, dtype=np.uint32).view(np.uint8), zeros(32, dtype=np.uint32)),
    want=_same,
)
def source_overwritten_in_flight(bug):
    """The source is cleared before the copy has read it."""

    def kernel(x, out):
        tile = cuda.shared.array(32, uint32)
        t = cuda.threadIdx.x
        copy_4(tile, uint32(t), x, uint64(4 * t), FOUR)  # BUG-A
        cp_async_commit()
        if not bug:
            wait_all()
        for i in range(4):
            x[4 * t + i] = 0  # BUG-B
        wait_all()
        out[t] = tile[t]

    return kernel


@case(
    "RACE_WAW",
    block=32,
    args=_one_tile_args,
    want=lambda x, out: {1: np.where(np.arange(32) % 2, 0, x.view(np.uint32))},
)
def destination_written_in_flight(bug):
    """A word is cleared while a copy to it is under way: which one lands last?"""

    def kernel(x, out):
        tile = cuda.shared.array(32, uint32)
        t = cuda.threadIdx.x
        copy_4(tile, uint32(t), x, uint64(4 * t), FOUR)  # BUG-A
        cp_async_commit()
        if not bug:
            wait_all()
        if t % 2 == 1:
            tile[t] = 0  # BUG-B
        wait_all()
        out[t] = tile[t]

    return kernel


@case(
    "RACE_WAW",
    block=32,
    args=lambda: (ramp(256, dtype=np.uint8), zeros(32, dtype=np.uint32)),
    want=lambda x, out: {1: x.view(np.uint32)[32:]},
)
def two_copies_to_one_place(bug):
    """Copies in flight have no order, not even those of one thread."""

    def kernel(x, out):
        tile = cuda.shared.array(32, uint32)
        t = cuda.threadIdx.x
        copy_4(tile, uint32(t), x, uint64(4 * t), FOUR)  # BUG-A
        cp_async_commit()
        if not bug:
            wait_all()
        copy_4(tile, uint32(t), x, uint64(128 + 4 * t), FOUR)  # BUG-B
        cp_async_commit()
        wait_all()
        out[t] = tile[t]

    return kernel


@case("ASYNC_UNWAITED", block=32, args=_one_tile_args, want=lambda x, out: {1: [1] * 32})
def never_waited_for(bug):
    """The kernel ends while its last, superfluous copy is in flight."""

    def kernel(x, out):
        tile = cuda.shared.array(32, uint32)
        t = cuda.threadIdx.x
        copy_4(tile, uint32(t), x, uint64(4 * t), FOUR)  # BUG-A
        cp_async_commit()
        if not bug:
            wait_all()
        out[t] = 1

    return kernel


def _tiles_args():
    return ramp(6, 64, dtype=np.uint32).reshape(-1).view(np.uint8), zeros(64, dtype=np.uint32)


def _tiles_sum(x, out):
    return {1: x.view(np.uint32).reshape(6, 64)[:, ::-1].sum(axis=0)}


@case(
    "RACE_RAW",
    also=("RACE_RAW", "RACE_WAR", "ASYNC_UNWAITED"),
    args=_tiles_args,
    want=_tiles_sum,
)
def pipeline_wait_off_by_one(bug):
    """Two groups may stay open where one may."""
    wait = wait_all_but_2 if bug else wait_all_but_1

    def kernel(x, out):
        tile = cuda.shared.array((3, 64), uint32)
        words = tile.reshape(3 * 64)
        t = cuda.threadIdx.x
        total = uint32(0)
        copy_4(words, uint32(t), x, uint64(4 * t), FOUR)
        cp_async_commit()
        for k in range(6):
            if k + 1 < 6:
                at = 64 * ((k + 1) % 3) + t
                copy_4(words, uint32(at), x, uint64(256 * (k + 1) + 4 * t), FOUR)  # BUG-A
            cp_async_commit()
            wait()
            cuda.syncthreads()
            total += tile[k % 3, 63 - t]  # BUG-B
            cuda.syncthreads()
        wait_all()
        out[t] = total

    return kernel


@case(
    "RACE_WAR",
    also=("RACE_RAW",),
    args=_tiles_args,
    want=_tiles_sum,
)
def pipeline_no_barrier_at_the_end(bug):
    """With two stages the next copy may land on a stage that is still being read."""

    def kernel(x, out):
        tile = cuda.shared.array((2, 64), uint32)
        words = tile.reshape(2 * 64)
        t = cuda.threadIdx.x
        total = uint32(0)
        copy_4(words, uint32(t), x, uint64(4 * t), FOUR)
        cp_async_commit()
        for k in range(6):
            if k + 1 < 6:
                at = 64 * ((k + 1) % 2) + t
                copy_4(words, uint32(at), x, uint64(256 * (k + 1) + 4 * t), FOUR)  # BUG-B
            cp_async_commit()
            wait_all_but_1()
            cuda.syncthreads()
            total += tile[k % 2, 63 - t]  # BUG-A
            if not bug:
                cuda.syncthreads()
        wait_all()
        out[t] = total

    return kernel


@case(
    "RACE_RAW",
    also=("RACE_WAR", "RACE_WAW", "UNINIT_READ"),
    args=_tiles_args,
    want=_tiles_sum,
)
def pipeline_prefetch_into_own_stage(bug):
    """The next tile is fetched to the stage that is read now."""

    def kernel(x, out):
        tile = cuda.shared.array((3, 64), uint32)
        words = tile.reshape(3 * 64)
        t = cuda.threadIdx.x
        total = uint32(0)
        copy_4(words, uint32(t), x, uint64(4 * t), FOUR)
        cp_async_commit()
        for k in range(6):
            if k + 1 < 6:
                at = 64 * (k % 3 if bug else (k + 1) % 3) + t
                copy_4(words, uint32(at), x, uint64(256 * (k + 1) + 4 * t), FOUR)  # BUG-A
            cp_async_commit()
            wait_all_but_1()
            cuda.syncthreads()
            total += tile[k % 3, 63 - t]  # BUG-B
            cuda.syncthreads()
        wait_all()
        out[t] = total

    return kernel


@case(
    "RACE_RAW",
    also=("UNINIT_READ",),
    args=_tiles_args,
    want=_tiles_sum,
)
def pipeline_without_empty_commits(bug):
    """No commit at the end of K, so the last wait leaves the last real group open."""

    def kernel(x, out):
        tile = cuda.shared.array((3, 64), uint32)
        words = tile.reshape(3 * 64)
        t = cuda.threadIdx.x
        total = uint32(0)
        copy_4(words, uint32(t), x, uint64(4 * t), FOUR)
        cp_async_commit()
        for k in range(6):
            if k + 1 < 6:
                at = 64 * ((k + 1) % 3) + t
                copy_4(words, uint32(at), x, uint64(256 * (k + 1) + 4 * t), FOUR)  # BUG-A
            if not bug or k + 1 < 6:
                cp_async_commit()
            wait_all_but_1()
            cuda.syncthreads()
            total += tile[k % 3, 63 - t]  # BUG-B
            cuda.syncthreads()
        wait_all()
        out[t] = total

    return kernel
