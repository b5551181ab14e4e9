"""``cuda.atomic`` of the fast engine.

Fibers are switched only where they wait, so a read followed by a write is atomic.
"""

# Compiled functions and intrinsics are typed by Numba, not by annotations.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import types as pytypes
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, errors, types
from numba.extending import intrinsic

from emulate.fast.words import emit_call

Combine = Callable[[Any, types.Type, ir.Value, ir.Value], ir.Value]
"""(builder, element type, old, operand) -> new."""


def _index_type(array: Any, index: Any) -> Any:
    indices = index.types if isinstance(index, types.BaseTuple) else (index,)  # type: ignore[attr-defined]
    if not isinstance(array, types.Array) or len(indices) != array.ndim:
        raise errors.TypingError(f"atomic: {array} cannot be indexed with {index}")
    if not all(isinstance(one, types.Integer) for one in indices):
        raise errors.TypingError(f"atomic: expected integer indices, got {index}")
    if indices == (index,):
        return types.intp
    return types.UniTuple(types.intp, len(indices))  # type: ignore[attr-defined]


def _pointer(context: Any, builder: Any, signature: Any, args: Any) -> ir.Value:
    array_type, index_type = signature.args[0], signature.args[1]
    array = context.make_array(array_type)(context, builder, args[0])
    single = index_type == types.intp
    indices = [args[1]] if single else cgutils.unpack_tuple(builder, args[1])
    return cgutils.get_item_pointer(
        context,
        builder,
        array_type,
        array,
        indices,
        wraparound=True,
        boundscheck=context.enable_boundscheck,
    )


def _read_modify_write(combine: Combine, *, floats: bool) -> Any:
    @intrinsic
    def operation(typingctx, array, index, value):
        kind = _index_type(array, index)
        dtype = array.dtype
        if not isinstance(dtype, types.Integer) and not (floats and isinstance(dtype, types.Float)):
            raise errors.TypingError(f"atomic: not for arrays of {dtype}")

        def codegen(context, builder, signature, args):
            pointer = _pointer(context, builder, signature, args)
            old = builder.load(pointer)
            builder.store(combine(builder, dtype, old, args[2]), pointer)
            _emit_progress(builder)
            return old

        return dtype(array, kind, dtype), codegen

    return operation


def _emit_cas(context: Any, builder: Any, signature: Any, args: Any) -> ir.Value:
    pointer = _pointer(context, builder, signature, args)
    old = builder.load(pointer)
    equal = builder.icmp_unsigned("==", old, args[2])
    builder.store(builder.select(equal, args[3], old), pointer)
    _emit_progress(builder)
    return old


def _emit_progress(builder: Any) -> None:
    # A thread that waits for this one may be able to go on.
    emit_call(builder, "emulate_progress", [], ir.VoidType())


@intrinsic
def _cas(typingctx, array, index, expected, value):
    kind = _index_type(array, index)
    dtype = array.dtype

    if not isinstance(dtype, types.Integer):
        raise errors.TypingError(f"atomic: not for arrays of {dtype}")
    return dtype(array, kind, dtype, dtype), _emit_cas


@intrinsic
def _compare_and_swap(typingctx, array, expected, value):
    """`_cas` of element 0 of a flat array."""
    if not isinstance(array, types.Array) or array.ndim != 1:
        raise errors.TypingError(f"atomic: expected a flat array, got {array}")
    dtype = array.dtype
    if not isinstance(dtype, types.Integer):
        raise errors.TypingError(f"atomic: not for arrays of {dtype}")

    def codegen(context, builder, signature, args):
        inner = dtype(array, types.intp, dtype, dtype)
        return _emit_cas(
            context, builder, inner, [args[0], ir.Constant(ir.IntType(64), 0), *args[1:]]
        )

    return dtype(array, dtype, dtype), codegen


def _add(builder: Any, dtype: types.Type, old: ir.Value, value: ir.Value) -> ir.Value:
    is_float = isinstance(dtype, types.Float)
    return builder.fadd(old, value) if is_float else builder.add(old, value)


def _sub(builder: Any, dtype: types.Type, old: ir.Value, value: ir.Value) -> ir.Value:
    is_float = isinstance(dtype, types.Float)
    return builder.fsub(old, value) if is_float else builder.sub(old, value)


def _less(builder: Any, dtype: Any, a: ir.Value, b: ir.Value) -> ir.Value:
    # An ordered comparison: beside a NaN nothing is stored, as Numba's own loops do it.
    if isinstance(dtype, types.Float):
        return builder.fcmp_ordered("<", a, b)
    return builder.icmp_signed("<", a, b) if dtype.signed else builder.icmp_unsigned("<", a, b)


def _min(builder: Any, dtype: types.Type, old: ir.Value, value: ir.Value) -> ir.Value:
    return builder.select(_less(builder, dtype, value, old), value, old)


def _max(builder: Any, dtype: types.Type, old: ir.Value, value: ir.Value) -> ir.Value:
    return builder.select(_less(builder, dtype, old, value), value, old)


def _nan_min(builder: Any, dtype: types.Type, old: ir.Value, value: ir.Value) -> ir.Value:
    return _without_nan(builder, dtype, old, value, _min(builder, dtype, old, value))


def _nan_max(builder: Any, dtype: types.Type, old: ir.Value, value: ir.Value) -> ir.Value:
    return _without_nan(builder, dtype, old, value, _max(builder, dtype, old, value))


def _without_nan(
    builder: Any, dtype: types.Type, old: ir.Value, value: ir.Value, best: ir.Value
) -> ir.Value:
    """A NaN in memory gives way to a number."""
    if not isinstance(dtype, types.Float):
        return best
    old_is_nan = builder.fcmp_unordered("uno", old, old)
    return builder.select(old_is_nan, value, best)


def _inc(builder: Any, dtype: types.Type, old: ir.Value, value: ir.Value) -> ir.Value:
    wraps = builder.icmp_unsigned(">=", old, value)
    return builder.select(wraps, old.type(0), builder.add(old, old.type(1)))


def _dec(builder: Any, dtype: types.Type, old: ir.Value, value: ir.Value) -> ir.Value:
    wraps = builder.or_(
        builder.icmp_unsigned("==", old, old.type(0)), builder.icmp_unsigned(">", old, value)
    )
    return builder.select(wraps, value, builder.sub(old, old.type(1)))


_COMBINE: dict[str, tuple[Combine, bool]] = {
    "add": (_add, True),
    "sub": (_sub, True),
    "min": (_min, True),
    "max": (_max, True),
    "nanmin": (_nan_min, True),
    "nanmax": (_nan_max, True),
    "inc": (_inc, False),
    "dec": (_dec, False),
    "and_": (lambda builder, dtype, old, value: builder.and_(old, value), False),
    "or_": (lambda builder, dtype, old, value: builder.or_(old, value), False),
    "xor": (lambda builder, dtype, old, value: builder.xor(old, value), False),
    "exch": (lambda builder, dtype, old, value: value, True),
}


def make_module() -> pytypes.ModuleType:
    """``cuda.atomic``."""
    module = pytypes.ModuleType("emulate.cuda.atomic")
    for name, (combine, floats) in _COMBINE.items():
        setattr(module, name, _read_modify_write(combine, floats=floats))
    module.compare_and_swap = _compare_and_swap  # type: ignore[attr-defined]
    module.cas = _cas  # type: ignore[attr-defined]
    return module
