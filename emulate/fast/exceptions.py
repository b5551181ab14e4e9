"""Reads exceptions that compiled code raised."""

import ctypes
import pickle


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
