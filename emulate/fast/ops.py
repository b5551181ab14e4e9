"""Calls of device ops in kernels of the fast engine.

Every op of the table is registered with Numba's CPU typing by the identity of its stub. What a call
becomes depends on the op:

* thread scope: the twin itself, compiled into the kernel, where LLVM may inline it;
* warp scope: stores to the lane's row of the exchange, the rendezvous, loads of the result;
* ``cp`` group: a record of the operands; the commit and the waits are functions of the runtime.
"""

import hashlib
import re
from typing import Any

from llvmlite import ir
from numba.core import cgutils, errors, types
from numba.core.typing.templates import infer, infer_global, make_intrinsic_template

from emulate.fast import layout, twins
from emulate.fast.build import current
from emulate.fast.locate import source_line
from emulate.fast.records import (
    FIBER_RANK,
    FIBER_WARP,
    GROUP_RING,
    WARP_EXCHANGE,
    WARP_GENERATION,
    WARP_HALF,
    WARP_LANES,
)
from emulate.fast.words import (
    I8,
    I64,
    emit_call,
    emit_fiber,
    emit_load,
    emit_word,
    word,
)
from nbmoe_kernels.device import op as table
from nbmoe_kernels.device.op import Op, Param, Scope, Timing

_WAIT = re.compile(r"cp\.wait(\d+)")
_registered: set[Op] = set()


def register_ops() -> None:
    """Make every declared op callable from compiled kernels."""
    if not _registered:
        _register_unroll()
    for op in table.TABLE.values():
        if op not in _registered:
            _registered.add(op)
            _register(op)


def op_number(op: Op) -> int:
    """The number of an op in FIBER_WAITS_IN and WARP_OP; the same in every process."""
    return int.from_bytes(hashlib.sha256(op.name.encode()).digest()[:6], "little")


def op_name(number: int) -> str:
    """The op that a number names."""
    return next((op.name for op in table.TABLE.values() if op_number(op) == number), "an op")


def _register_unroll() -> None:
    def definition(context: Any, iterable: Any) -> Any:
        return iterable(iterable), lambda context, builder, signature, args: args[0]

    template = make_intrinsic_template(table.unroll, definition, "unroll")
    infer(template)
    infer_global(table.unroll, types.Function(template))


def _register(op: Op) -> None:
    def define(context: Any, *args: Any) -> Any:
        return _signature(op, args), _codegen(op)

    # Numba checks calls against this function's own argument names.
    names = "".join(f", {name}" for name in op.arguments)
    scope: dict[str, Any] = {"define": define}
    exec(f"def definition(context{names}): return define(context{names})", scope)
    stub = table.STUBS[op.name]
    template = make_intrinsic_template(stub, scope["definition"], op.name)
    infer(template)
    infer_global(stub, types.Function(template))


def _signature(op: Op, args: tuple[Any, ...]) -> Any:
    given = dict(zip(op.arguments, args, strict=True))
    wanted: list[types.Type] = []
    for param in op.params:
        kind = given[param.name]
        if param.kind == "scalar":
            wanted.append(_check_scalar(op, param, kind))
            continue
        wanted.append(_check_array(op, param, kind))
        if param.is_pointer:
            _check_scalar(
                op, Param(f"{param.name}_index", "scalar", "u64"), given[f"{param.name}_index"]
            )
            # As in the PTX: a shared address has 32 bits, a global one 64.
            wanted.append(types.uint32 if param.kind == "shared" else types.uint64)
    return _result_type(op)(*wanted)


def _check_scalar(op: Op, param: Param, kind: Any) -> Any:
    wanted = layout.NUMBA_TYPES[param.dtype]
    if isinstance(kind, types.Literal):
        kind = kind.literal_type
    fits = isinstance(kind, types.Integer | types.Boolean) or (
        isinstance(kind, types.Float) and isinstance(wanted, types.Float)
    )
    if not fits:
        raise errors.TypingError(f"{op.name}: {param.name}: expected {param.dtype}, got {kind}")
    return wanted


def _check_array(op: Op, param: Param, kind: Any) -> Any:
    wanted = layout.NUMBA_TYPES[param.dtype]
    flat = isinstance(kind, types.Array) and kind.ndim == 1 and kind.layout == "C"
    if not flat or kind.dtype != wanted:
        raise errors.TypingError(
            f"{op.name}: {param.name}: expected a flat array of {param.dtype}, got {kind}"
        )
    return kind


def _result_type(op: Op) -> Any:
    if op.result is None:
        return types.none
    dtype, count = op.result
    element = layout.NUMBA_TYPES[dtype]
    return types.UniTuple(element, count) if count else element  # type: ignore[attr-defined]


def _codegen(op: Op) -> Any:
    if op.group is not None:
        if op.group == "cp" and op.timing is Timing.ASYNC and op.scope is Scope.THREAD:
            return _CopyIssue(op)
        wait = _WAIT.fullmatch(op.group)
        if op.group == "cp.commit" or wait:
            return _CopyGroup(int(wait[1]) if wait else None)
        raise errors.TypingError(f"{op.name}: the fast engine does not know group {op.group!r}")
    if op.timing is Timing.ASYNC:
        raise errors.TypingError(f"{op.name}: the fast engine knows async ops of group cp only")
    return _WarpCall(op) if op.scope is Scope.WARP else _ThreadCall(op)


