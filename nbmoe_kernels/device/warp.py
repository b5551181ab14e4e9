"""Warp-wide ops; all 32 lanes take part."""

import numpy as np
from numba import njit

from nbmoe_kernels.device.op import NUMPY_TYPES, Scope, device_op, op_factory

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
        result[lane] = value[lane ^ (np.int64(mask) & 31)]
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
    step = np.int64(delta) & 31
    for lane in range(32):
        result[lane] = value[lane - step] if lane >= step else value[lane]
    return result


@device_op(
    "u32(u32 value, u32! delta)",
    scope=Scope.WARP,
    ptx=f"shfl.sync.down.b32 <ret>, <value>, <delta>, 0x1f, {_FULL};",
    effects=(),
)
def shuffle_down(value, delta):
    """The value of lane ``lane + delta``; the last ``delta`` lanes keep their own.

    Only the low five bits of ``delta`` count, as in all shuffles.
    """
    result = np.empty(32, np.uint32)
    step = np.int64(delta) & 31
    for lane in range(32):
        result[lane] = value[lane + step] if lane + step < 32 else value[lane]
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


@device_op(
    "u32(u32 value)",
    scope=Scope.WARP,
    ptx=f"{{ .reg .pred p; match.all.sync.b32 <ret>|p, <value>, {_FULL}; }}",
    effects=(),
)
def match_all(value):
    """Mask of all lanes if they hold the same value, else 0."""
    result = np.empty(32, np.uint32)
    same = True
    for lane in range(32):
        same &= value[lane] == value[0]
    result[:] = np.uint32(0xFFFFFFFF) if same else np.uint32(0)
    return result


@device_op(
    "u32(u32 predicate)",
    scope=Scope.WARP,
    ptx="{ .reg .pred p, q; setp.ne.b32 p, <predicate>, 0; "
    f"vote.sync.all.pred q, p, {_FULL}; selp.b32 <ret>, 1, 0, q; }}",
    effects=(),
)
def vote_all(predicate):
    """1 if the predicate is not 0 on every lane, else 0."""
    result = np.ones(32, np.uint32)
    for lane in range(32):
        if predicate[lane] == 0:
            result[:] = 0
    return result


@device_op(
    "u32(u32 predicate)",
    scope=Scope.WARP,
    ptx="{ .reg .pred p, q; setp.ne.b32 p, <predicate>, 0; "
    f"vote.sync.any.pred q, p, {_FULL}; selp.b32 <ret>, 1, 0, q; }}",
    effects=(),
)
def vote_any(predicate):
    """1 if the predicate is not 0 on some lane, else 0."""
    result = np.zeros(32, np.uint32)
    for lane in range(32):
        if predicate[lane] != 0:
            result[:] = 1
    return result


@device_op(
    "u32(u32 predicate)",
    scope=Scope.WARP,
    ptx="{ .reg .pred p; setp.ne.b32 p, <predicate>, 0; "
    f"vote.sync.ballot.b32 <ret>, p, {_FULL}; }}",
    effects=(),
)
def ballot(predicate):
    """Mask of the lanes on which the predicate is not 0."""
    mask = np.uint32(0)
    for lane in range(32):
        if predicate[lane] != 0:
            mask = np.uint32(mask | np.uint32(np.uint32(1) << np.uint32(lane)))
    result = np.empty(32, np.uint32)
    result[:] = mask
    return result


@njit
def _add(x, y):
    return x + y


@njit
def _and(x, y):
    return x & y


@njit
def _or(x, y):
    return x | y


@njit
def _xor(x, y):
    return x ^ y


@njit
def _min(x, y):
    return min(x, y)


@njit
def _max(x, y):
    return max(x, y)


_COMBINE = {"add": _add, "min": _min, "max": _max, "and": _and, "or": _or, "xor": _xor}


@op_factory
def reduce_lanes(operation: str, dtype: str = "u32"):
    """The op ``value -> result`` that combines the values of all lanes.

    Args:
        operation: ``add`` (modulo 2^32), ``min``, ``max``; ``and``, ``or``, ``xor`` of u32.
        dtype: ``u32`` or ``i32``.
    """
    bitwise = operation in ("and", "or", "xor")
    if operation not in _COMBINE or dtype not in (("u32",) if bitwise else ("u32", "i32")):
        raise ValueError(f"reduce_lanes: there is no {operation!r} of {dtype!r}")
    suffix = "b32" if bitwise else dtype.replace("i", "s")
    combine, cast = _COMBINE[operation], NUMPY_TYPES[dtype]

    @device_op(
        f"{dtype}({dtype} value)",
        scope=Scope.WARP,
        ptx=f"redux.sync.{operation}.{suffix} <ret>, <value>, {_FULL};",
        effects=(),
        name=f"reduce_lanes_{operation}_{dtype}",
    )
    def reduce(value):
        total = value[0]
        for lane in range(1, 32):
            total = cast(combine(total, value[lane]))
        result = np.empty(32, cast)
        result[:] = total
        return result

    return reduce


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
