"""What calls of device ops become in kernels of the fast engine.

* thread scope: the twin itself, compiled into the kernel, where LLVM may inline it; of a waiting op
  in a loop, with the thread parked while the twin says no;
* warp and warpgroup scope: stores to the lane's row of the exchange, the rendezvous, loads of the
  result;
* async ops: a record of the operands, in a queue of the thread, among the copies that an mbarrier
  counts, or in the ring of the unit; commits and waits are functions of the runtime;
* named barriers and ``nanosleep``: functions of the runtime.
"""

import hashlib
import re
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from emulate.errors import UnsupportedOp
from emulate.fast import layout, twins
from emulate.fast import records as rec
from emulate.fast.build import current
from emulate.fast.locate import source_line
from emulate.fast.words import (
    I8,
    I64,
    emit_call,
    emit_fiber,
    emit_load,
    emit_word,
    word,
)
from nbmoe_kernels.device import effects
from nbmoe_kernels.device.op import Op, Param, Scope, Timing

Emit = Callable[[Any, Any, Any, Any], Any]
"""(context, builder, signature, args) -> the call's value: Numba's way to lower a call."""

_WAIT = re.compile(r"(\w+)\.wait(\d+)")
_QUEUES = {"cp": rec.QUEUE_CP, "bulk": rec.QUEUE_BULK}
_UNITS = {Scope.WARP: rec.FIBER_WARP, Scope.WARPGROUP: rec.FIBER_WARPGROUP}
_EVENTS = (effects.MbarInit, effects.MbarArrive, effects.MbarComplete, effects.Atomic)
"""Effects that may let a waiting thread go on."""


def op_number(op: Op) -> int:
    """The number of an op in FIBER_WAITS_IN and UNIT_OP; the same in every process."""
    return int.from_bytes(hashlib.sha256(op.name.encode()).digest()[:6], "little")


def call_of(op: Op) -> Emit:
    """What a call of the op becomes.

    Raises:
        UnsupportedOp: the engine has no such kind of op.
    """
    if op.group is not None and op.timing is not Timing.ASYNC:
        return _group_call(op)
    if op.timing is Timing.ASYNC:
        return _async_call(op)
    if op.scope is not Scope.THREAD:
        if op.timing is Timing.WAIT:
            raise UnsupportedOp(f"{op.name}: only an op of one thread can wait")
        return _UnitCall(op)
    barrier = next((e for e in op.effects or () if isinstance(e, effects.NamedBarrier)), None)
    if barrier is not None:
        return _NamedBarrier(op, barrier)
    if op.name == "nanosleep":
        return _sleep
    return _WaitCall(op) if op.timing is Timing.WAIT else _ThreadCall(op)


def _async_call(op: Op) -> Emit:
    if op.scope is not Scope.THREAD:
        return _ProductIssue(op)
    if op.group is None:
        return _FlightIssue(op)
    if op.group not in _QUEUES:
        raise UnsupportedOp(f"{op.name}: an async op of one thread cannot be in group {op.group!r}")
    return _CopyIssue(op)


def _group_call(op: Op) -> Emit:
    name, _, action = str(op.group).partition(".")
    wait = _WAIT.fullmatch(str(op.group))
    if action == "commit" or wait:
        pending = int(wait[2]) if wait else None
        if pending is not None and pending >= rec.GROUP_RING:
            raise UnsupportedOp(f"{op.name}: leaves more than {rec.GROUP_RING - 1} groups open")
        if name in _QUEUES and op.scope is Scope.THREAD:
            return _CopyGroup(_QUEUES[name], pending)
        if name == "wgmma" and op.scope is not Scope.THREAD:
            return _ProductGroup(op, pending)
    raise UnsupportedOp(f"{op.name}: the fast engine does not know group {op.group!r} in its scope")


class Operands:
    """The LLVM values of a call, by parameter."""

    def __init__(self, op: Op, context: Any, builder: Any, kinds: Any, args: Any) -> None:
        self._context = context
        self._builder = builder
        self._kinds = dict(zip(op.arguments, kinds, strict=True))
        self._values = dict(zip(op.arguments, args, strict=True))

    def kind(self, param: Param) -> Any:
        return self._kinds[param.name]

    def value(self, param: Param) -> ir.Value:
        return self._values[param.name]

    def index(self, param: Param) -> ir.Value:
        return emit_word(self._builder, self._values[f"{param.name}_index"])

    def pointer_words(self, param: Param) -> list[ir.Value]:
        """The address of the array, its length and the index, as words."""
        array = self._array(param)
        return [self._builder.ptrtoint(array.data, I64), array.nitems, self.index(param)]

    def data(self, tile: Param) -> ir.Value:
        """The address of a tile's first element; a tile that is too short is an error."""
        array = self._array(tile)
        short = self._builder.icmp_signed("<", array.nitems, word(tile.length))
        with cgutils.if_unlikely(self._builder, short):
            self._context.call_conv.return_user_exc(
                self._builder,
                IndexError,
                (f"register tile {tile.name} has fewer than {tile.length} elements",),
            )
        return self._builder.bitcast(array.data, I8.as_pointer())

    def _array(self, param: Param) -> Any:
        make = self._context.make_array(self.kind(param))
        return make(self._context, self._builder, self.value(param))


