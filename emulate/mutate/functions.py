"""Functions of a kernel: which it calls, and copies of it with one of them exchanged."""

import ast
import inspect
import textwrap
import types as pytypes
from collections.abc import Mapping
from typing import Any

from emulate.fingerprint import named_globals
from emulate.rebind import Rebinder, plain_function


def called_functions(kernel: Any) -> list[pytypes.FunctionType]:
    """The kernel's function and all device functions that it calls, each once."""
    found = [plain_function(kernel)]
    for function in found:
        for value in names_of(function).values():
            helper = helper_of(value)
            if helper is not None and helper not in found:
                found.append(helper)
    return found


def names_of(function: pytypes.FunctionType) -> dict[str, Any]:
    """What the function's free names stand for: its closure and the globals that it uses."""
    values = {path: value for path, value in named_globals(function) if "." not in path}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values.update({name: cell.cell_contents for name, cell in cells})
    return values


def helper_of(value: Any) -> pytypes.FunctionType | None:
    """The function of a device function, else None."""
    if getattr(value, "is_device_function", False) or (
        type(value).__module__.startswith("numba.cuda") and hasattr(value, "py_func")
    ):
        return plain_function(value)
    return None


def parse(function: pytypes.FunctionType) -> ast.FunctionDef:
    """The function's syntax tree, with the line numbers of its file and no decorators."""
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise TypeError(f"{function.__name__} is not made by a def statement")
    definition.decorator_list = []
    return definition


def compile_again(
    function: pytypes.FunctionType, definition: ast.FunctionDef, extra: Mapping[str, Any]
) -> pytypes.FunctionType:
    """A function from a changed tree, over the globals and closure of the original.

    Args:
        function: the original.
        definition: the changed tree; compiled in place of the original's.
        extra: values of names that the change has brought in.
    """
    free = function.__code__.co_freevars
    # Only inside a function that has these names are they free variables.
    outer = ast.parse(f"def outer({', '.join(free)}):\n    return {definition.name}")
    maker = outer.body[0]
    assert isinstance(maker, ast.FunctionDef)
    maker.body.insert(0, definition)
    ast.fix_missing_locations(outer)
    scope: dict[str, Any] = {}
    exec(compile(outer, function.__code__.co_filename, "exec"), scope)
    code = scope["outer"](*free).__code__
    cells = dict(zip(free, function.__closure__ or (), strict=True))
    changed = pytypes.FunctionType(
        code,
        {**function.__globals__, **extra},
        function.__name__,
        function.__defaults__,
        tuple(cells[name] for name in code.co_freevars),
    )
    changed.__qualname__ = function.__qualname__
    changed.__module__ = function.__module__
    return changed


def exchange(
    kernel: pytypes.FunctionType, old: pytypes.FunctionType, new: pytypes.FunctionType
) -> pytypes.FunctionType:
    """The kernel with one of its functions in place of another, however deep."""
    if kernel is old:
        return new

    def replacement(value: Any) -> Any:
        return _mark(new) if helper_of(value) is old else None

    return Rebinder(_mark, replace=replacement).clone(kernel)


def _mark(function: Any) -> Any:
    function.is_device_function = True
    return function