class _Operands:
    """The LLVM values of a call, by parameter."""

    def __init__(self, op: Op, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self._context = context
        self._builder = builder
        self._kinds = dict(zip(op.arguments, signature.args, strict=True))
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


class _ThreadCall:
    """An op of one thread: the twin, compiled into the kernel."""

    def __init__(self, op: Op) -> None:
        self._op = op

    def __call__(self, context: Any, builder: Any, signature: Any, args: Any) -> Any:
        operands = _Operands(self._op, context, builder, signature, args)
        kinds: list[types.Type] = []
        values: list[ir.Value] = []
        for param in self._op.params:
            kinds.append(operands.kind(param))
            values.append(operands.value(param))
            if param.is_pointer:
                kinds.append(types.int64)
                values.append(operands.index(param))
        inner = signature.return_type(*kinds)
        compiled = twins.inline_twin(self._op, inner, boundscheck=current().boundscheck)
        context.active_code_library.add_linking_library(compiled.library)
        result = context.call_internal(builder, compiled.fndesc, inner, values)
        return context.get_dummy_value() if self._op.result is None else result


class _WarpCall:
    """An op of 32 lanes: operands go to the exchange, the last lane runs the twin."""

    def __init__(self, op: Op) -> None:
        self._op = op
        self._layout = layout.exchange(op)

    def __call__(self, context: Any, builder: Any, signature: Any, args: Any) -> Any:
        op = self._op
        operands = _Operands(op, context, builder, signature, args)
        twins.ensure(op)
        current().need_exchange(self._layout.nbytes)
        fiber = emit_fiber(builder)
        warp = emit_load(builder, fiber, FIBER_WARP)
        lane = builder.and_(emit_load(builder, fiber, FIBER_RANK), word(WARP_LANES - 1))
        parity = builder.and_(emit_load(builder, warp, WARP_GENERATION), word(1))
        half = builder.mul(parity, emit_load(builder, warp, WARP_HALF))
        base = builder.add(emit_load(builder, warp, WARP_EXCHANGE), half)

        def row(offset: int, stride: int, kind: ir.Type) -> ir.Value:
            at = builder.add(base, builder.mul(lane, word(stride)))
            return builder.inttoptr(builder.add(at, word(offset)), kind.as_pointer())

        for field in self._layout.fields:
            param = field.param
            if param.kind == "tile":
                tile = row(field.offset, field.stride, I8)
                cgutils.raw_memcpy(builder, tile, operands.data(param), word(field.stride), 1)
            elif param.is_pointer:
                for i, value in enumerate(operands.pointer_words(param)):
                    builder.store(value, row(field.part(i), field.stride, I64))
            else:
                value = operands.value(param)
                builder.store(value, row(field.offset, field.stride, value.type))
        emit_call(
            builder,
            "emulate_meet",
            [word(op_number(op)), _symbol(builder, op), word(source_line(builder))],
            ir.VoidType(),
        )
        for field in self._layout.fields:
            if field.param.kind == "tile":
                tile = row(field.offset, field.stride, I8)
                cgutils.raw_memcpy(builder, operands.data(field.param), tile, word(field.stride), 1)
        if op.result is None:
            return context.get_dummy_value()
        dtype, count = op.result
        element = context.get_value_type(layout.NUMBA_TYPES[dtype])
        first = row(self._layout.result, layout.itemsize(dtype) * max(count, 1), element)
        if not count:
            return builder.load(first)
        values = [builder.load(builder.gep(first, [word(i)])) for i in range(count)]
        return context.make_tuple(builder, signature.return_type, values)


class _CopyIssue:
    """An async copy: its operands go to the thread's next record."""

    def __init__(self, op: Op) -> None:
        self._op = op
        self._layout = layout.copy_record(op)

    def __call__(self, context: Any, builder: Any, signature: Any, args: Any) -> Any:
        operands = _Operands(self._op, context, builder, signature, args)
        twins.ensure(self._op)
        line = word(source_line(builder))
        record = emit_call(builder, "emulate_copy_record", [line], I64)

        def put(offset: int, value: ir.Value) -> None:
            at = builder.add(record, word(offset))
            builder.store(value, builder.inttoptr(at, I64.as_pointer()))

        put(0, _symbol(builder, self._op))
        for field in self._layout.fields:
            if field.param.is_pointer:
                for i, value in enumerate(operands.pointer_words(field.param)):
                    put(field.offset + 8 * i, value)
            else:
                put(field.offset, emit_word(builder, operands.value(field.param)))
        emit_call(builder, "emulate_copy_issue", [line], ir.VoidType())
        return context.get_dummy_value()


class _CopyGroup:
    """The commit of a group of copies, or the wait for all but the newest ``pending`` groups."""

    def __init__(self, pending: int | None) -> None:
        if pending is not None and pending >= GROUP_RING:
            raise errors.TypingError(f"a wait can leave at most {GROUP_RING - 1} groups open")
        self._pending = pending

    def __call__(self, context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if self._pending is None:
            emit_call(builder, "emulate_copy_commit", [], ir.VoidType())
        else:
            line = word(source_line(builder))
            emit_call(builder, "emulate_copy_wait", [word(self._pending), line], ir.VoidType())
        return context.get_dummy_value()


def _symbol(builder: Any, op: Op) -> ir.Value:
    """LLVM code: the address of the op's function."""
    kind = ir.FunctionType(I64, [I64])
    function = cgutils.get_or_insert_function(builder.module, kind, twins.symbol(op))
    return builder.ptrtoint(function, I64)
