"""mbarriers: 8 bytes of shared memory at which threads arrive and asynchronous copies report.

A phase is complete when all its arrivals and all its expected bytes have come; then the next one
begins. The word's layout is the twins' own: the hardware's is not documented.

    bits 0-19   arrivals that are still to come
    bits 20-39  arrivals of a phase
    bits 40-62  bytes that are still to come, two's complement
    bit 63      parity of the running phase
"""

import numpy as np
from numba import njit

from nbmoe_kernels.device.effects import Fence, MbarArrive, MbarInit, MbarInval, MbarWait
from nbmoe_kernels.device.op import Timing, device_op

_COUNT_MASK = 0xFFFFF
_BYTES_MASK = 0x7FFFFF
_MAX_COUNT = 0xFFFFF


@njit
def advance(word, arrivals, nbytes):
    """The word after ``arrivals`` more arrivals and a change of the awaited bytes, for twins."""
    value = np.int64(word)
    pending = (value - np.int64(arrivals)) & np.int64(_COUNT_MASK)
    count = (value >> np.int64(20)) & np.int64(_COUNT_MASK)
    awaited = ((value >> np.int64(40)) + np.int64(nbytes)) & np.int64(_BYTES_MASK)
    phase = (value >> np.int64(63)) & np.int64(1)
    if pending == 0 and awaited == 0:
        phase ^= np.int64(1)
        pending = count
    low = pending | (count << np.int64(20)) | (awaited << np.int64(40))
    return np.uint64(low | (phase << np.int64(63)))


@device_op(
    "void(shared u64* bar, u32 count)",
    ptx="mbarrier.init.shared::cta.b64 [<bar>], <count>;",
    effects=(MbarInit("bar", "count"),),
)
def mbarrier_init(bar, bar_index, count):
    """Make a barrier whose phases take ``count`` arrivals (1 to 2^20 - 1)."""
    if count < 1 or count > _MAX_COUNT:
        raise ValueError("mbarrier_init: expected a count in 1..1048575")
    bar[bar_index] = np.uint64(np.int64(count) | (np.int64(count) << np.int64(20)))


@device_op(
    "void(shared u64* bar)",
    ptx="mbarrier.inval.shared::cta.b64 [<bar>];",
    effects=(MbarInval("bar"),),
)
def mbarrier_invalidate(bar, bar_index):
    """End the barrier's life, so that its bytes can be used for something else."""
    bar[bar_index] = np.uint64(0)


@device_op(
    "void()",
    ptx="fence.mbarrier_init.release.cluster;",
    effects=(Fence("release", "cluster"),),
    min_cc=(9, 0),
)
def fence_mbarrier_init():
    """Asynchronous copies see the barriers that this thread has made."""


@device_op(
    "void(shared u64* bar)",
    ptx="{ .reg .b64 t; mbarrier.arrive.shared::cta.b64 t, [<bar>]; }",
    effects=(MbarArrive("bar"),),
)
def mbarrier_arrive(bar, bar_index):
    """Arrive once; what the thread did before is visible to those that wait for the phase."""
    bar[bar_index] = advance(bar[bar_index], 1, 0)


@device_op(
    "void(shared u64* bar, u32 count)",
    ptx="{ .reg .b64 t; mbarrier.arrive.shared::cta.b64 t, [<bar>], <count>; }",
    effects=(MbarArrive("bar", "count"),),
    min_cc=(9, 0),
)
def mbarrier_arrive_count(bar, bar_index, count):
    """Arrive ``count`` times."""
    bar[bar_index] = advance(bar[bar_index], count, 0)


@device_op(
    "void(shared u64* bar, u32 nbytes)",
    ptx="mbarrier.arrive.expect_tx.shared::cta.b64 _, [<bar>], <nbytes>;",
    effects=(MbarArrive("bar", 1, "nbytes"),),
    min_cc=(9, 0),
)
def mbarrier_arrive_expect(bar, bar_index, nbytes):
    """Arrive once; the phase also waits for ``nbytes`` of asynchronous copies."""
    bar[bar_index] = advance(bar[bar_index], 1, nbytes)


@device_op(
    "void(shared u64* bar, u32 nbytes)",
    ptx="mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [<bar>], <nbytes>;",
    effects=(MbarArrive("bar", 0, "nbytes"),),
    min_cc=(9, 0),
)
def mbarrier_expect(bar, bar_index, nbytes):
    """The running phase also waits for ``nbytes`` of asynchronous copies; no arrival."""
    bar[bar_index] = advance(bar[bar_index], 0, nbytes)


@device_op(
    "void(shared u64* bar, u32 parity)",
    timing=Timing.WAIT,
    ptx="{ .reg .pred p; "
    "WAIT_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 p, [<bar>], <parity>; "
    "@!p bra WAIT_${:uid}; }",
    effects=(MbarWait("bar", "parity"),),
    min_cc=(9, 0),
)
def mbarrier_wait(bar, bar_index, parity):
    """Wait until the phase of this parity is complete.

    A new barrier runs phase 0, so waiting for parity 1 goes on at once.
    """
    return (bar[bar_index] >> np.uint64(63)) != np.uint64(parity & np.uint32(1))
