"""Clones of kernels in which `cuda` is an engine's own module.

Nothing is patched: a clone shares the kernel's code object and gets its own globals and closure
cells. So the GPU and both engines can run one kernel in one process.
"""

import types as pytypes
from collections.abc import Callable, Mapping
from typing import Any

from emulate.fingerprint import is_library, named_globals

Wrap = Callable[[pytypes.FunctionType], Any]


def plain_function(kernel: Any) -> pytypes.FunctionType:
    """The Python function of a kernel: itself, or its ``py_func``.

    Raises:
        TypeError: it is neither a function nor an object that has one.
    """
    function = getattr(kernel, "py_func", kernel)
    if not isinstance(function, pytypes.FunctionType):
        raise TypeError(
            f"kernel: expected a function or an object with py_func, got {type(kernel).__name__}"
        )
    return function


class Rebinder:
    """Clones functions for one engine.

    Args:
        wrap: makes a cloned helper callable from a kernel (compiles it, say).
        modules: what takes the place of modules, by name.
        replace: asked for a replacement of every other value that a function names; ``None`` leaves
            the value as it is.
    """

    def __init__(
        self,
        wrap: Wrap,
        modules: Mapping[str, Any] | None = None,
        replace: Callable[[Any], Any] | None = None,
    ) -> None:
        self._wrap = wrap
        self._modules = modules or {}
        self._replace = replace or (lambda value: None)
        self._helpers: dict[int, Any] = {}

    def clone(self, function: pytypes.FunctionType) -> pytypes.FunctionType:
        """The function over rebound globals and closure values."""
        scope = dict(function.__globals__)
        for path, value in named_globals(function):
            if "." not in path:
                scope[path] = self._map(value, function)
        cells = tuple(
            pytypes.CellType(self._map(cell.cell_contents, function))
            for cell in function.__closure__ or ()
        )
        clone = pytypes.FunctionType(
            function.__code__, scope, function.__name__, function.__defaults__, cells
        )
        clone.__kwdefaults__ = function.__kwdefaults__
        clone.__qualname__ = function.__qualname__
        clone.__module__ = function.__module__
        return clone

    def _map(self, value: Any, user: pytypes.FunctionType) -> Any:
        if isinstance(value, pytypes.ModuleType):
            return self._map_module(value, user)
        replacement = self._replace(value)
        if replacement is not None:
            return replacement
        helper = helper_function(value)
        if helper is None:
            return value
        if id(value) not in self._helpers:
            self._helpers[id(value)] = self._wrap(self.clone(helper))
        return self._helpers[id(value)]

    def _map_module(self, module: pytypes.ModuleType, user: pytypes.FunctionType) -> Any:
        if module.__name__ in self._modules:
            return self._modules[module.__name__]
        proxy = pytypes.ModuleType(module.__name__)
        if module.__name__ == "numba" and "numba.cuda" in self._modules:
            proxy.__dict__.update(module.__dict__)
            proxy.__dict__["cuda"] = self._modules["numba.cuda"]
        elif is_library(module):
            return module
        else:
            prefix = next(n for n, v in user.__globals__.items() if v is module) + "."
            for path, value in named_globals(user):
                if path.startswith(prefix):
                    proxy.__dict__[path.removeprefix(prefix)] = self._map(value, user)
        return proxy


def helper_function(value: Any) -> pytypes.FunctionType | None:
    """The function of a helper that is compiled together with its kernel, else None."""
    if type(value).__module__.startswith("numba.cuda") and hasattr(value, "py_func"):
        return plain_function(value)
    if getattr(value, "is_device_function", False):
        return plain_function(value)
    return None
