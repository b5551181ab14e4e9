"""Kernels on the threads of Numba's simulator, one OS thread a CUDA thread.

The simulator starts the threads, runs one CTA after the other and has the block barrier. What it
lacks, warps, device ops and their waits, comes from the interpreted engine, whose machine here
waits on a condition instead of switching greenlets. Everything but plain Python code runs under one
lock. Async copies land when they are issued.
"""

import functools
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numba.cuda.simulator import kernel as stock

from emulate.errors import Deadlock, KernelError
from emulate.interpreted import bindings, scalars, shim
from emulate.interpreted.block import Block, Thread, make_threads
from emulate.interpreted.engine import exclusive
from emulate.interpreted.machine import Machine, running
from emulate.options import Options, Shape
from emulate.rebind import Rebinder
from nbmoe_kernels.device.op import INTERPRETERS, STUBS, Op

LIMIT = 20.0
"""A thread that waits for so long with nothing happening is in a deadlock [s]."""
_POLL = 0.01
"""A plain store wakes nobody, so waiting threads look again after this time [s]."""


class ThreadsMachine(Machine):
    """One launch; its methods are called with the lock held."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, Options())
        self.condition = threading.Condition(threading.RLock())
        self._members: list[Thread] = []
        self._waiting: set[int] = set()
        self._last_change = time.monotonic()

    @property
    def current(self) -> Thread:  # type: ignore[override]
        """The CUDA thread of the OS thread that asks."""
        return self._members[threading.current_thread().thread_id]  # type: ignore[attr-defined]

    def begin(self, index: tuple[int, int, int], linear: int) -> None:
        """The next CTA."""
        block = Block(index, linear, self.shape.threads, self.shape.shared_bytes)
        self._members = make_threads(block, self._thread_idx)
        self._waiting.clear()
        self._last_change = time.monotonic()

    def wait(self, what: str) -> None:
        thread = self.current
        self._waiting.add(id(thread))
        self._until(lambda: id(thread) not in self._waiting, what)

    def wake(self, threads: Iterable[Thread]) -> None:
        self._waiting -= {id(thread) for thread in threads}
        self.changed()

    def changed(self) -> None:
        self._last_change = time.monotonic()
        self.condition.notify_all()

    def pause(self) -> None:
        """The operating system interrupts threads."""

    def sleep(self) -> None:
        self.condition.wait(_POLL)
        self._stop_if_aborted()

    def poll(self, is_ready: Callable[[], Any], what: str, about: dict[str, str]) -> None:
        self._until(is_ready, what)

    def fly(self, land: Callable[[], None]) -> Any:
        land()
        self.changed()

    def force(self, flight: Any) -> None:
        """It has landed."""

    def _until(self, is_ready: Callable[[], Any], what: str) -> None:
        while not is_ready():
            self.condition.wait(_POLL)
            self._stop_if_aborted()
            if time.monotonic() - self._last_change > LIMIT:
                raise Deadlock(f"{what} waits and nothing has happened for {LIMIT:.0f} s")

    @staticmethod
    def _stop_if_aborted() -> None:
        if threading.current_thread().abort:  # type: ignore[attr-defined]
            raise KernelError("another thread of the block has failed")


class _Namespace:
    """Functions that run under the lock."""

    def __init__(self, functions: Any, locked: Callable[..., Any]) -> None:
        self._functions = functions
        self._locked = locked

    def __getattr__(self, name: str) -> Any:
        return self._locked(getattr(self._functions, name))


class _Shared:
    """`cuda.shared`; a place in the code is an array, so two on one line are two."""

    def __init__(self, machine: ThreadsMachine) -> None:
        self._machine = machine

    def array(self, shape: Any, dtype: Any, alignment: int | None = None) -> np.ndarray:
        """An array in the CTA's shared memory; shape 0 is the dynamic part."""
        caller = sys._getframe(1)
        with self._machine.condition:
            return shim.shared_array(shape, dtype, (caller.f_code, caller.f_lasti))


class _Cuda(shim.CudaModule):
    """`numba.cuda` for kernels on the simulator's threads: its barrier, our everything else."""

    def __init__(self, machine: ThreadsMachine) -> None:
        locked = functools.partial(_locked, machine)
        super().__init__(lambda op: locked(bindings.bind(op)))
        self._blocks = machine.shape.blocks
        self.shared = _Shared(machine)
        self.atomic = _Namespace(shim.CudaModule.atomic, locked)
        self.nanosleep = locked(super().nanosleep)  # type: ignore[method-assign]
        self.cg: Any = self

    def this_grid(self) -> Any:
        """The group of all threads, if that is one CTA."""
        if self._blocks > 1:
            raise KernelError("the simulator's threads run one CTA at a time: no grid.sync()")
        return self

    def sync(self) -> None:
        """Wait for all threads of the grid."""
        self.syncthreads()

    def syncthreads(self) -> None:
        threading.current_thread().syncthreads()  # type: ignore[attr-defined]

    def syncthreads_count(self, predicate: Any) -> np.int32:
        return np.int32(_stock_thread().syncthreads_count(predicate))

    def syncthreads_and(self, predicate: Any) -> np.int32:
        return np.int32(_stock_thread().syncthreads_and(predicate))

    def syncthreads_or(self, predicate: Any) -> np.int32:
        return np.int32(_stock_thread().syncthreads_or(predicate))


def _stock_thread() -> Any:
    return threading.current_thread()


def _locked(machine: ThreadsMachine, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with machine.condition:
            return function(*args)

    return call


class _Interpreter:
    def __init__(self, machine: ThreadsMachine) -> None:
        self._machine = machine

    def call(self, op: Op, args: tuple[Any, ...]) -> Any:
        with self._machine.condition:
            return bindings.bind(op)(*args)


def launch(function: Any, shape: Shape, args: tuple[Any, ...]) -> None:
    """Run a kernel to its end.

    Raises:
        Exception: what a thread raised, as the simulator reports it.
    """
    machine = ThreadsMachine(shape)
    kernel = _clone(function, machine)

    def body() -> None:
        # Arithmetic wraps silently, as on the GPU; the setting is the OS thread's.
        with np.errstate(all="ignore"):
            kernel(*args)

    with exclusive, running(machine):
        INTERPRETERS.append(_Interpreter(machine))
        try:
            places = itertools.product(*(range(extent) for extent in reversed(shape.grid)))
            for linear, (z, y, x) in enumerate(places):
                machine.begin((x, y, z), linear)
                stock.BlockManager(body, shape.grid, shape.block, False).run((x, y, z))
        finally:
            INTERPRETERS.pop()


def _clone(function: Any, machine: ThreadsMachine) -> Any:
    cuda = _Cuda(machine)
    modules = {
        "numba.cuda": cuda,
        "numpy": scalars.make_numpy(),
        "numba": scalars.make_numba(cuda),
    }

    def replacement(value: Any) -> Any:
        op = getattr(value, "op", None)
        if isinstance(op, Op) and STUBS.get(op.name) is value:
            return _locked(machine, bindings.bind(op))
        return scalars.replace_scalar_type(value)

    return Rebinder(lambda helper: helper, modules, replacement).clone(function)
