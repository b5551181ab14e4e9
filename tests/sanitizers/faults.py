"""Kernels with one planted fault each, and one without: what a sanitizer's tool reports.

python -m tests.sanitizers.faults memcheck
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_init,
    mbarrier_wait,
)
from nbmoe_kernels.device.warp import sync_warp
from nbmoe_kernels.kernel import Kernel, kernel

THREADS = 64


@kernel("global u32* data, global u32* out", threads=THREADS, name="stores_behind_the_end")
def stores_behind_the_end(data, out):
    i = np.uint32(cuda.threadIdx.x)
    out[np.uint64(i + np.uint32(1))] = data[np.uint64(i)]


@kernel("global u32* data, global u32* out", threads=THREADS, name="reads_without_a_barrier")
def reads_without_a_barrier(data, out):
    words = cuda.shared.array(THREADS, np.uint32)
    i = np.uint32(cuda.threadIdx.x)
    words[i] = data[np.uint64(i)]
    # Of the other warp, which may not have stored yet.
    out[np.uint64(i)] = words[np.uint32(np.uint32(THREADS - 1) - i)]


@kernel("global u32* data, global u32* out", threads=THREADS, name="half_a_warp_waits")
def half_a_warp_waits(data, out):
    i = np.uint32(cuda.threadIdx.x)
    value = data[np.uint64(i)]
    if np.uint32(i & np.uint32(31)) < np.uint32(16):
        cuda.syncthreads()
        value = np.uint32(value + np.uint32(1))
    out[np.uint64(i)] = value


@kernel("global u32* data, global u32* out", threads=THREADS, name="reads_what_nobody_wrote")
def reads_what_nobody_wrote(data, out):
    i = np.uint64(np.uint32(cuda.threadIdx.x))
    out[i] = data[i]


@kernel("global u32* data, global u32* out", threads=THREADS, name="one_lane_arrives")
def one_lane_arrives(data, out):
    words = cuda.shared.array(32, np.uint32)
    bars = cuda.shared.array(1, np.uint64)
    i = np.uint32(cuda.threadIdx.x)
    if i == np.uint32(0):
        mbarrier_init(bars, np.uint32(0), np.uint32(1))
        fence_mbarrier_init()
    cuda.syncthreads()
    if i < np.uint32(32):
        words[i] = data[np.uint64(i)]
        sync_warp()
        if i == np.uint32(0):
            mbarrier_arrive(bars, np.uint32(0))
    else:
        mbarrier_wait(bars, np.uint32(0), np.uint32(0))
        out[np.uint64(i)] = words[np.uint32(np.uint32(THREADS - 1) - i)]


FAULTS: dict[str, Kernel] = {
    "memcheck": stores_behind_the_end,
    "racecheck": reads_without_a_barrier,
    "synccheck": half_a_warp_waits,
    "initcheck": reads_what_nobody_wrote,
}
"""By the tool that finds it."""
CONTROL = one_lane_arrives
"""Without a fault, and yet racecheck reports it: why `tests.sanitizers.every_lane` is there."""


def launch(made: Kernel) -> Any:
    """One block on the GPU, with memory that nothing but the kernel and a copy has touched."""
    from nbmoe_kernels.launcher import GpuExecutor

    data: Any = cuda.device_array(THREADS, np.uint32)
    if made is not reads_what_nobody_wrote:
        data.copy_to_device(np.arange(THREADS, dtype=np.uint32))
    out = cuda.device_array(THREADS, np.uint32)
    addresses = [array.device_ctypes_pointer.value for array in (data, out)]
    GpuExecutor()(made, (1, 1, 1), tuple(addresses), None)
    cuda.synchronize()
    return out


def main(argv: list[str], run: Callable[[Kernel], Any] = launch) -> int:
    """Launch the fault of a tool, or the control."""
    run(CONTROL if argv[0] == "control" else FAULTS[argv[0]])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
