"""`Workspace`: the buffers of a layer, which are made once, used again, and never given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe.arrays import BFLOAT16, to_backend

_MAX_VIEWS = 1024
_ALIGN = 16

MakeRows = Callable[[int], npt.NDArray[Any]]
"""The first n rows of a table, given n."""


class Workspace:
    """Named buffers that grow to the largest size asked for, and views of them at each size.

    A view is made at the first request for its shape; later requests look it up. So a layer that
    has seen a number of tokens allocates nothing when it sees it again, nor for fewer tokens than
    ever before, of which only the views are new.

    Memory that was handed out stays valid, at its address, as long as the workspace lives: a CUDA
    graph that was captured at one size may be replayed after calls of larger sizes. What a larger
    buffer replaces is kept beside it, unused. It is little: a buffer at least doubles when it
    grows, so all that it replaced is smaller than it, and a layer that reserves its largest size
    first keeps nothing.

    One workspace serves one call at a time: a second stream needs a second one.

    Attributes:
        backend: Name of the backend whose arrays these are.
        allocations: Buffers allocated so far.
        nbytes: Size of all of them, replaced ones included [bytes].
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.allocations = 0
        self.nbytes = 0
        self._buffers: dict[str, Any] = {}
        self._tables: dict[str, Any] = {}
        self._retired: list[Any] = []
        self._views: dict[tuple[str, tuple[int, ...], str], Any] = {}
        self._rows: dict[tuple[str, str, int], Any] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """The buffer `name` as an array of a shape; its content is whatever was left there.

        Args:
            name: Which buffer; two names never share memory.
            shape: Sizes [elements].
            dtype: Element type. A GPU array holds bfloat16 as uint16, FP8 and scales as uint8.
        """
        kind = np.dtype(dtype)
        key = (name, shape, kind.name)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            view = self._views[key] = self._view(name, shape, kind)
        return view

    def constant_rows(self, name: str, count: int, make: MakeRows) -> Any:
        """The first `count` rows of a table that never changes.

        Args:
            name: Which table.
            count: Rows.
            make: Makes the table; called when more rows are asked for than ever before.
        """
        key = (name, "rows", count)
        if key not in self._rows:
            if count:
                rows = self._table(name, count, make)[:count]
            else:
                rows = to_backend(make(0), self.backend)
            self._keep_row(key, rows)
        return self._rows[key]

    def constant_row(self, name: str, index: int, make: MakeRows) -> Any:
        """Row `index` of a table that never changes; the rest as in `constant_rows`."""
        key = (name, "row", index)
        if key not in self._rows:
            self._keep_row(key, self._table(name, index + 1, make)[index])
        return self._rows[key]

    def _keep_row(self, key: tuple[str, str, int], rows: Any) -> None:
        if len(self._rows) >= _MAX_VIEWS:
            self._rows.clear()
        self._rows[key] = rows

    def _table(self, name: str, count: int, make: MakeRows) -> Any:
        table = self._tables.get(name)
        if table is None or table.shape[0] < count:
            size = max(count, 0 if table is None else 2 * table.shape[0])
            table = self._replace(self._tables, name, make(size))
        return table

    def _view(self, name: str, shape: tuple[int, ...], kind: np.dtype[Any]) -> Any:
        nbytes = kind.itemsize
        for n in shape:
            nbytes *= n
        if self.backend == "gpu":  # numba knows no types of ml_dtypes
            kind = np.dtype(np.uint16) if kind == BFLOAT16 else kind
            kind = kind if kind.isbuiltin == 1 else np.dtype(np.uint8)
        if nbytes == 0:
            return to_backend(np.zeros(shape, kind), self.backend)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < nbytes:
            for key in [key for key in self._views if key[0] == name]:
                del self._views[key]
            size = max(nbytes, 0 if buffer is None else 2 * buffer.size)
            size = -(-size // _ALIGN) * _ALIGN
            buffer = self._replace(self._buffers, name, np.zeros(size, np.uint8))
        return buffer[:nbytes].view(kind).reshape(shape)

    def _replace(self, buffers: dict[str, Any], name: str, content: npt.NDArray[Any]) -> Any:
        """Uploads a new buffer; keeps the old one, which captured graphs may still use."""
        if name in buffers:
            self._retired.append(buffers[name])
        buffer = buffers[name] = to_backend(content, self.backend)
        self.allocations += 1
        self.nbytes += content.nbytes
        if self.backend == "gpu":
            from numba import cuda

            # An upload may still be on its way when it returns, and other streams do not wait.
            cuda.default_stream().synchronize()
        return buffer
