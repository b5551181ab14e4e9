"""Runs a kernel as Python: binds its names, runs the machine, reports what went wrong."""

import threading
import time
import traceback
import weakref
from collections import defaultdict
from pathlib import Path
from typing import Any

from emulate.errors import Deadlock, EmulationError, KernelError
from emulate.interpreted import bindings, operands, scalars, shim
from emulate.interpreted.block import Thread
from emulate.interpreted.machine import Machine
from emulate.interpreted.places import argument_names
from emulate.options import Options, Shape
from emulate.rebind import Rebinder
from emulate.report import Report
from emulate.schedule import Random
from emulate.text import ranges
from nbmoe_kernels.device.op import INTERPRETERS, STUBS, Op

_PACKAGE = str(Path(__file__).parent)
exclusive = threading.RLock()
"""Held by the launch that runs: the op table has one stack of interpreters."""
_clones: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


class Interpreter:
    """The engine as `nbmoe_kernels.device.op` sees it: it runs the ops that plain Python calls."""

    def call(self, op: Op, args: tuple[Any, ...]) -> Any:
        """Run an op for the current thread."""
        return bindings.bind(op)(*args)


def launch(function: Any, shape: Shape, args: tuple[Any, ...], options: Options) -> Report:
    """Run a kernel to its end; see `emulate.launch`."""
    with exclusive:
        start = time.perf_counter()
        scheduler = None if options.seed is None else Random(options.seed)
        machine = Machine(shape, options, scheduler)
        machine.names = argument_names(function, args)
        body = _clone(function)
        INTERPRETERS.append(Interpreter())
        try:
            finished = machine.run(lambda: body(*args))
            if machine.failure is not None:
                raise _error(function, *machine.failure)
            if not finished:
                raise Deadlock(_describe_deadlock(function, machine))
        finally:
            machine.close()
            INTERPRETERS.pop()
            operands.forget_addresses()
    return Report(
        engine="interpreted",
        seconds=time.perf_counter() - start,
        compile_seconds=0.0,
        cached=True,
        blocks=shape.blocks,
        resident=machine.most_alive,
    )


def _clone(function: Any) -> Any:
    known = _clones.get(function)
    if known is None:
        cuda = shim.CudaModule()
        modules = {
            "numba.cuda": cuda,
            "numpy": scalars.make_numpy(),
            "numba": scalars.make_numba(cuda),
        }
        rebinder = Rebinder(lambda helper: helper, modules, _replacement)
        known = _clones[function] = rebinder.clone(function)
    return known


def _replacement(value: Any) -> Any:
    op = getattr(value, "op", None)
    if isinstance(op, Op) and STUBS.get(op.name) is value:
        return bindings.bind(op)  # without the detour through the stub
    return scalars.replace_scalar_type(value)


def _error(function: Any, thread: Thread, error: BaseException) -> BaseException:
    if not isinstance(error, Exception):
        return error
    where = f"{_thread_name(thread)} of {function.__name__}{_raised_at(error)}"
    if isinstance(error, EmulationError):
        located = type(error)(f"{error}, in {where}")
    else:
        located = KernelError(f"{type(error).__name__}: {error}, in {where}")
    located.__cause__ = error
    return located


def _raised_at(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith((_PACKAGE, "<emulate")):
            return f" ({frame.filename}:{frame.lineno})"
    return ""


def _thread_name(thread: Thread) -> str:
    return f"block {thread.block.index} thread {thread.thread_idx.index}"


def _describe_deadlock(function: Any, machine: Machine) -> str:
    groups: dict[tuple[Any, str], list[int]] = defaultdict(list)
    for thread in machine.threads.values():
        groups[thread.block.index, thread.waits_in + _waits_at(thread)].append(thread.rank)
    lines = [f"{len(machine.threads)} threads of {function.__name__} wait and none can run:"]
    for (block, what), ranks in list(groups.items())[:20]:
        lines.append(f"  block {block}, {ranges(sorted(ranks))}: {what}")
    if len(groups) > 20:
        lines.append(f"  and {len(groups) - 20} groups more")
    return "\n".join(lines)


def _waits_at(thread: Thread) -> str:
    frame = thread.run.gr_frame
    while frame is not None and frame.f_code.co_filename.startswith((_PACKAGE, "<emulate")):
        frame = frame.f_back
    return "" if frame is None else f" (line {frame.f_lineno} of {frame.f_code.co_filename})"