def _inline(op: Op, context: Any, builder: Any, signature: Any, args: Any, result: Any) -> Any:
    """LLVM code: the twin of a thread op, compiled into the kernel; its value and its type."""
    operands = Operands(op, context, builder, signature.args, args)
    kinds: list[types.Type] = []
    values: list[ir.Value] = []
    for param in op.params:
        kinds.append(operands.kind(param))
        values.append(operands.value(param))
        if param.is_pointer:
            kinds.append(types.int64)
            values.append(operands.index(param))
    inner = result(*kinds)
    compiled = twins.inline_twin(op, inner, boundscheck=current().boundscheck)
    context.active_code_library.add_linking_library(compiled.library)
    return context.call_internal(builder, compiled.fndesc, inner, values)


class _ThreadCall:
    """An op of one thread: the twin, compiled into the kernel."""

    def __init__(self, op: Op) -> None:
        self._op = op
        self._is_event = any(isinstance(effect, _EVENTS) for effect in op.effects or ())

    def __call__(self, context: Any, builder: Any, signature: Any, args: Any) -> Any:
        result = _inline(self._op, context, builder, signature, args, signature.return_type)
        if self._is_event:
            emit_call(builder, "emulate_progress", [], ir.VoidType())
        return context.get_dummy_value() if self._op.result is None else result


class _WaitCall:
    """An op that waits: the thread is parked and asks again until the twin says that it may go."""

    def __init__(self, op: Op) -> None:
        if op.result is not None:
            raise UnsupportedOp(f"{op.name}: an op that waits has no result")
        self._op = op

    def __call__(self, context: Any, builder: Any, signature: Any, args: Any) -> Any:
        op = self._op
        words = _operand_words(op, builder, args)
        ready = _inline(op, context, builder, signature, args, types.boolean)
        with cgutils.if_unlikely(builder, builder.not_(builder.trunc(ready, ir.IntType(1)))):
            fiber = emit_fiber(builder)
            again = builder.append_basic_block("wait.again")
            done = builder.append_basic_block("wait.done")
            builder.branch(again)
            builder.position_at_end(again)
            for i, value in enumerate(words):
                at = builder.add(fiber, word(rec.FIBER_OPERANDS + 8 * i))
                builder.store(value, builder.inttoptr(at, I64.as_pointer()))
            line = word(source_line(builder))
            emit_call(builder, "emulate_retry", [word(op_number(op)), line], ir.VoidType())
            ready = _inline(op, context, builder, signature, args, types.boolean)
            builder.cbranch(builder.trunc(ready, ir.IntType(1)), done, again)
            builder.position_at_end(done)
            # Whoever waits for this thread may be able to go on soon.
            emit_call(builder, "emulate_progress", [], ir.VoidType())
        return context.get_dummy_value()


def _operand_words(op: Op, builder: Any, args: Any) -> list[ir.Value]:
    """The operands that a deadlock's message shows: scalars, and the indices of pointers."""
    pointers = {param.name for param in op.params if param.kind != "scalar"}
    given = zip(op.arguments, args, strict=True)
    values = [value for name, value in given if name not in pointers]
    return [emit_word(builder, value) for value in values[: rec.OPERAND_WORDS]]


def shown_operands(op: Op) -> list[str]:
    """The names of these operands."""
    pointers = {param.name for param in op.params if param.kind != "scalar"}
    return [name for name in op.arguments if name not in pointers][: rec.OPERAND_WORDS]


