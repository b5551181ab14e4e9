"""Atomic accesses with a stated order and scope.

Numba's own ``cuda.atomic`` is relaxed. Every factory here is cached and returns the op of its
arguments; ops take ``array, index`` and then values.
"""

import functools

import numpy as np
from numba import njit

from nbmoe_kernels.device.effects import Atomic
from nbmoe_kernels.device.op import NUMPY_TYPES, Timing, device_op, op_factory

_SCOPES = ("cta", "cluster", "gpu", "sys")
_ORDERS = {
    "load": ("relaxed", "acquire"),
    "store": ("relaxed", "release"),
    "atom": ("relaxed", "acquire", "release", "acq_rel"),
    "red": ("relaxed", "release"),
}
_BITWISE = ("and", "or", "xor", "exch")
_TYPES = {
    "add": ("u32", "u64", "i32", "f32"),
    "min": ("u32", "u64", "i32", "i64"),
    "max": ("u32", "u64", "i32", "i64"),
    **{operation: ("u32", "u64") for operation in _BITWISE},
}


@njit
def _add(old, value):
    return old + value


@njit
def _min(old, value):
    return min(old, value)


@njit
def _max(old, value):
    return max(old, value)


@njit
def _and(old, value):
    return old & value


@njit
def _or(old, value):
    return old | value


@njit
def _xor(old, value):
    return old ^ value


@njit
def _exch(old, value):
    return value


_COMBINE = {
    "add": _add,
    "min": _min,
    "max": _max,
    "and": _and,
    "or": _or,
    "xor": _xor,
    "exch": _exch,
}


def _check(kind: str, dtype: str, space: str, order: str, scope: str) -> str:
    """The qualifiers of an instruction, or an error that names the wrong argument."""
    known = ("u32", "u64", "i32", "i64", "f32")
    for name, value, allowed in (
        ("dtype", dtype, known),
        ("space", space, ("global", "shared")),
        ("order", order, _ORDERS[kind]),
        ("scope", scope, _SCOPES),
    ):
        if value not in allowed:
            raise ValueError(f"{kind}: {name}: expected one of {allowed}, got {value!r}")
    return f"{order}.{scope}.{space}"


def _suffix(operation: str, dtype: str) -> str:
    """The type as an instruction spells it: bits for bitwise operations, s for signed."""
    if operation in (*_BITWISE, "cas"):
        return f"b{dtype[1:]}"
    return dtype.replace("i", "s")


def _bytes(dtype: str) -> int:
    return np.dtype(NUMPY_TYPES[dtype]).itemsize


def _first_cc(scope: str) -> tuple[int, int]:
    return (9, 0) if scope == "cluster" else (8, 0)


@op_factory
def atomic(
    operation: str,
    dtype: str = "u32",
    *,
    space: str = "global",
    order: str = "relaxed",
    scope: str = "gpu",
):
    """The op ``(target, index, value) -> old`` that combines a value into memory.

    Args:
        operation: ``add``, ``min``, ``max``, ``and``, ``or``, ``xor`` or ``exch``.
        dtype: ``u32``, ``u64``; ``i32`` and ``i64`` for min and max, ``i32`` and ``f32`` for add.
        space: ``global`` or ``shared``.
        order: ``relaxed``, ``acquire``, ``release`` or ``acq_rel``.
        scope: ``cta``, ``cluster``, ``gpu`` or ``sys``.
    """
    return _combining("atom", operation, dtype, space, order, scope)


@op_factory
def reduction(
    operation: str,
    dtype: str = "u32",
    *,
    space: str = "global",
    order: str = "relaxed",
    scope: str = "gpu",
):
    """As `atomic`, without a result (and without ``exch``); ``order`` is relaxed or release."""
    if operation == "exch":
        raise ValueError("reduction: operation: expected one with a use for the old value's rest")
    return _combining("red", operation, dtype, space, order, scope)


