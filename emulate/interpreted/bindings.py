"""Calls of device ops in kernels of the interpreted engine.

The twin runs compiled, as the same machine code as in the fast engine: a call writes its operands
to the op's record, or to the lane's row of its exchange (`emulate.fast.layout`), calls the twin's C
function and reads the result. The Python source of a call is generated from the op's signature: a
loop over operands would take longer than the twin.
"""

import ctypes
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from emulate.errors import CollectiveDivergence, KernelError
from emulate.fast import layout, twins
from emulate.fast.exceptions import read_exception
from emulate.interpreted import operands
from emulate.interpreted.machine import WARP_LANES, Thread, machine
from nbmoe_kernels.device.op import Op, Scope, Timing

_WAIT = re.compile(r"cp\.wait(\d+)")


@functools.cache
def bind(op: Op) -> Callable[..., Any]:
    """What interpreted kernels call for an op."""
    if op.scope is Scope.WARP:
        return _call_warp_op(op)
    wait = _WAIT.fullmatch(op.group or "")
    if wait:
        return lambda: _wait(machine().current, int(wait[1]))
    if op.group == "cp.commit":
        return lambda: _commit(machine().current)
    call = _call_thread_op(op)
    if op.timing is Timing.NOW:
        return call
    if op.group != "cp":
        raise KernelError(f"{op.name}: the interpreted engine knows async ops of group cp only")

    def issue(*args: Any) -> None:
        if machine().options.copies == "eager":
            call(*args)
        else:
            machine().current.copies.append(lambda: call(*args))

    return issue


def _commit(thread: Thread) -> None:
    thread.groups.append(thread.copies)
    thread.copies = []


def _wait(thread: Thread, pending: int) -> None:
    while len(thread.groups) > pending:
        for copy in thread.groups.pop(0):
            copy()


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


def _call_warp_op(op: Op) -> Callable[..., Any]:
    """The call of a warp op: operands to the lane's row, the rendezvous, the lane's result."""
    pool = _Meetings(op)
    names = operands.view_names(op)
    lines = [
        f"def {op.name}({', '.join(op.arguments)}):",
        "    thread = machine().current",
        "    lane = thread.lane",
        "    meeting = join(thread)",
    ]
    if names:
        lines.append(f"    {', '.join(names)}, = meeting.views")
    lines += [*_guarded(op, operands.write_lines(op, "lane"), "lane"), "    meet(meeting, thread)"]
    lines += operands.read_lines(op, "lane")
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


class _Meeting:
    """The exchange of one collective of one warp."""

    def __init__(self, op: Op) -> None:
        self.op = op
        memory = np.zeros(layout.exchange(op).nbytes, np.uint8)
        self.address = memory.ctypes.data
        self.memory = memory
        self.views = tuple(operands.exchange_views(op, memory).values())
        self.waiting: list[Thread] = []
        self.readers = 0


class _Meetings:
    """The collectives of one op; an exchange is used again when all lanes have read it."""

    def __init__(self, op: Op) -> None:
        self._op = op
        self._run = _twin(op)
        self._free: list[_Meeting] = []

    def join(self, thread: Thread) -> _Meeting:
        warp = thread.warp
        meeting = warp.meeting
        if meeting is None:
            if warp.lanes != WARP_LANES:
                raise KernelError(
                    f"{self._op.name} needs a whole warp; the block's "
                    f"{machine().shape.threads} threads are no multiple of {WARP_LANES}"
                )
            meeting = warp.meeting = self._free.pop() if self._free else _Meeting(self._op)
        elif meeting.op is not self._op:
            raise CollectiveDivergence(
                f"{self._op.name} is called while other lanes of the warp wait in {meeting.op.name}"
            )
        return meeting  # type: ignore[no-any-return]

    def meet(self, meeting: _Meeting, thread: Thread) -> None:
        if len(meeting.waiting) + 1 < WARP_LANES:
            meeting.waiting.append(thread)
            machine().wait(self._op.name)
            return
        thread.warp.meeting = None
        meeting.readers = WARP_LANES
        raised = self._run(meeting.address)
        if raised:
            _fail(raised)
        waiting, meeting.waiting = meeting.waiting, []
        machine().wake(waiting)

    def leave(self, meeting: _Meeting) -> None:
        meeting.readers -= 1
        if meeting.readers == 0:
            self._free.append(meeting)
