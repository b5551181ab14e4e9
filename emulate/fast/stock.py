"""Warp functions, bit functions and grid barriers of `numba.cuda` in compiled kernels."""

# Compiled functions and intrinsics are typed by Numba, not by annotations.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import types as pytypes
from typing import Any

from llvmlite import ir
from numba.core import cgutils, errors
from numba.core import types as _types
from numba.core.imputils import lower_builtin, lower_getattr
from numba.core.typing.templates import (
    AttributeTemplate,
    bound_function,
    infer_getattr,
    signature,
)
from numba.extending import intrinsic, models, register_model

from emulate import stock
from emulate.fast import records as rec
from emulate.fast.calls import Operands, emit_collective
from emulate.fast.locate import VALUE_ATTRIBUTES, source_line
from emulate.fast.words import I32, I64, emit_call, emit_fiber, emit_load, word
from nbmoe_kernels.device.op import Op

types: Any = _types
"""Numba's types; what the module exports is not visible to a type checker."""

_VALUES = (types.int32, types.int64, types.float32, types.float64)
_INTEGERS = (types.Integer, types.Boolean)
_VOTES = ("all_sync", "any_sync", "eq_sync", "ballot_sync")
_MASKED = (
    *dict.fromkeys(name for name, _ in stock.SHUFFLES),
    *_VOTES,
    "match_any_sync",
    "match_all_sync",
    "syncwarp",
)


def _integer(name: str, kind: Any) -> Any:
    if not isinstance(kind, _INTEGERS):
        raise errors.TypingError(f"cuda.{name}: expected an integer, got {kind}")
    return types.unliteral(kind)


def _value(name: str, kind: Any) -> Any:
    # What the GPU target takes, so that a kernel that runs here also compiles there.
    kind = types.unliteral(kind)
    if kind not in _VALUES:
        raise errors.TypingError(f"cuda.{name}: expected a signed integer or a float, got {kind}")
    return kind


def _check_mask(builder: Any, name: str, mask: ir.Value) -> None:
    """LLVM code: end the launch if a mask leaves lanes out."""
    bits = _to_u32(builder, mask)
    partial = builder.icmp_unsigned("!=", bits, ir.Constant(I32, stock.FULL_MASK))
    with cgutils.if_unlikely(builder, partial):
        number = word(_MASKED.index(name))
        operands = [number, builder.zext(bits, I64), word(source_line(builder))]
        emit_call(builder, "emulate_partial_mask", operands, ir.VoidType())


def _to_u32(builder: Any, value: ir.Value) -> ir.Value:
    width = value.type.width
    if width == 32:
        return value
    return builder.trunc(value, I32) if width > 32 else builder.zext(value, I32)


def _to_bits(builder: Any, value: ir.Value, kind: Any) -> ir.Value:
    return builder.bitcast(value, ir.IntType(kind.bitwidth))


def _collective(op: Op, context: Any, builder: Any, values: list[ir.Value]) -> ir.Value:
    kinds = [None] * len(values)
    return emit_collective(op, context, builder, Operands(op, context, builder, kinds, values))


