"""Objects with `__dlpack__` on any memory: capsules made by hand, as dlpack.h 1.1 lays them out."""

import ctypes
from typing import Any

import numpy as np

from nbmoe.protocols import dlpack

_new = ctypes.pythonapi.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_VERSIONED, _LEGACY = b"dltensor_versioned", b"dltensor"
READ_ONLY, IS_COPIED = 1, 2


class DlpackObject:
    """Exports memory that it does not own.

    Args:
        pointer: Address of the first byte.
        shape: Sizes [elements].
        dtype: DLPack's (code, bits, lanes).
        device: DLPack's (type, id): 1 is the host, 2 a GPU.
        strides: Steps [elements], None for C order.
        offset: Bytes from `pointer` to the first element.
        flags: Those of a versioned capsule.
        is_legacy: Whether the object was written before DLPack 1.0.
    """

    def __init__(
        self,
        pointer: int,
        shape: tuple[int, ...],
        dtype: tuple[int, int, int],
        *,
        device: tuple[int, int] = (1, 0),
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
        flags: int = 0,
        is_legacy: bool = False,
    ) -> None:
        self.device, self.is_legacy = device, is_legacy
        self.streams: list[int | None] = []
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(shape))(*strides) if strides else None
        tensor = dlpack._Tensor(
            pointer - offset,
            dlpack._Device(*device),
            len(shape),
            dlpack._DType(*dtype),
            ctypes.cast(self._shape, ctypes.POINTER(ctypes.c_int64)),
            ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64)) if strides else None,
            offset,
        )
        self._exported = tensor if is_legacy else dlpack._Versioned(1, 1, None, None, flags, tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        if self.is_legacy and options:
            raise TypeError("unexpected keyword")
        self.streams.append(stream)
        name = _LEGACY if self.is_legacy else _VERSIONED
        return _new(ctypes.addressof(self._exported), name, None)


def on_host(array: np.ndarray, dtype: tuple[int, int, int] | None = None) -> DlpackObject:
    """Exports a numpy array's memory, as another element type of the same size if given."""
    codes = {"i": 0, "u": 1, "f": 2}
    made = dtype or (codes[array.dtype.kind], 8 * array.itemsize, 1)
    flags = 0 if array.flags.writeable else READ_ONLY
    strides = tuple(s // array.itemsize for s in array.strides)
    return DlpackObject(array.ctypes.data, array.shape, made, strides=strides, flags=flags)


class NumpyDlpack:
    """Nothing but the two methods, those of a numpy array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)