class _NamedBarrier:
    """``bar.sync`` and ``bar.arrive``."""

    def __init__(self, op: Op, effect: effects.NamedBarrier) -> None:
        self._op = op
        self._effect = effect

    def __call__(self, context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given = dict(zip(self._op.arguments, args, strict=True))

        def number(of: effects.Number) -> ir.Value:
            return emit_word(builder, given[of]) if isinstance(of, str) else word(of)

        operands = [
            number(self._effect.barrier),
            number(self._effect.count),
            word(int(self._effect.waits)),
            word(op_number(self._op)),
            word(source_line(builder)),
        ]
        emit_call(builder, "emulate_named_barrier", operands, ir.VoidType())
        return context.get_dummy_value()


def _sleep(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    emit_call(
        builder, "emulate_retry", [word(rec.WAIT_RETRY), word(source_line(builder))], ir.VoidType()
    )
    return context.get_dummy_value()


class _Rows:
    """A lane's rows of an exchange: operands go in, tiles and results come out."""

    def __init__(self, op: Op, context: Any, builder: Any, base: ir.Value) -> None:
        self._op = op
        self._context = context
        self._builder = builder
        self._base = base
        rank = emit_load(builder, emit_fiber(builder), rec.FIBER_RANK)
        self.lane = builder.and_(rank, word(int(op.scope) - 1))
        self._layout = layout.exchange(op)

    def _row(self, offset: int, stride: int, kind: ir.Type) -> ir.Value:
        at = self._builder.add(self._base, self._builder.mul(self.lane, word(stride)))
        return self._builder.inttoptr(self._builder.add(at, word(offset)), kind.as_pointer())

    def write(self, operands: Operands) -> None:
        """Store all operands but the tiles."""
        for field in self._layout.fields:
            param = field.param
            if param.is_pointer:
                for i, value in enumerate(operands.pointer_words(param)):
                    self._builder.store(value, self._row(field.part(i), field.stride, I64))
            elif param.kind == "scalar":
                value = operands.value(param)
                self._builder.store(value, self._row(field.offset, field.stride, value.type))

    def copy_tiles(self, operands: Operands, *, out: bool) -> None:
        """Copy the tiles into the exchange, or out of it."""
        for field in self._layout.fields:
            if field.param.kind == "tile":
                row = self._row(field.offset, field.stride, I8)
                tile = operands.data(field.param)
                to, source = (tile, row) if out else (row, tile)
                cgutils.raw_memcpy(self._builder, to, source, word(field.stride), 1)

    def results(self) -> list[ir.Value]:
        """The values of the lane's result."""
        dtype, count = self._op.result or ("", 0)
        element = self._context.get_value_type(layout.NUMBA_TYPES[dtype])
        stride = layout.itemsize(dtype) * max(count, 1)
        first = self._row(self._layout.result, stride, element)
        builder = self._builder
        return [builder.load(builder.gep(first, [word(i)])) for i in range(max(count, 1))]


def emit_collective(op: Op, context: Any, builder: Any, operands: Operands) -> list[ir.Value]:
    """LLVM code: an op of a warp or warpgroup; the values of its result."""
    twins.ensure(op)
    current().need_exchange(op.scope, layout.exchange(op).nbytes)
    place = _UNITS[op.scope]
    unit = emit_load(builder, emit_fiber(builder), place)
    parity = builder.and_(emit_load(builder, unit, rec.UNIT_GENERATION), word(1))
    half = builder.mul(parity, emit_load(builder, unit, rec.UNIT_HALF))
    base = builder.add(emit_load(builder, unit, rec.UNIT_EXCHANGE), half)
    rows = _Rows(op, context, builder, base)
    rows.write(operands)
    rows.copy_tiles(operands, out=False)
    line = word(source_line(builder))
    what = [word(op_number(op)), _symbol(builder, op), word(place), line]
    emit_call(builder, "emulate_meet", what, ir.VoidType())
    rows.copy_tiles(operands, out=True)
    return rows.results() if op.result else []


class _UnitCall:
    """An op of a warp or warpgroup: operands go to the exchange, the last lane runs the twin."""

    def __init__(self, op: Op) -> None:
        self._op = op

    def __call__(self, context: Any, builder: Any, signature: Any, args: Any) -> Any:
        operands = Operands(self._op, context, builder, signature.args, args)
        values = emit_collective(self._op, context, builder, operands)
        if self._op.result is None:
            return context.get_dummy_value()
        if not self._op.result[1]:
            return values[0]
        return context.make_tuple(builder, signature.return_type, values)


class _ProductIssue:
    """An async op of a unit: operands and the addresses of the tiles go to its next record."""

    def __init__(self, op: Op) -> None:
        self._op = op
        self._nbytes = layout.product_bytes(op)

    def __call__(self, context: Any, builder: Any, signature: Any, args: Any) -> Any:
        op = self._op
        operands = Operands(op, context, builder, signature.args, args)
        twins.ensure(op)
        current().need_product(op.scope, layout.exchange(op).nbytes, self._nbytes)
        place = word(_UNITS[op.scope])
        line = word(source_line(builder))
        record = emit_call(builder, "emulate_product_record", [place, line], I64)
        rows = _Rows(op, context, builder, builder.add(record, word(layout.product_operands(op))))
        rows.write(operands)
        tiles = layout.tiles(op)
        header = {
            rec.PRODUCT_RUN: _symbol(builder, op),
            rec.PRODUCT_OPERAND_BYTES: word(layout.exchange(op).operand_bytes),
            rec.PRODUCT_TILES: word(len(tiles)),
            rec.PRODUCT_FIBER: emit_fiber(builder),
            rec.PRODUCT_LINE: line,
        }
        fields = [field for field in layout.exchange(op).fields if field.param in tiles]
        for i, field in enumerate(fields):
            header[rec.PRODUCT_TILE + 16 * i] = word(field.offset)
            header[rec.PRODUCT_TILE + 16 * i + 8] = word(field.stride)
        for offset, value in header.items():
            _put(builder, builder.add(record, word(offset)), value)
        for i, field in enumerate(fields):
            row = word(rec.PRODUCT_HEADER + 8 * i * int(op.scope))
            at = builder.add(builder.add(record, row), builder.mul(rows.lane, word(8)))
            _put(builder, at, builder.ptrtoint(operands.data(field.param), I64))
        what = [word(op_number(op)), place, line]
        emit_call(builder, "emulate_product_issue", what, ir.VoidType())
        return context.get_dummy_value()


class _ProductGroup:
    """The commit of a group of async products, or the wait for all but the newest ``pending``."""

    def __init__(self, op: Op, pending: int | None) -> None:
        self._op = op
        self._pending = pending

    def __call__(self, context: Any, builder: Any, signature: Any, args: Any) -> Any:
        operands = [word(op_number(self._op)), word(_UNITS[self._op.scope])]
        line = word(source_line(builder))
        if self._pending is None:
            emit_call(builder, "emulate_product_commit", [*operands, line], ir.VoidType())
        else:
            operands += [word(self._pending), line]
            emit_call(builder, "emulate_product_wait", operands, ir.VoidType())
        return context.get_dummy_value()


def _put(builder: Any, address: ir.Value, value: ir.Value) -> None:
    builder.store(value, builder.inttoptr(address, I64.as_pointer()))


def _fill_record(op: Op, builder: Any, record: ir.Value, operands: Operands) -> None:
    """LLVM code: write a thread op's operands to a record."""
    _put(builder, record, _symbol(builder, op))
    for field in layout.copy_record(op).fields:
        if field.param.is_pointer:
            values = operands.pointer_words(field.param)
        else:
            values = [emit_word(builder, operands.value(field.param))]
        for i, value in enumerate(values):
            _put(builder, builder.add(record, word(field.offset + 8 * i)), value)


class _CopyIssue:
    """An async copy of a group: its operands go to the next record of the thread's queue."""

    def __init__(self, op: Op) -> None:
        layout.copy_record(op)
        self._op = op

    def __call__(self, context: Any, builder: Any, signature: Any, args: Any) -> Any:
        twins.ensure(self._op)
        operands = Operands(self._op, context, builder, signature.args, args)
        what = [word(_QUEUES[str(self._op.group)]), word(source_line(builder))]
        record = emit_call(builder, "emulate_copy_record", what, I64)
        _fill_record(self._op, builder, record, operands)
        emit_call(builder, "emulate_copy_issue", what, ir.VoidType())
        return context.get_dummy_value()


class _FlightIssue:
    """An async copy that an mbarrier counts: its operands go to the launch's next record."""

    def __init__(self, op: Op) -> None:
        layout.copy_record(op)
        self._op = op

    def __call__(self, context: Any, builder: Any, signature: Any, args: Any) -> Any:
        twins.ensure(self._op)
        operands = Operands(self._op, context, builder, signature.args, args)
        line = word(source_line(builder))
        record = emit_call(builder, "emulate_flight_record", [line], I64)
        _fill_record(self._op, builder, record, operands)
        emit_call(builder, "emulate_flight_issue", [line], ir.VoidType())
        return context.get_dummy_value()


class _CopyGroup:
    """The commit of a group of copies, or the wait for all but the newest ``pending`` groups."""

    def __init__(self, queue: int, pending: int | None) -> None:
        self._queue = queue
        self._pending = pending

    def __call__(self, context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if self._pending is None:
            emit_call(builder, "emulate_copy_commit", [word(self._queue)], ir.VoidType())
        else:
            operands = [word(self._queue), word(self._pending), word(source_line(builder))]
            emit_call(builder, "emulate_copy_wait", operands, ir.VoidType())
        return context.get_dummy_value()


def _symbol(builder: Any, op: Op) -> ir.Value:
    """LLVM code: the address of the op's function."""
    kind = ir.FunctionType(I64, [I64])
    function = cgutils.get_or_insert_function(builder.module, kind, twins.symbol(op))
    return builder.ptrtoint(function, I64)
