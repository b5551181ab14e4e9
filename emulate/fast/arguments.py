"""Kernel arguments as words in memory: written by the host, read at the start of every thread.

A scalar is one word, an array its address, its shape and its strides. Arrays own nothing inside a
kernel, so kernels count no references.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import typeof
from numba.core import errors, types

from emulate.fast.words import emit_load, emit_scalar, word


def argument_types(args: tuple[Any, ...]) -> tuple[types.Type, ...]:
    """The Numba types of a kernel's arguments.

    Raises:
        TypeError: Numba has no type for an argument.
    """
    return tuple(_argument_type(i, arg) for i, arg in enumerate(args))


def _argument_type(position: int, arg: Any) -> Any:
    try:
        kind = typeof(arg)
    except (ValueError, errors.NumbaError) as error:
        name = getattr(arg, "dtype", type(arg).__name__)
        raise TypeError(f"argument {position}: Numba has no type for {name}") from error
    # Machine code does not depend on who may write; `ReadOnlyArguments` watches.
    frozen = isinstance(kind, types.Array) and not kind.mutable
    return kind.copy(readonly=False) if frozen else kind


def pack(args: tuple[Any, ...]) -> np.ndarray:
    """The words of the arguments."""
    words: list[int] = []
    for arg in args:
        if isinstance(arg, np.ndarray):
            words.append(arg.ctypes.data)
            words += arg.shape
            words += arg.strides
        else:
            bits = np.zeros(1, np.int64)
            value = np.asarray(arg)
            bits.view(value.dtype)[0] = value
            words.append(int(bits[0]))
    return np.array(words, np.int64)


def emit_arguments(
    context: Any, builder: ir.IRBuilder, kinds: tuple[types.Type, ...], words: ir.Value
) -> list[ir.Value]:
    """LLVM code: the arguments, from the address of their words."""
    values = []
    at = 0

    def take() -> ir.Value:
        nonlocal at
        at += 8
        return emit_load(builder, words, at - 8)

    for kind in kinds:
        if isinstance(kind, types.Array):
            values.append(_emit_array(context, builder, kind, take))
        else:
            values.append(emit_scalar(builder, take(), context.get_value_type(kind)))
    return values


def _emit_array(context: Any, builder: ir.IRBuilder, kind: types.Array, take: Any) -> ir.Value:
    array = context.make_array(kind)(context, builder)
    data = builder.inttoptr(take(), array.data.type)
    shape = [take() for _ in range(kind.ndim)]
    strides = [take() for _ in range(kind.ndim)]
    itemsize = word(context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    context.populate_array(
        array, data=data, shape=shape, strides=strides, itemsize=itemsize, meminfo=None
    )
    return array._getvalue()
