"""`Workspace`: the buffers of a layer, which are made once and then used again."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe.arrays import BFLOAT16, to_backend

_MAX_VIEWS = 1024
_ALIGN = 16


class Workspace:
    """Named buffers that grow to the largest size asked for, and views of them at each size.

    A view is made at the first request for its shape; later requests look it up. So a layer that
    has seen a number of tokens allocates nothing when it sees it again, nor for fewer tokens than
    ever before, of which only the views are new. Growing gives up the old buffer: arrays from
    before keep their memory, but are no longer the layer's.

    One workspace serves one call at a time: a second stream needs a second one.

    Attributes:
        backend: Name of the backend whose arrays these are.
        allocations: Buffers allocated so far.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.allocations = 0
        self._buffers: dict[str, Any] = {}
        self._views: dict[tuple[str, tuple[int, ...], str], Any] = {}
        self._constants: dict[tuple[str, int], Any] = {}

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

    def constant(self, name: str, size: int, values: npt.NDArray[Any]) -> Any:
        """An array that never changes: uploaded at the first request for (name, size).

        Args:
            name: Which constant.
            size: What its content depends on besides the name, such as the number of tokens.
            values: The content, used at the first request.
        """
        key = (name, size)
        if key not in self._constants:
            if len(self._constants) >= _MAX_VIEWS:
                self._constants.clear()
            self.allocations += 1
            self._constants[key] = to_backend(values, self.backend)
        return self._constants[key]

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
            size = -(-nbytes // _ALIGN) * _ALIGN
            buffer = self._buffers[name] = to_backend(np.zeros(size, np.uint8), self.backend)
            self.allocations += 1
        return buffer[:nbytes].view(kind).reshape(shape)
