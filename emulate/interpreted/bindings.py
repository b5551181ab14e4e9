"""Calls of device ops in kernels of the interpreted engine.

The twin runs compiled, as the same machine code as in the fast engine: a call writes its operands
to the op's record, or to the lane's row of its exchange (`emulate.fast.layout`), calls the twin's C
function and reads the result. The Python source of a call is generated from the op's signature: a
loop over operands would take longer than the twin.

Async products of a unit (``wgmma``) run when they are issued. What the program may not do before
their wait is the checked engine's business.
"""

import ctypes
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from emulate.errors import KernelError
from emulate.fast import layout, twins
from emulate.fast.exceptions import read_exception
from emulate.interpreted import operands
from emulate.interpreted.block import Thread, Unit
from emulate.interpreted.machine import machine
from emulate.interpreted.places import describer
from nbmoe_kernels.device.effects import NamedBarrier
from nbmoe_kernels.device.op import NUMPY_TYPES, Op, Scope, Timing

_WAIT = re.compile(r"(\w+)\.wait(\d+)")
_LAZY_GROUP = "cp"
"""Copies of this group land at the wait that covers them: there are too many to schedule each."""


@functools.cache
def bind(op: Op) -> Callable[..., Any]:
    """What interpreted kernels call for an op."""
    closes = group_action(op)
    if closes is not None:
        return closes
    if op.scope is not Scope.THREAD:
        return _call_unit_op(op)
    if op.timing is Timing.WAIT:
        return _call_wait(op)
    barrier = next((e for e in op.effects or () if isinstance(e, NamedBarrier)), None)
    if barrier is not None:
        return _call_barrier(op, barrier)
    if op.name == "nanosleep":
        return lambda nanoseconds: machine().sleep()
    call = _call_thread_op(op)
    return call if op.timing is Timing.NOW else _call_copy(op, call)


def group_action(op: Op) -> Callable[[], None] | None:
    """What commits or waits for groups of async work, else None."""
    name, _, action = (op.group or "").partition(".")
    if not action:
        return None
    wait = _WAIT.fullmatch(op.group or "")
    if wait:
        pending = int(wait[2])

        def complete() -> None:
            machine().pause()
            machine().current.wait_groups(name, pending)

        return complete
    if action == "commit":
        return lambda: machine().current.commit(name)
    raise KernelError(f"{op.name}: the interpreted engine does not know group {op.group!r}")


def _call_wait(op: Op) -> Callable[..., Any]:
    casts = [NUMPY_TYPES[p.dtype] for p in op.params if p.kind == "scalar"]
    pointers = sum(p.is_pointer for p in op.params)
    if pointers != 1 or not op.params[0].is_pointer:
        raise KernelError(f"{op.name}: a waiting op has one pointer, its first parameter")
    twin, describe = op.twin, describer(op)

    def wait(array: Any, index: Any, *values: Any) -> None:
        data = operands.data_of(array)
        at = operands.checked_index(op, data, index)
        given = [cast(operands.wrapped(v)) for cast, v in zip(casts, values, strict=True)]
        running = machine()
        about = {} if running.timeline is None else describe(array, at)
        running.poll(lambda: twin(data, at, *given), op.name, about)

    return wait


def _call_barrier(op: Op, effect: NamedBarrier) -> Callable[..., Any]:
    names = op.arguments

    def value(of: Any, args: tuple[Any, ...]) -> int:
        return int(args[names.index(of)]) if isinstance(of, str) else int(of)

    def meet(*args: Any) -> None:
        number, count = value(effect.barrier, args), value(effect.count, args)
        what = f"{op.name}({number}, {count})"
        if not 0 <= number < 16 or count % 32 or not 0 < count <= 1024:
            raise KernelError(
                f"{what}: expected a barrier from 0 to 15 and a multiple of 32 threads"
            )
        machine().named_barrier(number, count, effect.waits, what)

    return meet


def _call_copy(op: Op, call: Callable[..., Any]) -> Callable[..., Any]:
    """An async copy of one thread: of a group, or one that an mbarrier counts."""
    name = op.group
    if name == _LAZY_GROUP:

        def collect(*args: Any) -> None:
            running = machine()
            if running.options.copies == "eager" and not running.scheduled:
                call(*args)
            else:
                copy = _recorded(op, call, args, None)
                running.current.open_groups.setdefault(name, []).append(copy)

        return collect

    def issue(*args: Any) -> None:
        running = machine()
        running.pause()
        number = running.current.flights
        flight = running.fly(_recorded(op, call, args, number))
        if name is not None:
            complete = functools.partial(running.force, flight)
            running.current.open_groups.setdefault(name, []).append(complete)

    return issue


def _recorded(
    op: Op, call: Callable[..., Any], args: tuple[Any, ...], number: int | None
) -> Callable[[], None]:
    """The landing of a copy of the current thread, in the run's timeline if there is one."""
    timeline = machine().timeline
    if timeline is None:
        return lambda: call(*args)
    thread, about = machine().current, describer(op)(*args)
    timeline.issues(thread, op.name, number, about)

    def landing() -> None:
        call(*args)
        timeline.lands(thread, op.name, number, about)

    return landing


