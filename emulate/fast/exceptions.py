"""Reads exceptions that compiled code raised."""

import ctypes
import pickle

from emulate.errors import EmulationError, KernelError, UnsupportedOp


def read_exception(address: int) -> str:
    """The text of an exception from Numba's description, a pickled (class, arguments, location)."""
    data = ctypes.c_int64.from_address(address).value
    size = ctypes.c_int32.from_address(address + 8).value
    kind, args, location = pickle.loads(ctypes.string_at(data, size))
    text = f"{kind.__name__}: {', '.join(str(arg) for arg in args or ())}"
    if location:
        name, filename, line = location
        text += f" at {filename}:{line} ({name})"
    return text


def raised_error(address: int, where: str) -> EmulationError:
    """The error of a launch in which compiled code raised.

    A twin raises NotImplementedError for what it has no model of.
    """
    text = read_exception(address)
    kind = UnsupportedOp if text.startswith("NotImplementedError") else KernelError
    return kind(f"{text.removeprefix('NotImplementedError: ')}, in {where}")
