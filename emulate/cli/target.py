"""Targets of commands: ``path.py::name`` or ``package.module:name``.

The name is an `emulate.Case`, or a function without arguments that returns one.
"""

import importlib
import importlib.util
import os
import sys
import types as pytypes
from pathlib import Path

from emulate.case import Case
from emulate.errors import EmulationError


class TargetError(EmulationError, ValueError):
    """A target cannot be loaded."""


def load(target: str) -> Case:
    """The case of a target.

    Raises:
        TargetError: there is no such file, module or name, or it is no case.
    """
    place, separator, name = target.rpartition("::")
    is_path = bool(separator)
    if not is_path:
        place, separator, name = target.rpartition(":")
    if not separator or not place or not name:
        raise TargetError(
            f"target: expected path.py::name or module:name of an emulate.Case, got {target!r}"
        )
    module = _load_file(Path(place)) if is_path else _import(place)
    value = getattr(module, name, None)
    if value is None:
        cases = sorted(n for n, v in vars(module).items() if isinstance(v, Case))
        hint = f"; its cases: {', '.join(cases)}" if cases else ""
        raise TargetError(f"target: {place} has no {name!r}{hint}")
    if not isinstance(value, Case) and callable(value) and not hasattr(value, "py_func"):
        try:
            value = value()
        except TypeError as error:
            raise TargetError(f"target: {name}() could not be called: {error}") from error
    if not isinstance(value, Case):
        raise TargetError(
            f"target: expected {name} to be or to return an emulate.Case, got "
            f"{type(value).__name__}"
        )
    return value


def _load_file(path: Path) -> pytypes.ModuleType:
    if not path.is_file():
        raise TargetError(f"target: there is no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"target: {str(path)!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    # As Python does for a script: modules next to it can be imported.
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise TargetError(f"target: {path}: {error}") from error
    return module


def _import(name: str) -> pytypes.ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TargetError(f"target: {error}") from error
