"""Reciprocals of a vector of scales, for sm_80 and up: out[i] = 1 / scales[i], one rounding.

Shapes: scales (E,) f32, out (E,) f32. Thread map: a thread an entry. No synchronisation.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.math import div_rn
from nbmoe_kernels.kernel import Executor, Kernel, kernel

THREADS = 256
_ONE = np.float32(1.0)


@functools.cache
def make_reciprocal() -> Kernel:
    """The kernel; it has no configuration."""

    @kernel(
        "global f32* out, global f32* scales, u32 count", threads=THREADS, name="reciprocal_sm80"
    )
    def reciprocal(out, scales, count):
        block = np.uint32(np.uint32(cuda.blockIdx.x) * np.uint32(THREADS))
        i = np.uint32(block + np.uint32(cuda.threadIdx.x))
        if i < count:
            out[np.uint64(i)] = div_rn(_ONE, scales[np.uint64(i)])

    return reciprocal


def launch_reciprocal(
    executor: Executor, out: Any, scales: Any, *, count: int, stream: Any = None
) -> None:
    """Launch on flat arrays of ``count`` entries."""
    make_reciprocal().launch(
        executor, (-(-count // THREADS), 1, 1), out, scales, count, stream=stream
    )
