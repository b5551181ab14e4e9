"""The module that takes the place of `numba.cuda` in kernels of the interpreted engine."""

import math
import sys
from typing import Any

import numpy as np

from emulate.errors import ResourceError
from emulate.interpreted.atomics import Atomic
from emulate.interpreted.machine import Dim3, machine, shared_memory
from emulate.interpreted.scalars import dtype_of
from emulate.options import MAX_SHARED_BYTES


class _Shared:
    @staticmethod
    def array(shape: Any, dtype: Any, alignment: int | None = None) -> np.ndarray:
        """An array in the CTA's shared memory; shape 0 is the dynamic part."""
        block = machine().current.block
        kind = dtype_of(dtype)
        if shape == 0 or shape == (0,):
            count = block.dynamic.size // kind.itemsize
            return block.dynamic[: count * kind.itemsize].view(kind)
        # One array for each place in the code, whichever thread comes first.
        caller = sys._getframe(1)
        place = (caller.f_code, caller.f_lasti)
        if place not in block.static_arrays:
            extents = shape if isinstance(shape, tuple) else (shape,)
            memory = shared_memory(math.prod(extents) * kind.itemsize)
            block.static_arrays[place] = memory.view(kind).reshape(extents)
            static = sum(array.nbytes for array in block.static_arrays.values())
            if static + block.dynamic.size > MAX_SHARED_BYTES:
                raise ResourceError(
                    f"shared memory: expected at most {MAX_SHARED_BYTES} bytes, got {static} "
                    f"static and {block.dynamic.size} dynamic"
                )
        return block.static_arrays[place]


class _Local:
    @staticmethod
    def array(shape: Any, dtype: Any, alignment: int | None = None) -> np.ndarray:
        """An array of the thread's own."""
        return np.empty(shape, dtype_of(dtype))


class CudaModule:
    """The names of `numba.cuda` that kernels may use."""

    shared = _Shared
    local = _Local
    atomic = Atomic

    @property
    def threadIdx(self) -> Dim3:
        return machine().current.thread_idx

    @property
    def blockIdx(self) -> Dim3:
        return machine().current.block.block_idx

    @property
    def blockDim(self) -> Dim3:
        return machine().block_dim

    @property
    def gridDim(self) -> Dim3:
        return machine().grid_dim

    def grid(self, ndim: int) -> Any:
        """The thread's index in the grid."""
        thread = machine().current
        block = machine().shape.block
        index = tuple(
            np.int64(thread.block.index[axis] * block[axis] + thread.thread_idx.index[axis])
            for axis in range(ndim)
        )
        return index if ndim > 1 else index[0]

    def gridsize(self, ndim: int) -> Any:
        """Threads of the grid in each dimension."""
        shape = machine().shape
        sizes = tuple(np.int64(shape.grid[axis] * shape.block[axis]) for axis in range(ndim))
        return sizes if ndim > 1 else sizes[0]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"cuda.{name} is not known to the interpreted engine")

    def syncthreads(self) -> None:
        """Wait for all threads of the block."""
        machine().barrier(0)

    def syncthreads_count(self, predicate: Any) -> np.int32:
        """Barrier; the number of threads whose predicate holds."""
        return np.int32(machine().barrier(1 if predicate else 0))

    def syncthreads_and(self, predicate: Any) -> np.int32:
        """Barrier; 1 if every thread's predicate holds."""
        return np.int32(machine().barrier(0 if predicate else 1) == 0)

    def syncthreads_or(self, predicate: Any) -> np.int32:
        """Barrier; 1 if some thread's predicate holds."""
        return np.int32(machine().barrier(1 if predicate else 0) != 0)

    def nanosleep(self, ns: Any) -> None:
        """Let other threads run."""
        machine().sleep()

    def threadfence(self) -> None:
        """Nothing: memory is sequentially consistent here."""

    threadfence_block = threadfence
    threadfence_system = threadfence
