"""Raw memory for compiled code: 64-bit words at addresses, array views, the running fiber.

Addresses are int64. These intrinsics are the only place where the engine leaves Numba's types.
"""

# Compiled functions and intrinsics are typed by Numba, not by annotations.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from emulate.fast import switch as _switch
from emulate.fast.records import STACK_BYTES

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)

# LLVM 17 dropped typed pointers and with them the intrinsic's suffix.
_FRAME = "llvm.frameaddress.p0" if llvm.llvm_version_info[0] >= 17 else "llvm.frameaddress.p0i8"


def word(value: int) -> ir.Constant:
    """A 64-bit LLVM constant."""
    return ir.Constant(I64, value)


def emit_load(builder: ir.IRBuilder, address: ir.Value, offset: int = 0) -> ir.Value:
    """LLVM code: the word at ``address + offset``."""
    if offset:
        address = builder.add(address, word(offset))
    return builder.load(builder.inttoptr(address, I64.as_pointer()))


def emit_fiber(builder: ir.IRBuilder) -> ir.Value:
    """LLVM code: the address of the running fiber's record."""
    kind = ir.FunctionType(I8.as_pointer(), [I32])
    function = cgutils.get_or_insert_function(builder.module, kind, _FRAME)
    frame = builder.call(function, [ir.Constant(I32, 0)])
    return builder.and_(builder.ptrtoint(frame, I64), word(-STACK_BYTES))


def emit_call(builder: ir.IRBuilder, symbol: str, args: list[ir.Value], result: ir.Type) -> Any:
    """LLVM code: call an external C function by its symbol."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, symbol), args)


def emit_array(
    context: Any, builder: ir.IRBuilder, kind: types.Array, address: ir.Value, shape: list[ir.Value]
) -> ir.Value:
    """LLVM code: a C-contiguous array at an address; it owns nothing."""
    array = context.make_array(kind)(context, builder)
    itemsize = word(context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    strides = [itemsize]
    for extent in shape[:0:-1]:
        strides.insert(0, builder.mul(strides[0], extent))
    context.populate_array(
        array,
        data=builder.inttoptr(address, array.data.type),
        shape=shape,
        strides=strides,
        itemsize=itemsize,
        meminfo=None,
    )
    return array._getvalue()


@intrinsic
def load(typingctx, address):
    """The word at an address."""

    def codegen(context, builder, signature, args):
        return emit_load(builder, args[0])

    return types.int64(types.int64), codegen


@intrinsic
def store(typingctx, address, value):
    """Write a word."""

    def codegen(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], I64.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def fill(typingctx, address, byte, count):
    """Set ``count`` bytes."""

    def codegen(context, builder, signature, args):
        target = builder.inttoptr(args[0], I8.as_pointer())
        cgutils.memset(builder, target, args[2], builder.trunc(args[1], I8))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def move(typingctx, target, source, count):
    """Copy ``count`` bytes between places that do not overlap."""

    def codegen(context, builder, signature, args):
        to = builder.inttoptr(args[0], I8.as_pointer())
        cgutils.raw_memcpy(builder, to, builder.inttoptr(args[1], I8.as_pointer()), args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def current_fiber(typingctx):
    """The address of the running fiber's record."""

    def codegen(context, builder, signature, args):
        return emit_fiber(builder)

    return types.int64(), codegen


@intrinsic
def switch(typingctx, save, to):
    """Suspend here, with the stack pointer kept at ``*save``, and continue at ``to``."""

    def codegen(context, builder, signature, args):
        emit_call(builder, _switch.SYMBOL, list(args), ir.VoidType())
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def call_address(typingctx, function, argument):
    """Call the C function ``int64 f(int64)`` at an address."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(I64, [I64]).as_pointer()
        return builder.call(builder.inttoptr(args[0], kind), [args[1]])

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def vector_at(typingctx, address, n, dtype):
    """A 1-D array of n elements at an address."""
    kind = types.Array(dtype.dtype, 1, "C")

    def codegen(context, builder, signature, args):
        return emit_array(context, builder, kind, args[0], [args[1]])

    return kind(types.int64, types.int64, dtype), codegen


@intrinsic
def matrix_at(typingctx, address, n, m, dtype):
    """An (n, m) array at an address."""
    kind = types.Array(dtype.dtype, 2, "C")

    def codegen(context, builder, signature, args):
        return emit_array(context, builder, kind, args[0], [args[1], args[2]])

    return kind(types.int64, types.int64, types.int64, dtype), codegen


@intrinsic
def word_as(typingctx, value, dtype):
    """The scalar whose bits are the low bits of a word."""
    kind = dtype.dtype

    def codegen(context, builder, signature, args):
        return emit_scalar(builder, args[0], context.get_value_type(kind))

    return kind(types.int64, dtype), codegen


def emit_scalar(builder: ir.IRBuilder, value: ir.Value, kind: ir.Type) -> ir.Value:
    """LLVM code: the scalar of an LLVM type whose bits are the low bits of a word."""
    if isinstance(kind, ir.DoubleType):
        return builder.bitcast(value, kind)
    if isinstance(kind, ir.FloatType):
        return builder.bitcast(builder.trunc(value, I32), kind)
    return value if kind == I64 else builder.trunc(value, kind)


def emit_word(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """LLVM code: a word whose low bits are a scalar's."""
    if isinstance(value.type, ir.DoubleType):
        return builder.bitcast(value, I64)
    if isinstance(value.type, ir.FloatType):
        value = builder.bitcast(value, I32)
    return value if value.type == I64 else builder.zext(value, I64)
