"""The op table: every device op is declared once and runs on every executor.

An op has four faces, all in one declaration:

* its signature, from which operand types, LLVM constraints and the emulator's marshalling follow;
* its PTX text, which `nbmoe_kernels.device.ptx` turns into inline assembly;
* its CPU twin, a plain function that numba's CPU target can also compile;
* its effects, what it reads and writes through pointers, for the race checker.

Signature grammar: ``RESULT(PARAM, ...)`` with

    RESULT   void | TYPE | TYPE[n]            TYPE[n] is a tuple: unpack it, never index it
    PARAM    TYPE name                        a scalar
             TYPE! name                       a scalar that must be equal on all lanes of the warp
             TYPE[n] name                     a register tile: a local array, updated in place
             shared TYPE* name                an address in shared memory
             global TYPE* name                an address in global memory
    TYPE     u8 u16 u32 u64 i32 i64 f32 f64

A pointer parameter takes two arguments at the call, ``array, index``: the array and the index of
the element that the address names. So the twin is memory safe and the PTX gets an address.

Twins see the operands of all participating lanes. In THREAD scope that is one lane: scalars, tiles
as 1-D arrays, pointers as ``array, index``. In WARP scope scalars are arrays of 32 (uniform ones
stay scalars), tiles are ``(32, n)``, pointers are ``array, indices[32]``, and results are arrays of
32 or ``(32, n)``; in WARPGROUP scope the same with 128.
"""

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from nbmoe_kernels.device.effects import Effect

NUMPY_TYPES: dict[str, Any] = {
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "u64": np.uint64,
    "i32": np.int32,
    "i64": np.int64,
    "f32": np.float32,
    "f64": np.float64,
}


class Scope(IntEnum):
    """How many lanes run an op together; the value is that number."""

    THREAD = 1
    WARP = 32
    WARPGROUP = 128


class Timing(IntEnum):
    """When the twin runs.

    ``NOW``: at the call. ``ASYNC``: at any moment from the call until what completes it (its
    group's wait, or the phase of an mbarrier that counts its bytes). ``WAIT``: the twin says
    whether the thread may go on; until then the thread is blocked.
    """

    NOW = 0
    ASYNC = 1
    WAIT = 2


@dataclass(frozen=True)
class Param:
    """One parameter. ``kind`` is ``scalar``, ``tile``, ``shared`` or ``global``."""

    name: str
    kind: str
    dtype: str
    length: int = 0
    uniform: bool = False

    @property
    def is_pointer(self) -> bool:
        return self.kind in ("shared", "global")


@dataclass(frozen=True, eq=False)
class Op:
    """A declared device op; ``stub`` is the function that kernels call."""

    name: str
    scope: Scope
    params: tuple[Param, ...]
    result: tuple[str, int] | None
    ptx: str
    twin: Callable[..., Any]
    timing: Timing
    group: str | None
    effects: tuple[Effect, ...] | None
    min_cc: tuple[int, int]

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        """Names of the call's arguments: a pointer parameter has two."""
        names: list[str] = []
        for p in self.params:
            names += [p.name, f"{p.name}_index"] if p.is_pointer else [p.name]
        return tuple(names)

    @functools.cached_property
    def is_pure(self) -> bool:
        """No memory, no other lanes, no order: may be moved, repeated or dropped."""
        return self.scope is Scope.THREAD and self.effects is None and self.group is None


TABLE: dict[str, Op] = {}
INTERPRETERS: list[Any] = []
"""Interpreted engines, innermost last; calls from plain Python go to the last one's ``call``."""

_TYPE = "|".join(NUMPY_TYPES)
_RESULT = re.compile(rf"\s*(?:void|({_TYPE})(?:\[(\d+)\])?)\s*\((.*)\)\s*", re.S)
_PARAM = re.compile(rf"\s*(?:(shared|global)\s+)?({_TYPE})(?:\[(\d+)\])?(!)?(\*)?\s+(\w+)\s*")


