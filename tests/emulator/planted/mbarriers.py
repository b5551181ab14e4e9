"""The protocol of mbarriers: counts, parities, phases.

A barrier's phase completes when its arrivals have come. `mbarrier_wait(bar, i, parity)` goes on
once the phase of that parity is complete, so a new barrier lets parity 1 pass at once.
"""

from numba import cuda, int32, uint32, uint64

from nbmoe_kernels.device.mbarrier import (
    mbarrier_arrive,
    mbarrier_arrive_count,
    mbarrier_init,
    mbarrier_invalidate,
    mbarrier_wait,
)
from nbmoe_kernels.device.warp import sync_warp
from tests.emulator.planted.case import case, ramp, zeros


def _exchange_args():
    return ramp(64), zeros(64)


def _reversed(x, out):
    return {1: x[::-1]}


@case("DEADLOCK", args=_exchange_args, want=_reversed)
def count_too_large(bug):
    """65 arrivals are expected of 64 threads."""

    def kernel(x, out):
        bar = cuda.shared.array(1, uint64)
        part = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(bar, 0, uint32(65 if bug else 64))
        cuda.syncthreads()
        part[t] = x[t]
        mbarrier_arrive(bar, 0)
        mbarrier_wait(bar, 0, uint32(0))  # BUG-A
        out[t] = part[63 - t]

    return kernel


@case(
    "RACE_RAW",
    also=("UNINIT_READ",),
    args=_exchange_args,
    want=_reversed,
)
def count_too_small(bug):
    """The phase completes with 63 arrivals; the last one is counted for the next phase."""

    def kernel(x, out):
        bar = cuda.shared.array(1, uint64)
        part = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(bar, 0, uint32(63 if bug else 64))
        cuda.syncthreads()
        part[t] = x[t]  # BUG-A
        mbarrier_arrive(bar, 0)
        mbarrier_wait(bar, 0, uint32(0))
        out[t] = part[63 - t]  # BUG-B

    return kernel


@case(
    "MBAR_PHASE",
    also=("RACE_RAW", "RACE_WAR", "UNINIT_READ", "MBAR_COUNT", "DEADLOCK"),
    args=_exchange_args,
    want=_reversed,
)
def every_lane_arrives(bug):
    """One arrival a warp is expected, and each of its 32 lanes arrives."""

    def kernel(x, out):
        bar = cuda.shared.array(1, uint64)
        part = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(bar, 0, uint32(2))
        cuda.syncthreads()
        part[t] = x[t]
        sync_warp()
        if bug or t % 32 == 0:
            mbarrier_arrive(bar, 0)  # BUG-A
        mbarrier_wait(bar, 0, uint32(0))
        out[t] = part[63 - t]

    return kernel


@case(
    "RACE_RAW",
    also=("UNINIT_READ", "DEADLOCK"),
    args=_exchange_args,
    want=_reversed,
)
def first_wait_on_parity_one(bug):
    """Parity 1 is the phase before the first: the wait does not wait."""

    def kernel(x, out):
        bar = cuda.shared.array(1, uint64)
        part = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(bar, 0, uint32(64))
        cuda.syncthreads()
        part[t] = x[t]  # BUG-A
        mbarrier_arrive(bar, 0)
        mbarrier_wait(bar, 0, uint32(1 if bug else 0))
        out[t] = part[63 - t]  # BUG-B

    return kernel


@case(
    "MBAR_INIT_RACE",
    also=("MBAR_INIT_RACE", "UNINIT_READ", "MBAR_COUNT", "DEADLOCK"),
    args=_exchange_args,
    want=_reversed,
)
def no_barrier_after_init(bug):
    """A thread arrives at a barrier that thread 0 may not have made yet."""

    def kernel(x, out):
        bar = cuda.shared.array(1, uint64)
        part = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(bar, 0, uint32(64))  # BUG-A
        if not bug:
            cuda.syncthreads()
        part[t] = x[t]
        mbarrier_arrive(bar, 0)  # BUG-B
        mbarrier_wait(bar, 0, uint32(0))
        out[t] = part[63 - t]

    return kernel


def _pipeline_args():
    return ramp(6, 32), zeros(32)


def _column_sums(x, out):
    return {1: x.sum(axis=0)}


