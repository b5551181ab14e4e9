"""Operands of ops in memory: typed views of a record or an exchange, and code that fills them.

Writing to a typed view converts a number as CUDA does. The code that is made here names a view
``v_`` and the parameter; a pointer has three: address, length, index.
"""

from typing import Any

import numpy as np

from emulate.fast import layout
from nbmoe_kernels.device.op import NUMPY_TYPES, Op, Param


def record_views(op: Op, memory: np.ndarray) -> dict[str, np.ndarray]:
    """The views of a thread op's record, by name."""
    place = layout.record(op)
    views: dict[str, np.ndarray] = {}
    for field in place.fields:
        name, at = f"v_{field.param.name}", field.offset
        if field.param.is_pointer:
            views[name] = _rows(memory, at, "i64", 1, 0)
            views[f"{name}_size"] = _rows(memory, at + 8, "i64", 1, 0)
            views[f"{name}_index"] = _index_rows(memory, field.param, at + 16, 1)
        else:
            views[name] = _rows(memory, at, field.param.dtype, 1, field.param.length)
    if op.result:
        views["v_return"] = _rows(memory, place.result, op.result[0], 1, op.result[1])
    return views


def exchange_views(op: Op, memory: np.ndarray) -> dict[str, np.ndarray]:
    """The views of a unit op's exchange, by name; the first axis is the lane."""
    place = layout.exchange(op)
    lanes = int(op.scope)
    views: dict[str, np.ndarray] = {}
    for field in place.fields:
        param, name = field.param, f"v_{field.param.name}"
        if param.is_pointer:
            views[name] = _rows(memory, field.part(0), "i64", lanes, 0)
            views[f"{name}_size"] = _rows(memory, field.part(1), "i64", lanes, 0)
            views[f"{name}_index"] = _index_rows(memory, param, field.part(2), lanes)
        else:
            views[name] = _rows(memory, field.offset, param.dtype, lanes, param.length)
    if op.result:
        views["v_return"] = _rows(memory, place.result, op.result[0], lanes, op.result[1])
    return views


def view_names(op: Op) -> list[str]:
    """The names of the views, in order."""
    names = []
    for param in op.params:
        name = f"v_{param.name}"
        names += [name, f"{name}_size", f"{name}_index"] if param.is_pointer else [name]
    return [*names, "v_return"] if op.result else names


def write_lines(op: Op, row: str, *, wrap: bool = False) -> list[str]:
    """Python that writes the call's arguments to row ``row`` of the views."""
    lines = []
    for param in op.params:
        view, value = f"v_{param.name}[{row}]", param.name
        if param.is_pointer:
            index = f"{value}_index"
            lines += [
                f"check_{value}({value})",
                f"{view} = address({value})",
                f"v_{value}_size[{row}] = {value}.size",
                f"v_{value}_index[{row}] = {f'wrapped({index})' if wrap else index}",
            ]
        elif param.kind == "tile":
            lines += [f"check_{value}({value})", f"{view} = tile({value})[:{param.length}]"]
        else:
            lines.append(f"{view} = {f'wrapped({value})' if wrap else value}")
    return lines


def read_lines(op: Op, row: str) -> list[str]:
    """Python that copies tiles back and, in the last line, returns the result."""
    lines = [
        f"    tile({param.name})[:{param.length}] = v_{param.name}[{row}]"
        for param in op.params
        if param.kind == "tile"
    ]
    if op.result:
        value = f"v_return[{row}]"
        lines.append(f"    return tuple({value})" if op.result[1] else f"    return {value}")
    return lines


def scope(op: Op) -> dict[str, Any]:
    """The functions that the generated code calls."""
    names: dict[str, Any] = {
        "address": _addresses.of,
        "wrapped": wrapped,
        "tile": data_of,
    }
    for param in op.params:
        if param.kind != "scalar":
            names[f"check_{param.name}"] = _ArrayCheck(op, param)
    return names


def data_of(array: Any) -> Any:
    """The NumPy array of an argument: itself, or what a checked array stands for."""
    return array if type(array) is np.ndarray else array.data


def wrapped(value: Any) -> Any:
    """A number as an int64 or a float that NumPy's narrower types wrap without complaint."""
    return value if isinstance(value, float | np.floating) else np.int64(value)


def checked_index(op: Op, array: Any, index: Any) -> int:
    """An index into a flat array.

    Raises:
        IndexError: it is outside.
    """
    at = int(index)
    if not 0 <= at < array.size:
        raise IndexError(f"{op.name}: index {at} of an array of {array.size} elements")
    return at


def _rows(memory: np.ndarray, offset: int, dtype: str, count: int, length: int) -> np.ndarray:
    kind: np.dtype = np.dtype(NUMPY_TYPES[dtype])
    size = kind.itemsize * count * max(length, 1)
    view = memory[offset : offset + size].view(kind)
    return view.reshape(count, length) if length else view


def _index_rows(memory: np.ndarray, param: Param, offset: int, count: int) -> np.ndarray:
    words = _rows(memory, offset, "u64", count, 0)
    # A shared address has 32 bits; the upper half of the word stays 0.
    return words.view(np.uint32)[::2] if param.kind == "shared" else words


class _ArrayCheck:
    """Raises unless an argument is a flat array of the parameter's type."""

    def __init__(self, op: Op, param: Param) -> None:
        self._where = f"{op.name}: {param.name}"
        self._dtype = np.dtype(NUMPY_TYPES[param.dtype])
        self._length = param.length

    def __call__(self, array: Any) -> None:
        if (array.dtype is not self._dtype and array.dtype != self._dtype) or array.ndim != 1:
            raise TypeError(
                f"{self._where}: expected a flat array of {self._dtype}, got {array.dtype} of "
                f"shape {array.shape}"
            )
        if array.size < self._length:
            raise IndexError(f"{self._where}: the tile has fewer than {self._length} elements")


class _Addresses:
    """Addresses of arrays, kept because asking NumPy takes longer than an op."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[np.ndarray, int]] = {}

    def of(self, array: Any) -> int:
        if type(array) is not np.ndarray:
            return int(array.address)
        known = self._known.get(id(array))
        if known is None:
            if len(self._known) >= 4096:
                self._known.clear()
            # The reference keeps the id from being used again.
            known = self._known[id(array)] = (array, array.ctypes.data)
        return known[1]

    def forget(self) -> None:
        """Drop all references."""
        self._known.clear()


_addresses = _Addresses()
forget_addresses = _addresses.forget
