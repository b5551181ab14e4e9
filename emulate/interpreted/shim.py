"""The module that takes the place of `numba.cuda` in kernels of the interpreted engine."""

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from emulate import stock
from emulate.errors import ResourceError
from emulate.interpreted import bindings
from emulate.interpreted.atomics import Atomic
from emulate.interpreted.block import WARP_LANES, Dim3, shared_memory
from emulate.interpreted.machine import machine
from emulate.interpreted.scalars import dtype_of
from emulate.options import shared_limit
from nbmoe_kernels.device.op import Op


class _Shared:
    @staticmethod
    def array(shape: Any, dtype: Any, alignment: int | None = None) -> np.ndarray:
        """An array in the CTA's shared memory; shape 0 is the dynamic part."""
        caller = sys._getframe(1)
        return shared_array(shape, dtype, (caller.f_code, caller.f_lasti))


def shared_array(shape: Any, dtype: Any, place: Any) -> np.ndarray:
    """An array in the current CTA's shared memory; ``place`` tells calls in the code apart."""
    block = machine().current.block
    kind = dtype_of(dtype)
    if shape == 0 or shape == (0,):
        count = block.dynamic.size // kind.itemsize
        return block.dynamic[: count * kind.itemsize].view(kind)
    # One array for each place in the code, whichever thread comes first.
    if place not in block.static_arrays:
        extents = shape if isinstance(shape, tuple) else (shape,)
        memory = shared_memory(math.prod(extents) * kind.itemsize)
        block.static_arrays[place] = memory.view(kind).reshape(extents)
        block.static_bytes += memory.nbytes
        limit = shared_limit(machine().options.cc)
        if block.static_bytes + block.dynamic.size > limit:
            raise ResourceError(
                f"shared memory: expected at most {limit} bytes, got {block.static_bytes} "
                f"static and {block.dynamic.size} dynamic"
            )
    array: np.ndarray = block.static_arrays[place]
    return array


class _Local:
    @staticmethod
    def array(shape: Any, dtype: Any, alignment: int | None = None) -> np.ndarray:
        """An array of the thread's own."""
        return np.empty(shape, dtype_of(dtype))


class _Const:
    @staticmethod
    def array_like(array: np.ndarray) -> np.ndarray:
        """The array itself."""
        return array


class _GridGroup:
    """All threads of the launch; they must be alive together (``resident="all"``)."""

    def sync(self) -> None:
        """Wait for all threads of the grid."""
        machine().grid_barrier()


class _Groups:
    @staticmethod
    def this_grid() -> _GridGroup:
        """The group of all threads."""
        return _GridGroup()


class CudaModule:
    """The names of `numba.cuda` that kernels may use.

    Args:
        bind: from an op of `emulate.stock` to what runs it.
    """

    shared: Any = _Shared
    local: Any = _Local
    atomic: Any = Atomic
    const = _Const
    cg = _Groups
    warpsize = np.int32(WARP_LANES)

    def __init__(self, bind: Callable[[Op], Callable[..., Any]] = bindings.bind) -> None:
        stock_functions = stock.functions(
            lambda op, args: bind(op)(*args),
            lambda: machine().current.lane,
            lambda: machine().current.warp.lanes,
        )
        self.__dict__.update(stock_functions)

    @property
    def laneid(self) -> np.int32:
        return np.int32(machine().current.lane)

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