def _call_thread_op(op: Op) -> Callable[..., Any]:
    """The call of a thread op: operands to a record, the twin, the result from the record."""
    place = layout.record(op)
    memory = np.zeros(place.nbytes, np.uint8)
    views = operands.record_views(op, memory)
    writes = operands.write_lines(op, "0")
    lines = [f"def {op.name}({', '.join(op.arguments)}):", *_guarded(op, writes, "0")]
    lines += [f"    raised = run({memory.ctypes.data})", "    if raised:", "        fail(raised)"]
    lines += operands.read_lines(op, "0")
    scope = {**operands.scope(op), **views, "run": _twin(op), "fail": _fail}
    return _compile(op, lines, scope)


def _call_unit_op(op: Op) -> Callable[..., Any]:
    """The call of a warp's op: operands to the lane's row, the rendezvous, the lane's result."""
    pool = Meetings(op)
    names = operands.view_names(op)
    lines = [
        f"def {op.name}({', '.join(op.arguments)}):",
        "    thread = machine().current",
        "    meeting = join(thread)",
        f"    own_lane = thread.rank % {int(op.scope)}",  # `lane` may be an operand
    ]
    if names:
        lines.append(f"    {', '.join(names)}, = meeting.views")
    lines += [
        *_guarded(op, operands.write_lines(op, "own_lane"), "own_lane"),
        "    meet(meeting, thread)",
    ]
    lines += operands.read_lines(op, "own_lane")
    lines.insert(-1 if op.result else len(lines), "    leave(meeting)")
    scope = {
        **operands.scope(op),
        "machine": machine,
        "join": pool.join,
        "meet": pool.meet,
        "leave": pool.leave,
    }
    return _compile(op, lines, scope)


def _guarded(op: Op, writes: list[str], at: str) -> list[str]:
    """The writes; a negative Python int, which NumPy refuses, wraps as in CUDA."""
    if not writes:
        return []
    again = [f"        {line}" for line in operands.write_lines(op, at, wrap=True)]
    return [
        "    try:",
        *(f"        {line}" for line in writes),
        "    except OverflowError:",
        *again,
    ]


def _compile(op: Op, lines: list[str], scope: dict[str, Any]) -> Callable[..., Any]:
    exec(compile("\n".join(lines), f"<emulate {op.name}>", "exec"), scope)
    return scope[op.name]  # type: ignore[no-any-return]


@functools.cache
def _twin(op: Op) -> Callable[[int], int]:
    return ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(twins.ensure(op))


def _fail(raised: int) -> None:
    raise KernelError(read_exception(raised))


class Meeting:
    """The exchange of one collective of one warp or warpgroup; ``threads`` have come, in order."""

    def __init__(self, op: Op) -> None:
        self.op = op
        memory = np.zeros(max(layout.exchange(op).nbytes, 1), np.uint8)
        self.address = memory.ctypes.data
        self.memory = memory
        self.views = tuple(operands.exchange_views(op, memory).values())
        self.threads: list[Thread] = []
        self.readers = 0


class Meetings:
    """The collectives of one op; an exchange is used again when all lanes have read it."""

    def __init__(self, op: Op) -> None:
        self._op = op
        self._lanes = int(op.scope)
        self._is_group = op.scope is Scope.WARPGROUP
        self._free: list[Meeting] = []

    def join(self, thread: Thread) -> Meeting:
        """The meeting of the thread's unit, which begins with the first lane."""
        running = machine()
        unit = thread.group if self._is_group else thread.warp
        running.joins(self._op, unit)
        meeting = unit.meeting
        if meeting is None:
            self._check_whole(unit)
            meeting = unit.meeting = self._free.pop() if self._free else Meeting(self._op)
        return meeting  # type: ignore[no-any-return]

    def _check_whole(self, unit: Unit) -> None:
        if unit.lanes != self._lanes:
            raise KernelError(
                f"{self._op.name} needs a whole {'warpgroup' if self._is_group else 'warp'}; "
                f"the block's {machine().shape.threads} threads are no multiple of {self._lanes}"
            )

    def meet(self, meeting: Meeting, thread: Thread) -> None:
        """Wait for the unit's other lanes; the last one runs the twin."""
        meeting.threads.append(thread)
        running = machine()
        if len(meeting.threads) < self._lanes:
            running.wait(self._op.name)
            return
        unit = thread.group if self._is_group else thread.warp
        unit.meeting = None
        meeting.readers = self._lanes
        threads, meeting.threads = meeting.threads, []
        running.collective(self._op, threads)
        raised = _twin(self._op)(meeting.address)
        if raised:
            _fail(raised)
        threads.pop()
        running.wake(threads)

    def leave(self, meeting: Meeting) -> None:
        """A lane has read its result."""
        meeting.readers -= 1
        if meeting.readers == 0:
            self._free.append(meeting)