def parse_params(text: str) -> tuple[Param, ...]:
    """Parse a comma-separated parameter list of the grammar in the module's docstring."""
    params = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        m = _PARAM.fullmatch(part)
        if not m or bool(m[1]) != bool(m[5]):
            raise ValueError(f"parameter {part!r} does not follow the signature grammar")
        kind = m[1] or ("tile" if m[3] else "scalar")
        params.append(Param(m[6], kind, m[2], int(m[3] or 0), bool(m[4])))
    return tuple(params)


def device_op(
    signature: str,
    *,
    ptx: str,
    scope: Scope = Scope.THREAD,
    timing: Timing = Timing.NOW,
    group: str | None = None,
    effects: tuple[Effect, ...] | None = None,
    min_cc: tuple[int, int] = (8, 0),
    name: str | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a device op; the decorated function is its CPU twin.

    Args:
        signature: operand and result types, in the grammar of the module's docstring.
        ptx: the instruction, with ``<name>`` for an operand (an address for a pointer) and
            ``<ret>`` for the result; tiles and tuples expand to ``{r0, r1, ...}``, and
            ``<name[i]>`` is one register of theirs.
        scope: lanes that must call it together.
        timing: see `Timing`.
        group: ``NAME`` for a member of the thread's (warpgroup's) open group of that name,
            ``NAME.commit`` closes the group, ``NAME.wait<n>`` waits until at most n are open.
            Names: ``cp`` (cp.async), ``bulk`` (bulk stores), ``wgmma``.
        effects: see `nbmoe_kernels.device.effects`; ``None`` means none, ``()`` that the op only
            orders.
        min_cc: first compute capability that has the instruction.
        name: table name, default the twin's.

    Returns:
        The stub that kernels call; its ``op`` attribute is the table entry.
    """
    m = _RESULT.fullmatch(signature)
    if not m:
        raise ValueError(f"signature {signature!r} does not follow the signature grammar")
    result = (m[1], int(m[2] or 0)) if m[1] else None
    params = parse_params(m[3])

    def declare(twin: Callable[..., Any]) -> Callable[..., Any]:
        op = Op(
            name or twin.__name__, scope, params, result, ptx, twin, timing, group, effects, min_cc
        )
        if op.name in TABLE:
            raise ValueError(f"device op {op.name!r} is declared twice")
        TABLE[op.name] = op
        return _make_stub(op)

    return declare


def op_factory(make: Callable[..., Any]) -> Callable[..., Any]:
    """Cache a function that declares an op: equal arguments, however spelled, give one op."""
    signature = inspect.signature(make)
    made: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(make)
    def cached(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        key = tuple(bound.arguments.values())
        if key not in made:
            made[key] = make(*args, **kwargs)
        return made[key]

    return cached


def _make_stub(op: Op) -> Callable[..., Any]:
    # A function object per op, with the op's own argument names: numba resolves calls by the
    # identity of the function and checks the number of its arguments.
    arguments = ", ".join(op.arguments)
    namespace: dict[str, Any] = {"op": op, "call_interpreted": call_interpreted}
    operands = f"({arguments},)" if arguments else "()"
    exec(f"def {op.name}({arguments}): return call_interpreted(op, {operands})", namespace)
    stub = namespace[op.name]
    stub.op = op
    stub.__doc__ = op.twin.__doc__
    stub.__module__ = op.twin.__module__
    STUBS[op.name] = stub
    return stub


STUBS: dict[str, Callable[..., Any]] = {}


def call_interpreted(op: Op, args: tuple[Any, ...]) -> Any:
    """Run an op that plain Python called: in the active interpreter, or alone if it is pure."""
    if INTERPRETERS:
        return INTERPRETERS[-1].call(op, args)
    if not op.is_pure:
        raise RuntimeError(f"device op {op.name} needs a running kernel")
    return op.twin(*args)


def device_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a helper that kernels call; every executor compiles it together with the kernel."""
    fn.is_device_function = True  # type: ignore[attr-defined]
    return fn


def unroll(iterable: range) -> range:
    """Mark ``for i in unroll(range(N))`` to be fully unrolled on the GPU, so that local arrays
    indexed by ``i`` stay in registers. Elsewhere it is its argument."""
    return iterable
