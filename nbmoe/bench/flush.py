"""A kernel that reads memory and writes none of it: it leaves an L2 cache without dirty lines."""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.memory import load_v4
from nbmoe_kernels.kernel import Executor, Kernel, kernel

THREADS = 256
BLOCKS = 132 * 8
WORDS_PER_LOAD = 4
UNLIKELY = np.uint32(0x5EED1E55)


@functools.cache
def make_read_memory() -> Kernel:
    """The kernel; it has no configuration.

    Each thread reads every (256 * blocks)th 16 bytes. It stores one word if all that it read,
    xored, is an unlikely word, so that no compiler can drop the loads.
    """

    @kernel(
        "global u32* source, u32 num_loads",
        threads=THREADS,
        name="read_memory",
    )
    def read_memory(source: Any, num_loads: Any) -> None:
        step = np.uint32(np.uint32(cuda.gridDim.x) * np.uint32(THREADS))
        at = np.uint32(
            np.uint32(np.uint32(cuda.blockIdx.x) * np.uint32(THREADS)) + np.uint32(cuda.threadIdx.x)
        )
        found = np.uint32(0)
        while at < num_loads:
            a, b, c, d = load_v4(source, np.uint64(at) * np.uint64(WORDS_PER_LOAD))
            found = np.uint32(found ^ np.uint32(np.uint32(a ^ b) ^ np.uint32(c ^ d)))
            at = np.uint32(at + step)
        if found == UNLIKELY:
            source[np.uint64(0)] = found

    return read_memory


def launch_read_memory(executor: Executor, source: Any, nbytes: int, *, stream: Any = None) -> None:
    """Launch on `nbytes` bytes, a multiple of 16."""
    make_read_memory().launch(executor, (BLOCKS, 1, 1), source, nbytes // 16, stream=stream)
