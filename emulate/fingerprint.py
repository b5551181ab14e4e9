"""A text that changes whenever a function's machine code could.

Numba's own disk cache looks at the kernel's file only. Here the code object, the globals that it
names, closure values, defaults, helper functions and the twins of ops all count, recursively.
"""

import dataclasses
import enum
import types as pytypes
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba.core import types as nbtypes

from nbmoe_kernels.device.effects import NamedBarrier


class Unhashable(TypeError):
    """A function depends on a value whose content this module cannot read."""


def fingerprint(function: Any) -> str:
    """The content of a function and of all that it depends on.

    Raises:
        Unhashable: it names a value of a type that is not understood; such a function can be
            compiled, but not kept on disk.
    """
    return "\n".join(_describe(function, {}))


def _describe(value: Any, seen: dict[int, int]) -> Iterator[str]:
    inner = getattr(value, "py_func", value)
    if isinstance(inner, pytypes.FunctionType) and _is_library_name(inner.__module__):
        yield f"library {inner.__module__} {inner.__qualname__}"
    elif isinstance(inner, pytypes.FunctionType):
        op = getattr(inner, "op", None)
        if op is not None:
            yield f"op {op.name} {op.scope} {op.params} {op.result} {op.timing} {op.group}"
            yield f"{op.min_cc} {[type(effect).__name__ for effect in op.effects or ()]}"
            # Of all effects only these reach machine code with their values.
            yield str([effect for effect in op.effects or () if isinstance(effect, NamedBarrier)])
            inner = op.twin
        yield from _describe_function(inner, seen)
    elif isinstance(value, np.ndarray):
        yield f"array {value.dtype} {value.shape} {value.tobytes().hex()}"
    elif isinstance(value, tuple | list):
        yield f"{type(value).__name__} {len(value)}"
        for item in value:
            yield from _describe(item, seen)
    elif isinstance(value, np.generic):
        yield f"{value.dtype} {value.tobytes().hex()}"
    elif isinstance(value, int | float | complex | str | bytes | bool | range | None | slice):
        yield f"{type(value).__name__} {value!r}"
    elif value is Ellipsis or isinstance(value, np.dtype | nbtypes.Type | enum.Enum):
        yield repr(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield f"dataclass {type(value).__module__} {type(value).__qualname__}"
        for field in dataclasses.fields(value):
            yield from _describe(getattr(value, field.name), seen)
    elif isinstance(value, pytypes.ModuleType):
        yield f"module {value.__name__}"
    elif isinstance(value, type | pytypes.BuiltinFunctionType | np.ufunc):
        yield f"builtin {getattr(value, '__module__', '')} {value.__name__}"
    elif type(value).__module__.partition(".")[0] == "numba":
        # Stubs and intrinsics. Numba's version is part of every key; an intrinsic may be anybody's.
        if hasattr(value, "_defn"):
            yield from _describe(value._defn, seen)
        yield f"numba {getattr(value, '__name__', None) or getattr(value, '_name', repr(value))}"
    else:
        raise Unhashable(f"cannot tell the content of {value!r}")


def _describe_function(function: pytypes.FunctionType, seen: dict[int, int]) -> Iterator[str]:
    if id(function) in seen:
        yield f"again {seen[id(function)]}"
        return
    seen[id(function)] = len(seen)
    code = function.__code__
    yield f"function {function.__module__} {function.__qualname__} {code.co_filename}"
    yield from _describe_code(code)
    yield from _describe(function.__defaults__, seen)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield f"cell {name}"
        yield from _describe(cell.cell_contents, seen)
    for path, value in named_globals(function):
        yield f"global {path}"
        yield from _describe(value, seen)


def _describe_code(code: pytypes.CodeType) -> Iterator[str]:
    yield f"code {code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_firstlineno}"
    yield code.co_linetable.hex()  # error messages name lines
    for const in code.co_consts:
        if isinstance(const, pytypes.CodeType):
            yield from _describe_code(const)
        else:
            yield repr(const)


def named_globals(function: pytypes.FunctionType) -> list[tuple[str, Any]]:
    """The globals that a function's code names, those reached through modules included."""
    names = set(_names(function.__code__))
    found = []
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        found.append((name, value))
        if isinstance(value, pytypes.ModuleType) and not is_library(value):
            members = names & vars(value).keys()
            found += [(f"{name}.{m}", vars(value)[m]) for m in sorted(members)]
    return found


def _names(code: pytypes.CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, pytypes.CodeType):
            yield from _names(const)


def is_library(module: pytypes.ModuleType) -> bool:
    """Whether a module belongs to Numba, NumPy or Python rather than to a kernel author."""
    # Their versions are part of every key, and their members are no kernel code.
    return _is_library_name(module.__name__)


def _is_library_name(name: str | None) -> bool:
    return (name or "").partition(".")[0] in ("numba", "numpy", "math", "operator", "ctypes")
