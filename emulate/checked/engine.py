"""Runs a kernel once under one schedule, checked."""

import dataclasses
import time
import traceback
import weakref
from typing import Any

import numpy as np

from emulate.checked import arrays, ops
from emulate.checked.arrays import track
from emulate.checked.deadlock import report_deadlock, stopped_at
from emulate.checked.machine import CheckedMachine
from emulate.checked.marks import Unfinished, Uninitialised
from emulate.checked.reports import Halt
from emulate.checked.shim import CheckedCuda
from emulate.checked.sites import is_ours, site_of
from emulate.findings import Finding
from emulate.interpreted import operands, scalars
from emulate.interpreted.engine import exclusive
from emulate.interpreted.machine import StepsExhausted
from emulate.options import Options, Shape
from emulate.rebind import Rebinder
from emulate.report import Report
from emulate.schedule.choice import Scheduler
from nbmoe_kernels.device.op import INTERPRETERS, STUBS, Op

MIN_STEPS = 500_000
STEPS_A_THREAD = 4_000
_clones: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Checks:
    """Options of the checked engine.

    Attributes:
        strict_wgmma: every warp of a warpgroup waits for its own part of a product; else the wait
            of any lane is one of all.
        max_steps: switches between threads after which a launch is a livelock; by default it
            grows with the number of threads.
        ignore: ids of findings that are not wanted.
    """

    strict_wgmma: bool = False
    max_steps: int | None = None
    ignore: frozenset[str] = frozenset()


class _Interpreter:
    def call(self, op: Op, args: tuple[Any, ...]) -> Any:
        """Run an op that plain Python called."""
        return ops.bind(op)(*args)


def run(
    function: Any,
    shape: Shape,
    args: tuple[Any, ...],
    options: Options,
    scheduler: Scheduler,
    checks: Checks,
) -> tuple[Report, list[Finding]]:
    """One checked run; findings have no schedule's name yet."""
    with exclusive:
        start = time.perf_counter()
        steps = checks.max_steps or max(MIN_STEPS, STEPS_A_THREAD * shape.threads * shape.blocks)
        machine = CheckedMachine(
            shape,
            options,
            scheduler,
            steps,
            strict_wgmma=checks.strict_wgmma,
            ignore=checks.ignore,
            unit_effects=ops.unit_effects,
        )
        tracked = _track(machine, function, args)
        body = _clone(function)
        arrays.log.clear()
        arrays.set_hooks(machine)
        INTERPRETERS.append(_Interpreter())
        try:
            finished = machine.run(lambda: body(*tracked))
            if machine.failure is not None:
                _report_failure(machine, *machine.failure)
            elif not finished:
                report_deadlock(machine)
        finally:
            machine.close()
            arrays.log.clear()
            INTERPRETERS.pop()
            operands.forget_addresses()
    findings = list(machine.reports.findings.values())
    report = Report(
        engine="checked",
        seconds=time.perf_counter() - start,
        compile_seconds=0.0,
        cached=True,
        blocks=shape.blocks,
        resident=machine.most_alive,
    )
    return report, findings


def _clone(function: Any) -> Any:
    known = _clones.get(function)
    if known is None:
        cuda = CheckedCuda()
        modules = {
            "numba.cuda": cuda,
            "numpy": scalars.make_numpy(),
            "numba": scalars.make_numba(cuda),
        }
        known = _clones[function] = Rebinder(lambda f: f, modules, _replacement).clone(function)
    return known


def _replacement(value: Any) -> Any:
    op = getattr(value, "op", None)
    if isinstance(op, Op) and STUBS.get(op.name) is value:
        return ops.bind(op)
    return scalars.replace_scalar_type(value)


def _track(machine: CheckedMachine, function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with arrays checked; arrays that overlap share their shadow memory."""
    names = function.__code__.co_varnames
    spans = sorted(
        (*np.lib.array_utils.byte_bounds(arg), position)
        for position, arg in enumerate(args)
        if isinstance(arg, np.ndarray) and arg.size
    )
    regions: dict[int, Any] = {}
    group: list[tuple[int, int, int]] = []
    for low, high, position in [*spans, (1 << 63, 0, -1)]:
        if group and low >= max(end for _, end, _ in group):
            first = group[0][0]
            size = max(end for _, end, _ in group) - first
            init = not all(isinstance(args[p], Uninitialised) for _, _, p in group)
            name = names[group[0][2]]
            region = machine.shadow.add(name, first, size, 16, init=init, shared=False)
            region.origin = _allocation(args[group[0][2]])
            if any(isinstance(args[p], Unfinished) for _, _, p in group):
                machine.occupy(region, function)
            machine.real.append(region)
            machine.reports.items[name] = args[group[0][2]].itemsize
            regions |= {p: region for _, _, p in group}
            group = []
        group.append((low, high, position))
    tracked: list[Any] = []
    for position, arg in enumerate(args):
        if not isinstance(arg, np.ndarray):
            tracked.append(arg)
            continue
        data = arg.view(np.ndarray)
        address = int(data.__array_interface__["data"][0])
        found = regions.get(position)
        if found is None:
            found = machine.shadow.add(names[position], address, 0, 16, init=True, shared=False)
        tracked.append(track(data, found, address, names[position]))
    return tuple(tracked)


def _allocation(array: np.ndarray) -> int:
    """The address of the array that an argument is a view of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return int(np.lib.array_utils.byte_bounds(array)[0])


def _report_failure(machine: CheckedMachine, thread: Any, error: BaseException) -> None:
    machine.current = thread
    if arrays.log:
        machine.flush()
    if isinstance(error, Halt):
        return
    if isinstance(error, StepsExhausted):
        raised = _raised_at(error)
        machine.reports.add(
            "LIVELOCK",
            "the launch does not come to its end: threads go on and on",
            (stopped_at(thread) if raised is None else raised, machine.agent, "runs"),
        )
        return
    if not isinstance(error, Exception):
        raise error
    raised = _raised_at(error)
    if raised is None:
        raise error
    machine.reports.add(
        "KERNEL_ERROR",
        f"{type(error).__name__}: {error}",
        (raised, machine.agent, "raises"),
    )


def _raised_at(error: BaseException) -> int | None:
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if not is_ours(frame.f_code.co_filename):
            found = frame
    return None if found is None else site_of(found)
