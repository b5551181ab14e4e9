"""Warp-wide ops; all 32 lanes take part."""

import numpy as np

from nbmoe_kernels.device.op import Scope, device_op

_FULL = "0xffffffff"


@device_op(
    "u32(u32 value, u32! mask)",
    scope=Scope.WARP,
    ptx=f"shfl.sync.bfly.b32 <ret>, <value>, <mask>, 0x1f, {_FULL};",
    effects=(),
)
def shuffle_xor(value, mask):
    """The value of lane ``lane ^ mask``."""
    result = np.empty(32, np.uint32)
    for lane in range(32):
        result[lane] = value[lane ^ np.int64(mask)]
    return result


@device_op(
    "u32(u32 value, u32! delta)",
    scope=Scope.WARP,
    ptx=f"shfl.sync.up.b32 <ret>, <value>, <delta>, 0, {_FULL};",
    effects=(),
)
def shuffle_up(value, delta):
    """The value of lane ``lane - delta``; lanes below ``delta`` keep their own."""
    result = np.empty(32, np.uint32)
    for lane in range(32):
        result[lane] = value[max(lane - np.int64(delta), 0)] if lane >= delta else value[lane]
    return result


@device_op(
    "u32(u32 value, u32 source)",
    scope=Scope.WARP,
    ptx=f"shfl.sync.idx.b32 <ret>, <value>, <source>, 0x1f, {_FULL};",
    effects=(),
)
def shuffle_from(value, source):
    """The value of lane ``source % 32``; each lane names its own source."""
    result = np.empty(32, np.uint32)
    for lane in range(32):
        result[lane] = value[np.int64(source[lane]) & 31]
    return result


@device_op(
    "u32(u32 value)",
    scope=Scope.WARP,
    ptx=f"match.any.sync.b32 <ret>, <value>, {_FULL};",
    effects=(),
)
def match_any(value):
    """Mask of the lanes that hold the same value as this one."""
    result = np.zeros(32, np.uint32)
    for lane in range(32):
        for other in range(32):
            if value[other] == value[lane]:
                result[lane] |= np.uint32(1) << np.uint32(other)
    return result


@device_op("void()", scope=Scope.WARP, ptx=f"bar.warp.sync {_FULL};", effects=())
def sync_warp():
    """Wait for all lanes; orders their memory accesses."""


@device_op("u32(u32 x)", ptx="popc.b32 <ret>, <x>;")
def count_bits(x):
    """Number of set bits."""
    count = np.uint32(0)
    for i in range(32):
        count = np.uint32(count + np.uint32((x >> np.uint32(i)) & np.uint32(1)))
    return count