def _combining(kind, operation, dtype, space, order, scope):
    if dtype not in _TYPES.get(operation, ()):
        raise ValueError(f"{kind}: no {operation!r} of {dtype!r}; there are {_TYPES}")
    qualifiers = _check(kind, dtype, space, order, scope)
    combine = _COMBINE[operation]
    cast = NUMPY_TYPES[dtype]
    declare = functools.partial(
        device_op,
        effects=(
            Atomic("target", _bytes(dtype), "rmw", order, scope, is_float=dtype.startswith("f")),
        ),
        min_cc=_first_cc(scope),
        name=f"{kind}_{operation}_{order}_{scope}_{space}_{dtype}",
    )
    instruction = f"{kind}.{qualifiers}.{operation}.{_suffix(operation, dtype)}"
    # Only `release` order of a reduction and `acquire` of a load make an edge.
    if kind == "red":

        @declare(
            f"void({space} {dtype}* target, {dtype} value)",
            ptx=f"{instruction} [<target>], <value>;",
        )
        def reduce(target, target_index, value):
            target[target_index] = cast(combine(target[target_index], value))

        return reduce

    @declare(
        f"{dtype}({space} {dtype}* target, {dtype} value)",
        ptx=f"{instruction} <ret>, [<target>], <value>;",
    )
    def fetch(target, target_index, value):
        old = target[target_index]
        target[target_index] = cast(combine(old, value))
        return old

    return fetch


@op_factory
def compare_and_swap(
    dtype: str = "u32", *, space: str = "global", order: str = "relaxed", scope: str = "gpu"
):
    """The op ``(target, index, expected, value) -> old``: store the value where old is expected."""
    if dtype not in ("u32", "u64"):
        raise ValueError(f"compare_and_swap: dtype: expected u32 or u64, got {dtype!r}")
    qualifiers = _check("atom", dtype, space, order, scope)

    @device_op(
        f"{dtype}({space} {dtype}* target, {dtype} expected, {dtype} value)",
        ptx=f"atom.{qualifiers}.cas.b{dtype[1:]} <ret>, [<target>], <expected>, <value>;",
        effects=(Atomic("target", _bytes(dtype), "rmw", order, scope),),
        min_cc=_first_cc(scope),
        name=f"atom_cas_{order}_{scope}_{space}_{dtype}",
    )
    def swap(target, target_index, expected, value):
        old = target[target_index]
        if old == expected:
            target[target_index] = value
        return old

    return swap


@op_factory
def load(dtype: str = "u32", *, space: str = "global", order: str = "acquire", scope: str = "gpu"):
    """The op ``(source, index) -> value`` that loads atomically; ``order`` relaxed or acquire."""
    qualifiers = _check("load", dtype, space, order, scope)

    @device_op(
        f"{dtype}({space} {dtype}* source)",
        ptx=f"ld.{qualifiers}.{_suffix('', dtype)} <ret>, [<source>];",
        effects=(Atomic("source", _bytes(dtype), "load", order, scope),),
        min_cc=_first_cc(scope),
        name=f"load_{order}_{scope}_{space}_{dtype}",
    )
    def load_op(source, source_index):
        return source[source_index]

    return load_op


@op_factory
def store(dtype: str = "u32", *, space: str = "global", order: str = "release", scope: str = "gpu"):
    """The op ``(target, index, value)`` that stores atomically; ``order`` relaxed or release."""
    qualifiers = _check("store", dtype, space, order, scope)

    @device_op(
        f"void({space} {dtype}* target, {dtype} value)",
        ptx=f"st.{qualifiers}.{_suffix('', dtype)} [<target>], <value>;",
        effects=(Atomic("target", _bytes(dtype), "store", order, scope),),
        min_cc=_first_cc(scope),
        name=f"store_{order}_{scope}_{space}_{dtype}",
    )
    def store_op(target, target_index, value):
        target[target_index] = value

    return store_op


@op_factory
def wait_ge(
    dtype: str = "u32", *, space: str = "global", order: str = "acquire", scope: str = "gpu"
):
    """The op ``(counter, index, value)`` that waits until the counter has reached the value.

    The counter is read with the order, so what others released by their arrivals is visible.
    """
    if dtype not in ("u32", "u64"):
        raise ValueError(f"wait_ge: dtype: expected u32 or u64, got {dtype!r}")
    qualifiers = _check("load", dtype, space, order, scope)

    @device_op(
        f"void({space} {dtype}* counter, {dtype} value)",
        timing=Timing.WAIT,
        ptx=f"{{ .reg .pred p; .reg .{dtype} t; "
        f"WAIT_${{:uid}}: ld.{qualifiers}.{dtype} t, [<counter>]; "
        f"setp.ge.{dtype} p, t, <value>; @p bra DONE_${{:uid}}; "
        "nanosleep.u32 64; bra WAIT_${:uid}; DONE_${:uid}: }",
        effects=(Atomic("counter", _bytes(dtype), "load", order, scope),),
        min_cc=_first_cc(scope),
        name=f"wait_ge_{order}_{scope}_{space}_{dtype}",
    )
    def wait(counter, counter_index, value):
        return counter[counter_index] >= value

    return wait
