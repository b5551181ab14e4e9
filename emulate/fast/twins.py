"""The twins of ops as C functions, compiled once a machine.

A warp or warpgroup op's function takes the address of an exchange and runs the twin for all lanes;
a thread op's takes the address of a record. Both return 0, or the address of what the twin raised.
The Python source of the adaptor between words and the twin's arguments is generated here.
"""

import functools
from collections.abc import Iterator
from typing import Any

from numba import njit
from numba.core import types
from numba.core.compiler_lock import global_compiler_lock

from emulate import cache, stock
from emulate.fast import layout
from emulate.fast.build import without_garbage_collection
from emulate.fast.units import Assembler, Function, ObjectCode, load_or_compile
from emulate.fast.words import load, matrix_at, store, vector_at, word_as
from emulate.fingerprint import Unhashable, fingerprint
from emulate.rebind import Rebinder
from nbmoe_kernels.device.op import TABLE, Op, Scope, Timing

_UNSIGNED = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}


def _callable_twin(op: Op) -> Any:
    """The twin with its helpers as functions that compiled code can call."""

    def wrap(function: Any) -> Any:
        return njit(
            error_model="numpy", boundscheck=True, no_cpython_wrapper=True, no_cfunc_wrapper=True
        )(function)

    return Rebinder(wrap).clone(op.twin)  # type: ignore[arg-type]


@functools.cache
def inline_twin(op: Op, signature: Any, *, boundscheck: bool) -> Function:
    """The twin of a thread op, for linking into kernels."""
    assembler = Assembler(f"twin {op.name}")
    return assembler.compile(
        _callable_twin(op),
        signature.args,
        signature.return_type,
        boundscheck=boundscheck,
        located=True,
    )


_PREFIX = "emulate_twin_"


def symbol(op: Op) -> str:
    """The symbol of an op's function; its content is part of it."""
    return f"{_PREFIX}{op.name}_{_key(op)[:16] or id(op)}"


def resolve(name: str) -> None:
    """Compile or load the function of an op, by its symbol."""
    for op in (*TABLE.values(), *stock.ops()):
        if name.startswith(f"{_PREFIX}{op.name}_") and name == symbol(op):
            ensure(op)


@functools.cache
def ensure(op: Op) -> int:
    """Compile or load an op's function; its address."""
    with global_compiler_lock, without_garbage_collection():
        (address,), _, _ = load_or_compile(_key(op), [symbol(op)], functools.partial(_compile, op))
    return address


@functools.cache
def _key(op: Op) -> str:
    try:
        return cache.key("twin", op.name, "\n".join(_source(op)), fingerprint(op.twin))
    except Unhashable:
        return ""


def _compile(op: Op) -> tuple[ObjectCode, dict[str, Any]]:
    scope: dict[str, Any] = {
        "load": load,
        "store": store,
        "vector_at": vector_at,
        "matrix_at": matrix_at,
        "word_as": word_as,
        "twin": njit(error_model="numpy", boundscheck=True, no_cpython_wrapper=True)(
            _callable_twin(op)
        ),
        "__name__": __name__,
        **layout.NUMBA_TYPES,
    }
    exec(compile("\n".join(_source(op)), f"<emulate twin {op.name}>", "exec"), scope)
    assembler = Assembler(symbol(op))
    function = assembler.compile(scope["run"], (types.int64,), types.none)
    assembler.export_guarded(symbol(op), function)
    return assembler.finish(), {}


def _source(op: Op) -> Iterator[str]:
    return _thread_source(op) if op.scope is Scope.THREAD else _unit_source(op)


def _unit_source(op: Op) -> Iterator[str]:
    place = layout.exchange(op)
    lanes = int(op.scope)
    yield "def run(x):"
    args = []
    for field in place.fields:
        param = field.param
        if param.kind == "tile":
            args.append(f"matrix_at(x + {field.offset}, {lanes}, {param.length}, {param.dtype})")
        elif param.is_pointer:
            yield f"    {param.name} = vector_at(x + {field.part(0)}, {lanes}, i64)"
            yield from _check_equal(
                param.name, f"op {op.name}: lanes name different {param.name}", lanes
            )
            args.append(f"vector_at({param.name}[0], load(x + {field.part(1)}), {param.dtype})")
            args.append(f"vector_at(x + {field.part(2)}, {lanes}, i64)")
        else:
            row = f"vector_at(x + {field.offset}, {lanes}, {param.dtype})"
            if param.uniform:
                bits = _UNSIGNED[layout.itemsize(param.dtype)]  # a NaN equals itself
                yield f"    {param.name} = vector_at(x + {field.offset}, {lanes}, {bits})"
                yield from _check_equal(
                    param.name, f"op {op.name}: {param.name} differs between lanes", lanes
                )
                row += "[0]"
            args.append(row)
    call = f"twin({', '.join(args)})"
    if op.result is None:
        yield f"    {call}"
        return
    dtype, count = op.result
    yield f"    values = {call}"
    if count:
        yield f"    out = matrix_at(x + {place.result}, {lanes}, {count}, {dtype})"
        yield f"    for lane in range({lanes}):"
        yield f"        for i in range({count}):"
        yield f"            out[lane, i] = {dtype}(values[lane, i])"
    else:
        yield f"    out = vector_at(x + {place.result}, {lanes}, {dtype})"
        yield f"    for lane in range({lanes}):"
        yield f"        out[lane] = {dtype}(values[lane])"


def _check_equal(row: str, message: str, lanes: int) -> Iterator[str]:
    yield f"    for lane in range(1, {lanes}):"
    yield f"        if {row}[lane] != {row}[0]:"
    yield f"            raise ValueError({message!r})"


def _thread_source(op: Op) -> Iterator[str]:
    place = layout.record(op)
    yield "def run(q):"
    args = []
    for field in place.fields:
        param, at = field.param, f"q + {field.offset}"
        if param.kind == "tile":
            args.append(f"vector_at({at}, {param.length}, {param.dtype})")
        elif param.is_pointer:
            args.append(f"vector_at(load({at}), load({at} + 8), {param.dtype})")
            args.append(f"load({at} + 16)")
        else:
            args.append(f"word_as(load({at}), {param.dtype})")
    call = f"twin({', '.join(args)})"
    if op.timing is Timing.WAIT:
        yield f"    store(q, i64(1) if {call} else i64(0))"
        return
    if op.result is None:
        yield f"    {call}"
        return
    dtype, count = op.result
    yield f"    values = {call}"
    yield f"    out = vector_at(q + {place.result}, {max(count, 1)}, {dtype})"
    if not count:
        yield f"    out[0] = {dtype}(values)"
    for i in range(count):
        yield f"    out[{i}] = {dtype}(values[{i}])"
