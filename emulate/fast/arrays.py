"""``cuda.shared.array`` and ``cuda.local.array`` of the fast engine."""

# Compiled functions and intrinsics are typed by Numba, not by annotations.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import math
from typing import Any

from llvmlite import ir
from numba.core import errors, types
from numba.extending import intrinsic

from emulate.fast.build import current
from emulate.fast.records import BLOCK_DYNAMIC, BLOCK_DYNAMIC_BYTES, BLOCK_SHARED, FIBER_BLOCK
from emulate.fast.words import I64, emit_array, emit_fiber, emit_load, word


def _literal_shape(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, types.IntegerLiteral):
        return (shape.literal_value,)
    extents = shape if isinstance(shape, types.BaseTuple) else ()  # type: ignore[attr-defined]
    if len(extents) > 0 and all(isinstance(n, types.IntegerLiteral) for n in extents):
        return tuple(extent.literal_value for extent in extents)
    raise errors.TypingError(f"the shape of an array must be made of constants, got {shape}")


def _element(dtype: Any) -> Any:
    if isinstance(dtype, types.NumberClass | types.DType):
        return dtype.dtype
    raise errors.TypingError(f"dtype: expected a numeric type, got {dtype}")


def _alignment(alignment: Any, itemsize: int) -> int:
    if alignment is None or alignment == types.none:
        return itemsize
    if not isinstance(alignment, types.IntegerLiteral):
        raise errors.TypingError("alignment must be a constant")
    value = int(alignment.literal_value)
    if value < 1 or value & (value - 1):
        raise errors.TypingError(f"alignment must be a power of two, got {value}")
    return max(value, itemsize)


@intrinsic(prefer_literal=True)
def shared_array(typingctx, shape, dtype, alignment=None):
    """An array in the CTA's shared memory; shape 0 is the dynamic part."""
    extents = _literal_shape(shape)
    kind = types.Array(_element(dtype), len(extents), "C")

    def codegen(context, builder, signature, args):
        itemsize = context.get_abi_sizeof(context.get_data_type(kind.dtype))
        block = emit_load(builder, emit_fiber(builder), FIBER_BLOCK)
        if extents == (0,):
            base = emit_load(builder, block, BLOCK_DYNAMIC)
            nbytes = emit_load(builder, block, BLOCK_DYNAMIC_BYTES)
            shape_values = [builder.udiv(nbytes, word(itemsize))]
        else:
            align = _alignment(alignment, itemsize)
            offset = current().allocate_shared(math.prod(extents) * itemsize, align)
            base = builder.add(emit_load(builder, block, BLOCK_SHARED), word(offset))
            shape_values = [word(extent) for extent in extents]
        return emit_array(context, builder, kind, base, shape_values)

    return kind(shape, dtype, _given(alignment)), codegen


@intrinsic(prefer_literal=True)
def local_array(typingctx, shape, dtype, alignment=None):
    """An array of the thread's own, on its stack; it costs nothing to make."""
    extents = _literal_shape(shape)
    kind = types.Array(_element(dtype), len(extents), "C")

    def codegen(context, builder, signature, args):
        element = context.get_data_type(kind.dtype)
        itemsize = context.get_abi_sizeof(element)
        count = math.prod(extents)
        current().local_bytes += count * itemsize
        with builder.goto_entry_block():
            slot = builder.alloca(ir.ArrayType(element, count))
        slot.align = max(_alignment(alignment, itemsize), 16)
        base = builder.ptrtoint(slot, I64)
        return emit_array(context, builder, kind, base, [word(extent) for extent in extents])

    return kind(shape, dtype, _given(alignment)), codegen


def _given(alignment: Any) -> Any:
    return types.none if alignment is None else alignment
