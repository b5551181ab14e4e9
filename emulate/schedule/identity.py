"""A short hash of a kernel's content, so that a token of another version is refused.

It does not depend on where the source lies, in which line a kernel starts or on values that cannot
be read; it does depend on the minor version of Python, whose bytecode it covers.
"""

import hashlib
import types as pytypes
from collections.abc import Iterator
from typing import Any

import numpy as np

from emulate.fingerprint import named_globals
from emulate.rebind import plain_function

DIGITS = 8


def identity(kernel: Any) -> str:
    """The hash of a kernel, its helpers and the constants that it names: 8 hex digits."""
    text = "\n".join(_describe(plain_function(kernel), []))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def _describe(value: Any, seen: list[Any]) -> Iterator[str]:
    function = getattr(value, "py_func", value)
    if isinstance(function, pytypes.FunctionType):
        op = getattr(function, "op", None)
        if op is not None:
            yield f"op {op.name}"
        elif any(function is other for other in seen):
            yield f"again {function.__name__}"
        else:
            seen.append(function)
            yield from _describe_function(function, seen)
    elif isinstance(value, np.ndarray):
        yield f"array {value.dtype} {value.shape} {value.tobytes().hex()}"
    elif isinstance(value, tuple | list):
        yield f"{type(value).__name__} {len(value)}"
        for item in value:
            yield from _describe(item, seen)
    elif isinstance(value, int | float | complex | str | bytes | np.generic | None):
        yield f"{type(value).__name__} {value!r}"
    else:
        yield f"{type(value).__name__} {getattr(value, '__name__', '')}"


def _describe_function(function: pytypes.FunctionType, seen: list[Any]) -> Iterator[str]:
    yield f"function {function.__name__}"
    yield from _describe_code(function.__code__)
    yield from _describe(function.__defaults__, seen)
    for cell in function.__closure__ or ():
        yield from _describe(cell.cell_contents, seen)
    for path, value in named_globals(function):
        yield path
        yield from _describe(value, seen)


def _describe_code(code: pytypes.CodeType) -> Iterator[str]:
    yield f"code {code.co_code.hex()} {code.co_names} {code.co_varnames}"
    for const in code.co_consts:
        if isinstance(const, pytypes.CodeType):
            yield from _describe_code(const)
        elif isinstance(const, frozenset):
            yield f"frozenset {sorted(map(repr, const))}"  # its own order is random
        else:
            yield repr(const)
