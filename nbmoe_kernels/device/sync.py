"""Barriers of a part of a block, fences, and the ops that only a warp as a whole may do."""

import numpy as np

from nbmoe_kernels.device.effects import Fence, NamedBarrier, ProxyFence
from nbmoe_kernels.device.op import Scope, device_op, op_factory


@device_op(
    "void(u32 barrier, u32 count)",
    ptx="bar.sync <barrier>, <count>;",
    effects=(NamedBarrier("barrier", "count"),),
)
def named_barrier_sync(barrier, count):
    """Wait until ``count`` threads have come to barrier ``barrier`` (1 to 15).

    ``count`` is a multiple of 32, and the lanes of a warp come together. Barrier 0 is
    ``cuda.syncthreads``.
    """


@device_op(
    "void(u32 barrier, u32 count)",
    ptx="bar.arrive <barrier>, <count>;",
    effects=(NamedBarrier("barrier", "count", waits=False),),
)
def named_barrier_arrive(barrier, count):
    """Count as one of the ``count`` threads of barrier ``barrier`` without waiting for them."""


@op_factory
def fence(order: str = "acq_rel", scope: str = "gpu"):
    """The op that orders the thread's memory accesses before and after it.

    Args:
        order: ``acq_rel`` or ``sc``.
        scope: for whom: ``cta``, ``cluster`` (from Hopper on), ``gpu`` or ``sys``.
    """

    @device_op(
        "void()",
        ptx=f"fence.{order}.{scope};",
        effects=(Fence(order, scope),),
        min_cc=(9, 0) if scope == "cluster" else (8, 0),
        name=f"fence_{order}_{scope}",
    )
    def fence_op():
        pass

    return fence_op


@device_op(
    "void()",
    ptx="fence.proxy.async.shared::cta;",
    effects=(ProxyFence("shared"),),
    min_cc=(9, 0),
)
def fence_proxy_async_shared():
    """Bulk copies and wgmma see what this thread has stored to shared memory."""


@device_op(
    "void()",
    ptx="fence.proxy.async.global;",
    effects=(ProxyFence("global"),),
    min_cc=(9, 0),
)
def fence_proxy_async_global():
    """Bulk copies see what this thread has stored to global memory."""


@device_op("void(u32 nanoseconds)", ptx="nanosleep.u32 <nanoseconds>;", effects=())
def nanosleep(nanoseconds):
    """Let others run for about that long."""


@op_factory
def set_max_registers(count: int, *, increase: bool):
    """The op by which a warp gives up registers, or waits for more of them.

    Args:
        count: registers a thread from then on, 24 to 256, a multiple of 8.
        increase: whether that is more than the thread has. All warps of a warpgroup do it.
    """
    if count % 8 or not 24 <= count <= 256:
        raise ValueError(f"registers a thread: expected a multiple of 8 in 24..256, got {count}")
    change = "inc" if increase else "dec"

    @device_op(
        "void()",
        scope=Scope.WARP,
        ptx=f"setmaxnreg.{change}.sync.aligned.u32 {count};",
        effects=(),
        min_cc=(9, 0),
        name=f"set_max_registers_{change}_{count}",
    )
    def set_registers():
        pass

    return set_registers


@device_op(
    "u32()",
    scope=Scope.WARP,
    ptx="{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 <ret>, 1, 0, p; }",
    effects=(),
    min_cc=(9, 0),
)
def elect():
    """1 on one lane of the warp, 0 on the others."""
    leader = np.zeros(32, np.uint32)
    leader[0] = 1
    return leader
