"""Numbers in interpreted kernels: conversions that wrap, and are fast when there is nothing to do.

`np.uint32(-1)` raises in NumPy and wraps in CUDA. And kernels convert at every step, mostly values
that have the type already.
"""

import types as pytypes
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.np.numpy_support import as_dtype

_INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)
_FLOATS = (np.float32, np.float64)


def _integer_cast(kind: Any) -> Callable[[Any], Any]:
    bits = np.iinfo(kind).bits
    low = int(np.iinfo(kind).min)

    def cast(value: Any = 0) -> Any:
        if type(value) is kind:
            return value
        try:
            return kind(value)
        except OverflowError:
            return kind((int(value) - low) % (1 << bits) + low)

    return cast


def _float_cast(kind: Any) -> Callable[[Any], Any]:
    def cast(value: Any = 0.0) -> Any:
        return value if type(value) is kind else kind(value)

    return cast


CASTS: dict[Any, Callable[[Any], Any]] = {kind: _integer_cast(kind) for kind in _INTEGERS}
CASTS |= {kind: _float_cast(kind) for kind in _FLOATS}

_REPLACED: dict[int, Any] = {id(kind): cast for kind, cast in CASTS.items()}
_REPLACED |= {id(getattr(numba, kind.__name__)): cast for kind, cast in CASTS.items()}
_DTYPES: dict[int, np.dtype] = {id(cast): np.dtype(kind) for kind, cast in CASTS.items()}


def replace_scalar_type(value: Any) -> Any:
    """The cast that takes the place of a NumPy or Numba number type, else None."""
    return _REPLACED.get(id(value))


def dtype_of(value: Any) -> np.dtype:
    """The dtype that a kernel names: by a cast of this module, a Numba type or a NumPy one."""
    known = _DTYPES.get(id(value))
    if known is None:
        is_numba = isinstance(value, numba.types.Type)
        known = np.dtype(as_dtype(value) if is_numba else value)
    return known


def make_numpy() -> pytypes.ModuleType:
    """NumPy as kernels see it."""
    module = pytypes.ModuleType("numpy")
    module.__dict__.update(np.__dict__)
    module.__dict__.update({kind.__name__: cast for kind, cast in CASTS.items()})
    return module


def make_numba(cuda: Any) -> pytypes.ModuleType:
    """Numba as kernels see it, for ``numba.uint32`` and its kin."""
    module = pytypes.ModuleType("numba")
    module.__dict__.update(numba.__dict__)
    module.__dict__.update({kind.__name__: cast for kind, cast in CASTS.items()})
    module.__dict__["cuda"] = cuda
    return module
