"""Registers device ops with Numba's CPU typing, by the identity of their stubs."""

from typing import Any

from numba.core import errors, types
from numba.core.typing.templates import infer, infer_global, make_intrinsic_template

from emulate.fast import layout
from emulate.fast.build import current
from emulate.fast.calls import call_of
from nbmoe_kernels.device import op as table
from nbmoe_kernels.device.op import Op, Param

_registered: set[Op] = set()


def register_ops() -> None:
    """Make every declared op callable from compiled kernels."""
    if not _registered:
        _register_unroll()
    for op in table.TABLE.values():
        if op not in _registered:
            _registered.add(op)
            _register(op)


def _register_unroll() -> None:
    def definition(context: Any, iterable: Any) -> Any:
        return iterable(iterable), lambda context, builder, signature, args: args[0]

    template = make_intrinsic_template(table.unroll, definition, "unroll")
    infer(template)
    infer_global(table.unroll, types.Function(template))


def _register(op: Op) -> None:
    def define(context: Any, *args: Any) -> Any:
        current().need_cc(op)
        return _signature(op, args), call_of(op)

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
