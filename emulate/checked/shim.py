"""`numba.cuda` as kernels of the checked engine see it."""

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from emulate.checked import atomics, ops
from emulate.checked.arrays import Local, Tracked, make_local, track
from emulate.checked.sites import site_of
from emulate.interpreted.atomics import Atomic
from emulate.interpreted.block import shared_memory
from emulate.interpreted.machine import machine
from emulate.interpreted.scalars import dtype_of
from emulate.interpreted.shim import CudaModule
from emulate.options import shared_limit
from nbmoe_kernels.device import effects as fx

MAX_STATIC_BYTES = 48 * 1024
"""Static shared memory of a block, on every GPU."""


class _Shared:
    @staticmethod
    def array(shape: Any, dtype: Any, alignment: int | None = None) -> Tracked:
        """An array in the block's shared memory; shape 0 is the dynamic part."""
        running: Any = machine()
        block = running.current.block
        kind = dtype_of(dtype)
        caller = sys._getframe(1)
        if shape == 0 or shape == (0,):
            key = "dynamic", kind
            if key not in block.static_arrays:
                block.static_arrays[key] = _dynamic(running, block, kind)
            return block.static_arrays[key]  # type: ignore[no-any-return]
        place = (caller.f_code, caller.f_lasti)
        known = block.static_arrays.get(place)
        if known is None:
            extents = shape if isinstance(shape, tuple) else (shape,)
            memory = shared_memory(math.prod(extents) * kind.itemsize)
            block.static_bytes += memory.nbytes
            _check_size(running, block, site_of(caller))
            name = _assigned_name(caller) or "shared array"
            region = running.add_shared(block, name, memory)
            running.reports.items.setdefault(name, kind.itemsize)
            data = memory.view(kind).reshape(extents)
            known = track(data, region, memory.ctypes.data, name)
            block.static_arrays[place] = known
        return known  # type: ignore[no-any-return]


def _dynamic(running: Any, block: Any, kind: np.dtype) -> Tracked:
    count = block.dynamic.size // kind.itemsize
    data = block.dynamic[: count * kind.itemsize].view(kind)
    name = "dynamic shared memory"
    if not block.state.regions or not block.dynamic.size:
        region = running.add_shared(block, name, block.dynamic)
    else:
        region = block.state.regions[0]
    return track(data, region, block.dynamic.ctypes.data, name)


def _check_size(running: Any, block: Any, site: int) -> None:
    limit = shared_limit(running.options.cc)
    total = block.static_bytes + block.dynamic.size
    if block.static_bytes > MAX_STATIC_BYTES or total > limit:
        raise running.reports.halt(
            "SMEM_OVERFLOW",
            f"{block.static_bytes} bytes of static and {block.dynamic.size} of dynamic shared "
            f"memory; a block can have {MAX_STATIC_BYTES} static and {limit} in all",
            (site, running.agent, "asks for shared memory"),
        )


def _assigned_name(frame: Any) -> str | None:
    """The variable that the running call's result goes to."""
    code = frame.f_code.co_code
    at = frame.f_lasti
    import dis

    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset > at and instruction.opname.startswith("STORE_"):
            name = instruction.argval
            return name if isinstance(name, str) else None
        if instruction.offset > at + 16 or instruction.offset > len(code):
            break
    return None


class _LocalArrays:
    @staticmethod
    def array(shape: Any, dtype: Any, alignment: int | None = None) -> Local:
        """An array of the thread's own."""
        caller = sys._getframe(1)
        key = id(caller.f_code), caller.f_lasti
        name = _local_names.get(key)
        if name is None:
            name = _local_names[key] = _assigned_name(caller) or "local array"
        return make_local(shape, dtype_of(dtype), name)


_local_names: dict[tuple[int, int], str] = {}


def _relaxed(operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of ``cuda.atomic``: relaxed, for the whole GPU."""
    sums = operation.__name__ in ("add", "sub")

    def run(array: Any, index: Any, *values: Any) -> Any:
        if not isinstance(array, Tracked):
            return operation(array, index, *values)
        running: Any = machine()
        thread = running.current
        site = site_of(sys._getframe(1))
        thread.state.call = site, (array, index, *values)
        running.pause()
        running.flush()
        place = array.place(index)
        if place is None or not all(0 <= i < n for i, n in zip(place, array.shape, strict=True)):
            return running.out_of_bounds(array, index, True)
        is_float = sums and array.dtype.kind == "f"
        effect = fx.Atomic("", array.itemsize, "rmw", "relaxed", "gpu", is_float)
        offset = array.offset_of(place)
        atomics.touch(running, thread, array, offset, effect, site)
        location = atomics._location(running, array.shadow + offset, array.data[place])
        atomics.acquire(running, thread, location, location.stamp, effect, site)
        old = operation(array.data, place, *values)
        atomics.release(running, thread, location, array.data[place], effect, site)
        return old

    return run


class _Atomics:
    """``cuda.atomic``."""


for _name in vars(Atomic):
    if not _name.startswith("__"):
        setattr(_Atomics, _name, staticmethod(_relaxed(getattr(Atomic, _name))))


def _at_call(depth: int = 2) -> None:
    """Note where the current thread calls."""
    thread = machine().current
    thread.state.call = site_of(sys._getframe(depth)), ()


class CheckedCuda(CudaModule):
    """The names of `numba.cuda`, checked."""

    shared = _Shared
    local = _LocalArrays
    atomic = _Atomics

    def __init__(self) -> None:
        super().__init__(ops.bind)

    def syncthreads(self) -> None:
        _at_call()
        machine().barrier(0)

    def syncthreads_count(self, predicate: Any) -> np.int32:
        _at_call()
        return np.int32(machine().barrier(1 if predicate else 0))

    def syncthreads_and(self, predicate: Any) -> np.int32:
        _at_call()
        return np.int32(machine().barrier(0 if predicate else 1) == 0)

    def syncthreads_or(self, predicate: Any) -> np.int32:
        _at_call()
        return np.int32(machine().barrier(1 if predicate else 0) != 0)

    def nanosleep(self, ns: Any) -> None:
        _at_call()
        machine().sleep()

    def threadfence(self) -> None:
        self._fence("gpu")

    def threadfence_block(self) -> None:
        self._fence("cta")

    def threadfence_system(self) -> None:
        self._fence("sys")

    def _fence(self, scope: str) -> None:
        running: Any = machine()
        running.pause()
        running.flush()
        site = site_of(sys._getframe(2))
        atomics.fence_here(running, running.current, scope, site)
