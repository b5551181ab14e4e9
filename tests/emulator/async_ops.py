"""Small asynchronous ops: copies that an mbarrier counts, bulk stores, products of a warpgroup."""

import numpy as np

from nbmoe_kernels.device.effects import MbarComplete, reads, writes
from nbmoe_kernels.device.mbarrier import advance
from nbmoe_kernels.device.op import Scope, Timing, device_op


@device_op(
    "void(shared u32* dst, global u32* src, u32 words, shared u64* bar)",
    ptx="// never compiled",
    timing=Timing.ASYNC,
    effects=(writes("dst", proxy="async"), reads("src", proxy="async"), MbarComplete("bar", 4)),
    name="t_fetch",
)
def fetch(dst, dst_index, src, src_index, words, bar, bar_index):
    """Copy words from global memory; the mbarrier counts four bytes for each."""
    for i in range(np.int64(words)):
        dst[dst_index + i] = src[src_index + i]
    bar[bar_index] = advance(bar[bar_index], 0, -4 * np.int64(words))


@device_op(
    "void(global u32* dst, shared u32* src)",
    ptx="// never compiled",
    timing=Timing.ASYNC,
    group="bulk",
    effects=(writes("dst", 4, proxy="async"), reads("src", 4, proxy="async")),
    name="t_put",
)
def put(dst, dst_index, src, src_index):
    dst[dst_index] = src[src_index]


@device_op("void()", ptx="// never", group="bulk.commit", effects=(), name="t_put_commit")
def put_commit():
    pass


@device_op("void()", ptx="// never", group="bulk.wait0", effects=(), name="t_put_wait")
def put_wait():
    pass


@device_op(
    "void(u32[2] acc, u32[1] a, shared u32* b, u32! scale)",
    scope=Scope.WARPGROUP,
    ptx="// never compiled",
    timing=Timing.ASYNC,
    group="wgmma",
    effects=(reads("b", 512, proxy="async"),),
    name="t_product",
)
def product(acc, a, b, b_index, scale):
    """acc[lane] += scale * a[lane] * (b[lane], sum of b)."""
    total = np.uint32(0)
    for lane in range(128):
        total = np.uint32(total + b[b_index[0] + lane])
    for lane in range(128):
        factor = np.uint32(a[lane, 0] * scale)
        acc[lane, 0] = np.uint32(acc[lane, 0] + np.uint32(factor * b[b_index[0] + lane]))
        acc[lane, 1] = np.uint32(acc[lane, 1] + np.uint32(factor * total))


@device_op(
    "void()",
    scope=Scope.WARP,
    ptx="// never",
    group="wgmma.commit",
    effects=(),
    name="t_product_commit",
)
def product_commit():
    pass


@device_op(
    "void()",
    scope=Scope.WARP,
    ptx="// never",
    group="wgmma.wait0",
    effects=(),
    name="t_product_wait",
)
def product_wait():
    pass


@device_op(
    "void()",
    scope=Scope.WARP,
    ptx="// never",
    group="wgmma.wait1",
    effects=(),
    name="t_product_wait1",
)
def product_wait_but_one():
    pass


@device_op(
    "u32[2](u32 x, u32! k)",
    scope=Scope.WARPGROUP,
    ptx="// never compiled",
    effects=(),
    name="t_group_sum",
)
def group_sum(x, k):
    """The sum over 128 lanes, and the value of lane ``lane ^ k``."""
    result = np.empty((128, 2), np.uint32)
    total = np.uint32(0)
    for lane in range(128):
        total = np.uint32(total + x[lane])
    for lane in range(128):
        result[lane, 0] = total
        result[lane, 1] = x[lane ^ np.int64(k)]
    return result