@case(
    "RACE_WAR",
    also=("UNINIT_READ", "MBAR_COUNT", "MBAR_PHASE", "DEADLOCK"),
    args=_pipeline_args,
    want=_column_sums,
)
def producer_does_not_wait(bug):
    """The producer overwrites a stage without asking whether it is empty."""

    def kernel(x, out):
        full = cuda.shared.array(2, uint64)
        empty = cuda.shared.array(2, uint64)
        tile = cuda.shared.array((2, 32), int32)
        t = cuda.threadIdx.x
        if t < 2:
            mbarrier_init(full, t, uint32(32))
            mbarrier_init(empty, t, uint32(32))
        cuda.syncthreads()
        total = int32(0)
        for k in range(6):
            stage, phase = k % 2, (k // 2) % 2
            if t < 32:
                if not bug:
                    mbarrier_wait(empty, stage, uint32(1 - phase))
                tile[stage, t] = x[k, t]  # BUG-A
                mbarrier_arrive(full, stage)
            else:
                mbarrier_wait(full, stage, uint32(phase))
                total += tile[stage, 31 - (t - 32)]  # BUG-B
                mbarrier_arrive(empty, stage)
        if t >= 32:
            out[31 - (t - 32)] = total

    return kernel


@case(
    "RACE_RAW",
    also=("RACE_WAR", "MBAR_COUNT", "MBAR_PHASE", "DEADLOCK"),
    args=_pipeline_args,
    want=_column_sums,
)
def parity_never_flips(bug):
    """The consumer waits for parity 0 in every round."""

    def kernel(x, out):
        full = cuda.shared.array(2, uint64)
        empty = cuda.shared.array(2, uint64)
        tile = cuda.shared.array((2, 32), int32)
        t = cuda.threadIdx.x
        if t < 2:
            mbarrier_init(full, t, uint32(32))
            mbarrier_init(empty, t, uint32(32))
        cuda.syncthreads()
        total = int32(0)
        for k in range(6):
            stage, phase = k % 2, (k // 2) % 2
            if t < 32:
                mbarrier_wait(empty, stage, uint32(1 - phase))
                tile[stage, t] = x[k, t]  # BUG-A
                mbarrier_arrive(full, stage)
            else:
                mbarrier_wait(full, stage, uint32(0 if bug else phase))
                total += tile[stage, 31 - (t - 32)]  # BUG-B
                mbarrier_arrive(empty, stage)
        if t >= 32:
            out[31 - (t - 32)] = total

    return kernel


@case(
    "DEADLOCK",
    args=_pipeline_args,
    want=_column_sums,
)
def producer_parity_swapped(bug):
    """The producer's first wait takes the consumer's parity: nobody has arrived yet."""

    def kernel(x, out):
        full = cuda.shared.array(2, uint64)
        empty = cuda.shared.array(2, uint64)
        tile = cuda.shared.array((2, 32), int32)
        t = cuda.threadIdx.x
        if t < 2:
            mbarrier_init(full, t, uint32(32))
            mbarrier_init(empty, t, uint32(32))
        cuda.syncthreads()
        total = int32(0)
        for k in range(6):
            stage, phase = k % 2, (k // 2) % 2
            if t < 32:
                mbarrier_wait(empty, stage, uint32(phase if bug else 1 - phase))  # BUG-A
                tile[stage, t] = x[k, t]
                mbarrier_arrive(full, stage)
            else:
                mbarrier_wait(full, stage, uint32(phase))  # BUG-B
                total += tile[stage, 31 - (t - 32)]
                mbarrier_arrive(empty, stage)
        if t >= 32:
            out[31 - (t - 32)] = total

    return kernel


@case(
    "DEADLOCK",
    args=_pipeline_args,
    want=_column_sums,
)
def empty_never_arrived(bug):
    """The consumer does not give the stages back."""

    def kernel(x, out):
        full = cuda.shared.array(2, uint64)
        empty = cuda.shared.array(2, uint64)
        tile = cuda.shared.array((2, 32), int32)
        t = cuda.threadIdx.x
        if t < 2:
            mbarrier_init(full, t, uint32(32))
            mbarrier_init(empty, t, uint32(32))
        cuda.syncthreads()
        total = int32(0)
        for k in range(6):
            stage, phase = k % 2, (k // 2) % 2
            if t < 32:
                mbarrier_wait(empty, stage, uint32(1 - phase))  # BUG-A
                tile[stage, t] = x[k, t]
                mbarrier_arrive(full, stage)
            else:
                mbarrier_wait(full, stage, uint32(phase))  # BUG-B
                total += tile[stage, 31 - (t - 32)]
                if not bug:
                    mbarrier_arrive(empty, stage)
        if t >= 32:
            out[31 - (t - 32)] = total

    return kernel


@case(
    "RACE_RAW",
    also=("RACE_WAR", "UNINIT_READ", "DEADLOCK", "MBAR_PHASE"),
    args=_pipeline_args,
    want=_column_sums,
)
def waits_for_the_stage_before(bug):
    """The wait is for the tile before this one: the first one passes at once."""

    def kernel(x, out):
        full = cuda.shared.array(2, uint64)
        empty = cuda.shared.array(2, uint64)
        tile = cuda.shared.array((2, 32), int32)
        t = cuda.threadIdx.x
        if t < 2:
            mbarrier_init(full, t, uint32(32))
            mbarrier_init(empty, t, uint32(32))
        cuda.syncthreads()
        total = int32(0)
        for k in range(6):
            stage, phase = k % 2, (k // 2) % 2
            if t < 32:
                mbarrier_wait(empty, stage, uint32(1 - phase))
                tile[stage, t] = x[k, t]  # BUG-A
                mbarrier_arrive(full, stage)
            else:
                filled = k - 1 if bug else k
                mbarrier_wait(full, filled % 2, uint32((filled // 2) % 2))
                total += tile[stage, 31 - (t - 32)]  # BUG-B
                mbarrier_arrive(empty, stage)
        if t >= 32:
            out[31 - (t - 32)] = total

    return kernel


@case(
    "RACE_WAR",
    also=("RACE_RAW",),
    args=_pipeline_args,
    want=_column_sums,
)
def given_back_before_it_is_read(bug):
    """The empty arrival comes before the stage has been read."""

    def kernel(x, out):
        full = cuda.shared.array(2, uint64)
        empty = cuda.shared.array(2, uint64)
        tile = cuda.shared.array((2, 32), int32)
        t = cuda.threadIdx.x
        if t < 2:
            mbarrier_init(full, t, uint32(32))
            mbarrier_init(empty, t, uint32(32))
        cuda.syncthreads()
        total = int32(0)
        for k in range(6):
            stage, phase = k % 2, (k // 2) % 2
            if t < 32:
                mbarrier_wait(empty, stage, uint32(1 - phase))
                tile[stage, t] = x[k, t]  # BUG-A
                mbarrier_arrive(full, stage)
            else:
                mbarrier_wait(full, stage, uint32(phase))
                if bug:
                    mbarrier_arrive(empty, stage)
                total += tile[stage, 31 - (t - 32)]  # BUG-B
                if not bug:
                    mbarrier_arrive(empty, stage)
        if t >= 32:
            out[31 - (t - 32)] = total

    return kernel


@case(
    "RACE_RAW",
    also=("RACE_WAR", "UNINIT_READ"),
    args=_pipeline_args,
    want=_column_sums,
)
def published_before_it_is_stored(bug):
    """The full arrival comes before the stage has been stored."""

    def kernel(x, out):
        full = cuda.shared.array(2, uint64)
        empty = cuda.shared.array(2, uint64)
        tile = cuda.shared.array((2, 32), int32)
        t = cuda.threadIdx.x
        if t < 2:
            mbarrier_init(full, t, uint32(32))
            mbarrier_init(empty, t, uint32(32))
        cuda.syncthreads()
        total = int32(0)
        for k in range(6):
            stage, phase = k % 2, (k // 2) % 2
            if t < 32:
                mbarrier_wait(empty, stage, uint32(1 - phase))
                if bug:
                    mbarrier_arrive(full, stage)
                tile[stage, t] = x[k, t]  # BUG-A
                if not bug:
                    mbarrier_arrive(full, stage)
            else:
                mbarrier_wait(full, stage, uint32(phase))
                total += tile[stage, 31 - (t - 32)]  # BUG-B
                mbarrier_arrive(empty, stage)
        if t >= 32:
            out[31 - (t - 32)] = total

    return kernel


@case(
    "MBAR_REINIT_LIVE",
    also=("DEADLOCK", "MBAR_INIT_RACE", "MBAR_COUNT"),
    args=_exchange_args,
    want=_reversed,
)
def made_again_while_in_use(bug):
    """A barrier is made a second time, for another count, without ending its first life."""

    def kernel(x, out):
        bar = cuda.shared.array(1, uint64)
        part = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(bar, 0, uint32(64))
        cuda.syncthreads()
        part[t] = x[t]
        mbarrier_arrive(bar, 0)
        mbarrier_wait(bar, 0, uint32(0))
        out[t] = part[63 - t]
        cuda.syncthreads()
        if t == 0:
            if not bug:
                mbarrier_invalidate(bar, 0)
            mbarrier_init(bar, 0, uint32(1))  # BUG-A
            mbarrier_arrive(bar, 0)
            mbarrier_wait(bar, 0, uint32(0))

    return kernel


@case(
    "MBAR_COUNT",
    also=("DEADLOCK", "RACE_RAW", "RACE_WAR", "UNINIT_READ"),
    args=_exchange_args,
    want=_reversed,
)
def arrives_for_too_many(bug):
    """One thread arrives for its warp, and counts the block."""

    def kernel(x, out):
        bar = cuda.shared.array(1, uint64)
        part = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(bar, 0, uint32(64))
        cuda.syncthreads()
        part[t] = x[t]
        sync_warp()
        if t % 32 == 0:
            mbarrier_arrive_count(bar, 0, uint32(65 if bug else 32))  # BUG-A
        mbarrier_wait(bar, 0, uint32(0))
        out[t] = part[63 - t]

    return kernel
