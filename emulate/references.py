"""What a kernel names, with the lines: globals, closure values and what is reached through modules.

A name that an engine has no implementation for is found before anything is compiled or run.
"""

import dis
import types as pytypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from emulate.errors import UnsupportedOp
from emulate.rebind import helper_function
from nbmoe_kernels.device.op import Op

_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")


@dataclass(frozen=True)
class Reference:
    """A dotted name in a kernel.

    Attributes:
        path: the names, the first one a global or a closure variable.
        values: what the first ones are; the last ones are missing where they do not exist.
        file, line: where it stands.
    """

    path: tuple[str, ...]
    values: tuple[Any, ...]
    file: str
    line: int


def references(function: pytypes.FunctionType) -> Iterator[Reference]:
    """The dotted names of a kernel and of the helpers that are compiled with it."""
    seen: set[pytypes.FunctionType] = set()
    pending = [function]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        for reference in _in_code(current, current.__code__):
            yield reference
            helper = helper_function(reference.values[-1])
            if helper is not None:
                pending.append(helper)


def _in_code(function: pytypes.FunctionType, code: pytypes.CodeType) -> Iterator[Reference]:
    scope = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        scope[name] = cell.cell_contents
    starts = dict(dis.findlinestarts(code))
    line = code.co_firstlineno
    path: list[str] = []
    at = line
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset) or line
        if path and instruction.opname in _ATTRIBUTES:
            path.append(instruction.argval)
            continue
        if path:
            yield _resolve(scope, path, code.co_filename, at)
            path = []
        if instruction.opname in _LOADS and instruction.argval in scope:
            path, at = [instruction.argval], line
    for const in code.co_consts:
        if isinstance(const, pytypes.CodeType):
            yield from _in_code(function, const)


def _resolve(scope: dict[str, Any], path: list[str], file: str, line: int) -> Reference:
    values = [scope[path[0]]]
    for name in path[1:]:
        # Attributes of anything but a module may be computed: they are the compiler's business.
        if not isinstance(values[-1], pytypes.ModuleType) or not hasattr(values[-1], name):
            break
        values.append(getattr(values[-1], name))
    return Reference(tuple(path), tuple(values), file, line)


def check_supported(
    function: pytypes.FunctionType,
    knows: Callable[[str], bool],
    check_op: Callable[[Op], object] = lambda op: None,
) -> None:
    """Look for names of `numba.cuda` and ops that an engine has no implementation for.

    Args:
        function: the kernel.
        knows: whether the engine has a name of `numba.cuda`, ``atomic.add`` say.
        check_op: raises `UnsupportedOp` for an op that the engine cannot run.

    Raises:
        UnsupportedOp: with the name, the file and the line.
    """
    for reference in references(function):
        name = _cuda_name(reference)
        if name and not knows(name):
            raise UnsupportedOp(
                f"cuda.{name} has no implementation, at {reference.file}:{reference.line}"
            )
        op = getattr(reference.values[-1], "op", None)
        if isinstance(op, Op):
            try:
                check_op(op)
            except UnsupportedOp as error:
                place = f"{reference.file}:{reference.line}"
                raise UnsupportedOp(f"{error}, at {place}") from None


def _cuda_name(reference: Reference) -> str:
    """The name below `numba.cuda`; empty if it is none or is `numba.cuda` itself."""
    for i, value in enumerate(reference.values):
        if isinstance(value, pytypes.ModuleType) and value.__name__ in (
            "numba.cuda",
            "numba.cuda.simulator",
        ):
            rest = reference.path[i + 1 :]
            return ".".join(rest[:2] if rest[:1] in _NAMESPACES else rest[:1])
    return ""


_NAMESPACES = [("atomic",), ("shared",), ("local",), ("const",), ("cg",)]