def _shuffle(name: str) -> Any:
    @intrinsic
    def shuffle(typingctx, mask, value, lane):
        kind = _value(name, value)
        op = stock.SHUFFLES[name, kind.bitwidth // 8]

        def codegen(context, builder, signature, args):
            _check_mask(builder, name, args[0])
            operands = [_to_bits(builder, args[1], kind), _to_u32(builder, args[2])]
            (result,) = _collective(op, context, builder, operands)
            return builder.bitcast(result, context.get_value_type(kind))

        return kind(_integer(name, mask), kind, _integer(name, lane)), codegen

    return shuffle


def _vote(name: str, result: Any, emit: Any) -> Any:
    @intrinsic
    def vote(typingctx, mask, predicate):
        def codegen(context, builder, signature, args):
            _check_mask(builder, name, args[0])
            holds = builder.icmp_unsigned("!=", args[1], args[1].type(0))
            (lanes,) = _collective(stock.BALLOT, context, builder, [builder.zext(holds, I32)])
            return emit(builder, lanes)

        return result(_integer(name, mask), _integer(name, predicate)), codegen

    return vote


def _emit_all(builder: Any, lanes: ir.Value) -> ir.Value:
    return builder.icmp_unsigned("==", lanes, ir.Constant(I32, stock.FULL_MASK))


def _emit_any(builder: Any, lanes: ir.Value) -> ir.Value:
    return builder.icmp_unsigned("!=", lanes, ir.Constant(I32, 0))


def _emit_equal(builder: Any, lanes: ir.Value) -> ir.Value:
    return builder.or_(_emit_all(builder, lanes), builder.not_(_emit_any(builder, lanes)))


def _emit_match(
    name: str, context: Any, builder: Any, mask: ir.Value, value: ir.Value, kind: Any
) -> ir.Value:
    _check_mask(builder, name, mask)
    op = stock.MATCH[kind.bitwidth // 8]
    return _collective(op, context, builder, [_to_bits(builder, value, kind)])[0]


@intrinsic
def _match_any_sync(typingctx, mask, value):
    kind = _value("match_any_sync", value)

    def codegen(context, builder, signature, args):
        return _emit_match("match_any_sync", context, builder, args[0], args[1], kind)

    return types.int32(_integer("match_any_sync", mask), kind), codegen


@intrinsic
def _match_all_sync(typingctx, mask, value):
    kind = _value("match_all_sync", value)
    result = types.Tuple((types.int32, types.boolean))

    def codegen(context, builder, signature, args):
        lanes = _emit_match("match_all_sync", context, builder, args[0], args[1], kind)
        same = _emit_all(builder, lanes)
        found = builder.select(same, lanes, ir.Constant(I32, 0))
        return context.make_tuple(builder, result, [found, same])

    return result(_integer("match_all_sync", mask), kind), codegen


@intrinsic
def _syncwarp(typingctx, mask=None):
    def codegen(context, builder, signature, args):
        if signature.args and signature.args[0] not in (types.none, types.Omitted(None)):
            _check_mask(builder, "syncwarp", args[0])
        _collective(stock.SYNCWARP, context, builder, [])
        return context.get_dummy_value()

    if mask is None or isinstance(mask, types.NoneType | types.Omitted):
        return types.void(types.none if mask is None else mask), codegen
    return types.void(_integer("syncwarp", mask)), codegen


def _emit_lane(builder: Any) -> ir.Value:
    rank = emit_load(builder, emit_fiber(builder), rec.FIBER_RANK)
    return builder.trunc(builder.and_(rank, word(rec.WARP_LANES - 1)), I32)


def _emit_low_lanes(builder: Any, count: ir.Value) -> ir.Value:
    bits = builder.sub(builder.shl(word(1), count), word(1))
    return builder.trunc(bits, I32)


@intrinsic
def _lanemask_lt(typingctx):
    def codegen(context, builder, signature, args):
        return _emit_low_lanes(builder, builder.zext(_emit_lane(builder), I64))

    return types.uint32(), codegen


@intrinsic
def _activemask(typingctx):
    def codegen(context, builder, signature, args):
        warp = emit_load(builder, emit_fiber(builder), rec.FIBER_WARP)
        return _emit_low_lanes(builder, emit_load(builder, warp, rec.UNIT_SIZE))

    return types.uint32(), codegen


def _bit_function(name: str, result: Any, emit: Any) -> Any:
    @intrinsic
    def function(typingctx, x):
        kind = _integer(name, x)
        wanted, returned = result(kind)

        def codegen(context, builder, signature, args):
            return emit(context, builder, args[0], returned)

        return returned(wanted), codegen

    return function


def _emit_ffs(context: Any, builder: Any, value: ir.Value, result: Any) -> ir.Value:
    at = builder.add(builder.cttz(value, ir.Constant(ir.IntType(1), 0)), value.type(1))
    found = builder.select(builder.icmp_unsigned("==", value, value.type(0)), value.type(0), at)
    return _to_u32(builder, found)


def _unsigned_at_least_32(kind: Any) -> Any:
    wide = types.uint32 if kind.bitwidth <= 32 else types.uint64
    return wide, wide


@intrinsic
def _fma(typingctx, a, b, c):
    kinds = [types.unliteral(kind) for kind in (a, b, c)]
    kind = types.float32 if all(k == types.float32 for k in kinds) else types.float64

    def codegen(context, builder, signature, args):
        return builder.fma(*args)

    return kind(kind, kind, kind), codegen


@intrinsic
def _selp(typingctx, test, a, b):
    kind = typingctx.unify_types(types.unliteral(a), types.unliteral(b))
    if kind is None or not isinstance(kind, types.Number):
        raise errors.TypingError(f"cuda.selp: expected two numbers of one type, got {a} and {b}")

    def codegen(context, builder, signature, args):
        return builder.select(args[0], args[1], args[2])

    return kind(types.boolean, kind, kind), codegen


@intrinsic
def _array_like(typingctx, array):
    if not isinstance(array, types.Array):
        raise errors.TypingError(f"cuda.const.array_like: expected an array, got {array}")

    def codegen(context, builder, signature, args):
        return args[0]

    return array(array), codegen


VALUES = ("laneid", "warpsize")
"""Names that are values, not functions."""


class GridGroupType(types.Opaque):  # type: ignore[misc]
    """What ``cuda.cg.this_grid()`` returns."""

    def __init__(self) -> None:
        super().__init__("emulate.GridGroup")


register_model(GridGroupType)(models.OpaqueModel)
_GRID_GROUP = GridGroupType()


@intrinsic
def _this_grid(typingctx):
    def codegen(context, builder, signature, args):
        return context.get_dummy_value()

    return _GRID_GROUP(), codegen


@infer_getattr
class _GridGroupAttributes(AttributeTemplate):  # type: ignore[misc]
    key = GridGroupType

    @bound_function("emulate.grid_group.sync")
    def resolve_sync(self, group, args, kws):
        return signature(types.int32, recvr=group)


@lower_builtin("emulate.grid_group.sync", GridGroupType)
def _lower_grid_sync(context, builder, signature, args):
    emit_call(builder, "emulate_grid_sync", [word(source_line(builder))], ir.VoidType())
    return ir.Constant(I32, 0)


def _register_values(cuda: pytypes.ModuleType) -> None:
    """Make attributes of the module that are values known."""
    kind = types.Module(cuda)
    # Numba takes attributes of modules for constants unless told.
    for name in VALUES:
        VALUE_ATTRIBUTES.add((kind, name))

    @infer_getattr
    class CudaValues(AttributeTemplate):  # type: ignore[misc]
        key = kind

        def resolve_laneid(self, module):
            return types.int32

        def resolve_warpsize(self, module):
            return types.int32

    @lower_getattr(kind, "laneid")
    def lane(context, builder, module, value):
        return _emit_lane(builder)

    @lower_getattr(kind, "warpsize")
    def size(context, builder, module, value):
        return ir.Constant(I32, rec.WARP_LANES)


def masked_function(number: int) -> str:
    """The function that a partial mask's error is about."""
    return _MASKED[number]


def members(cuda: pytypes.ModuleType) -> dict[str, Any]:
    """What the module that takes the place of `numba.cuda` gets from here."""
    _register_values(cuda)
    cooperative = pytypes.ModuleType("emulate.cuda.cg")
    cooperative.this_grid = _this_grid  # type: ignore[attr-defined]
    constant = pytypes.ModuleType("emulate.cuda.const")
    constant.array_like = _array_like  # type: ignore[attr-defined]
    zero = ir.Constant(ir.IntType(1), 0)
    return {
        **{name: _shuffle(name) for name, _ in stock.SHUFFLES},
        "all_sync": _vote("all_sync", types.boolean, _emit_all),
        "any_sync": _vote("any_sync", types.boolean, _emit_any),
        "eq_sync": _vote("eq_sync", types.boolean, _emit_equal),
        "ballot_sync": _vote("ballot_sync", types.int32, lambda builder, lanes: lanes),
        "match_any_sync": _match_any_sync,
        "match_all_sync": _match_all_sync,
        "syncwarp": _syncwarp,
        "activemask": _activemask,
        "lanemask_lt": _lanemask_lt,
        "popc": _bit_function(
            "popc", lambda kind: (kind, kind), lambda c, builder, x, r: builder.ctpop(x)
        ),
        "brev": _bit_function(
            "brev", _unsigned_at_least_32, lambda c, builder, x, r: builder.bitreverse(x)
        ),
        "clz": _bit_function(
            "clz", lambda kind: (kind, kind), lambda c, builder, x, r: builder.ctlz(x, zero)
        ),
        "ffs": _bit_function("ffs", lambda kind: (kind, types.uint32), _emit_ffs),
        "fma": _fma,
        "selp": _selp,
        "cg": cooperative,
        "const": constant,
    }
