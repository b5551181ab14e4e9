"""Bulk copies of contiguous bytes between global and shared memory, made asynchronously.

Addresses and sizes are multiples of 16 bytes. A load reports its bytes to an mbarrier, a store
belongs to the thread's open group of bulk copies. Both see what was stored to memory before only
past `nbmoe_kernels.device.sync.fence_proxy_async_shared` (or ``_global``).
"""

import numpy as np
from numba import njit

from nbmoe_kernels.device.effects import MbarComplete, reads, writes
from nbmoe_kernels.device.mbarrier import advance
from nbmoe_kernels.device.op import Timing, device_op, op_factory


@njit
def _check_span(array, index, nbytes):
    if nbytes % 16 != 0 or index % 16 != 0:
        raise ValueError("bulk copy: addresses and sizes must be multiples of 16 bytes")
    if index < 0 or index + nbytes > array.size:
        raise IndexError("bulk copy: it reaches past the end of an array")


@device_op(
    "void(shared u8* dst, global u8* src, u32 nbytes, shared u64* bar)",
    ptx="cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[<dst>], [<src>], <nbytes>, [<bar>];",
    timing=Timing.ASYNC,
    effects=(
        reads("src", "nbytes", proxy="async", align=16),
        writes("dst", "nbytes", proxy="async", align=16),
        MbarComplete("bar", "nbytes"),
    ),
    min_cc=(9, 0),
)
def bulk_load(dst, dst_index, src, src_index, nbytes, bar, bar_index):
    """Copy to shared memory; the mbarrier counts the bytes when they have come."""
    d, s, n = np.int64(dst_index), np.int64(src_index), np.int64(nbytes)
    _check_span(dst, d, n)
    _check_span(src, s, n)
    dst[d : d + n] = src[s : s + n]
    bar[bar_index] = advance(bar[bar_index], 0, -n)


@device_op(
    "void(global u8* src, u32 nbytes)",
    ptx="cp.async.bulk.prefetch.L2.global [<src>], <nbytes>;",
    effects=(),
    min_cc=(9, 0),
)
def bulk_prefetch(src, src_index, nbytes):
    """Ask for bytes to be in the L2 cache; nothing may depend on it."""
    _check_span(src, np.int64(src_index), np.int64(nbytes))


_EVICT_FIRST = 0x12F0000000000000
"""The cache policy of bytes that no block asks for again."""


@device_op(
    "void(shared u8* dst, global u8* src, u32 nbytes, shared u64* bar)",
    ptx="{ .reg .b64 policy; "
    f"mov.b64 policy, {_EVICT_FIRST:#x}; "
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
    "[<dst>], [<src>], <nbytes>, [<bar>], policy; }",
    timing=Timing.ASYNC,
    effects=(
        reads("src", "nbytes", proxy="async", align=16),
        writes("dst", "nbytes", proxy="async", align=16),
        MbarComplete("bar", "nbytes"),
    ),
    min_cc=(9, 0),
)
def bulk_load_once(dst, dst_index, src, src_index, nbytes, bar, bar_index):
    """`bulk_load` of bytes that need not stay in the L2 cache."""
    d, s, n = np.int64(dst_index), np.int64(src_index), np.int64(nbytes)
    _check_span(dst, d, n)
    _check_span(src, s, n)
    dst[d : d + n] = src[s : s + n]
    bar[bar_index] = advance(bar[bar_index], 0, -n)


@device_op(
    "void(global u8* dst, shared u8* src, u32 nbytes)",
    ptx="cp.async.bulk.global.shared::cta.bulk_group [<dst>], [<src>], <nbytes>;",
    timing=Timing.ASYNC,
    group="bulk",
    effects=(
        reads("src", "nbytes", proxy="async", align=16),
        writes("dst", "nbytes", proxy="async", align=16),
    ),
    min_cc=(9, 0),
)
def bulk_store(dst, dst_index, src, src_index, nbytes):
    """Copy to global memory, as part of the thread's open group."""
    d, s, n = np.int64(dst_index), np.int64(src_index), np.int64(nbytes)
    _check_span(dst, d, n)
    _check_span(src, s, n)
    dst[d : d + n] = src[s : s + n]


@device_op(
    "void()",
    ptx="cp.async.bulk.commit_group;",
    group="bulk.commit",
    effects=(),
    min_cc=(9, 0),
)
def bulk_commit():
    """Close the thread's open group of bulk stores."""


@op_factory
def bulk_wait(open_groups: int):
    """The op that waits until at most ``open_groups`` of the thread's newest groups are open."""

    @device_op(
        "void()",
        ptx=f"cp.async.bulk.wait_group {open_groups};",
        group=f"bulk.wait{open_groups}",
        effects=(),
        min_cc=(9, 0),
        name=f"bulk_wait_{open_groups}",
    )
    def wait():
        pass

    return wait
