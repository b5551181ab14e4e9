"""`Array`: what an operand is, whoever owns its memory."""

from __future__ import annotations

import functools
from enum import Enum
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

_EXTENDED = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
}
PACKED_FP4 = "float4_e2m1fn_x2"
"""Element type of torch and DLPack that is a byte with two e2m1 codes; numpy has none."""


@functools.cache
def named_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of an element type's name, those of `ml_dtypes` included.

    Two packed e2m1 codes are a uint8.

    Raises:
        TypeError: There is no such element type.
    """
    if name == PACKED_FP4:
        return np.dtype(np.uint8)
    return _EXTENDED[name] if name in _EXTENDED else np.dtype(name)


@functools.cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Name of a numpy dtype, which says so if its bytes are swapped."""
    return dtype.name if dtype.isnative else f"byte-swapped {dtype.name}"


@functools.cache
def plain_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The unsigned integer that carries a dtype of `ml_dtypes` where only numpy's own exist."""
    return np.dtype(f"u{dtype.itemsize}") if dtype in _EXTENDED.values() else dtype


class Kind(Enum):
    """Who owns an array's memory.

    Attributes:
        on_gpu: Whether the memory is a GPU's.
    """

    NUMPY = ("numpy", False)
    SIMULATOR = ("numba simulator", False)
    TORCH_HOST = ("torch", False)
    JAX_HOST = ("jax", False)
    DLPACK_HOST = ("DLPack", False)
    CUDA = ("cuda", True)
    CUPY = ("cupy", True)
    TORCH = ("torch cuda", True)
    JAX = ("jax cuda", True)
    DLPACK = ("DLPack cuda", True)

    def __init__(self, label: str, on_gpu: bool) -> None:
        self.label = label
        self.on_gpu = on_gpu


class Extent(NamedTuple):
    """How an array lies in memory: sizes and steps without an address.

    Attributes:
        shape: Sizes [elements].
        itemsize: Size of an element [bytes].
        strides: Distance between neighbours along each axis [bytes].
        nbytes: Bytes of all elements.
        is_contiguous: Whether elements lie in C order without gaps; axes of one element do not
            matter.
    """

    shape: tuple[int, ...]
    itemsize: int
    strides: tuple[int, ...]
    nbytes: int
    is_contiguous: bool


@functools.lru_cache(maxsize=4096)
def extent(shape: tuple[int, ...], itemsize: int, strides: tuple[int, ...] | None) -> Extent:
    """Works out an array's extent; calls repeat with the same few.

    Args:
        shape: Sizes [elements].
        itemsize: Size of an element [bytes].
        strides: Distance between neighbours [bytes], None for C order.
    """
    c_strides, step = [], itemsize
    for n in reversed(shape):
        c_strides.append(step)
        step *= n
    c_strides.reverse()
    if strides is None:
        strides = tuple(c_strides)
    in_order = len(strides) == len(shape) and all(
        n == 1 or stride == c_stride
        for n, stride, c_stride in zip(shape, strides, c_strides, strict=True)
    )
    return Extent(shape, itemsize, strides, step, step == 0 or in_order)


class Array(NamedTuple):
    """What an operand is, without its data.

    Attributes:
        owner: The caller's object, which keeps the memory alive.
        kind: Who owns the memory.
        dtype: Name of the element type, for example "uint8" or "bfloat16".
        extent: Sizes and steps.
        pointer: Address of the first element.
        writeable: Whether a caller may pass it as an output.
        view: The memory as numpy, None for memory of a GPU.
        device: Ordinal of the GPU, None where the memory is the host's or the owner does not say.
        stream: Stream that the owner exports the memory on, None if it does not.
    """

    owner: Any
    kind: Kind
    dtype: str
    extent: Extent
    pointer: int
    writeable: bool
    view: NDArray[Any] | None = None
    device: int | None = None
    stream: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes [elements]."""
        return self.extent.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Distance between neighbours along each axis [bytes]."""
        return self.extent.strides

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.extent.nbytes

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.extent.nbytes // self.extent.itemsize

    def leading(self, count: int) -> Array:
        """The first elements along axis 0, of the same memory."""
        rest, size = self.extent.shape[1:], self.extent.itemsize
        view = None if self.view is None else self.view[:count]
        return self._replace(extent=extent((count, *rest), size, None), view=view)

    def overlaps(self, other: Array) -> bool:
        """Whether two contiguous arrays share a byte."""
        mine, theirs = self.extent.nbytes, other.extent.nbytes
        if not (self.pointer < other.pointer + theirs and other.pointer < self.pointer + mine):
            return False
        return bool(mine and theirs) and self.kind.on_gpu == other.kind.on_gpu

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


class _Memory:
    """Host memory in the form that numpy takes, holding on to whoever owns it."""

    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__array_interface__ = interface
        self.owner = owner


def host_view(pointer: int, dtype: str, extent: Extent, owner: Any) -> NDArray[Any]:
    """Host memory as a writeable numpy array, without copying.

    Args:
        pointer: Address of the first element.
        dtype: Name of the element type; one that numpy has not gives opaque bytes.
        extent: Sizes and steps.
        owner: What keeps the memory alive; the array holds it.
    """
    try:
        numpy_dtype = named_dtype(dtype)
    except TypeError:
        numpy_dtype = np.dtype(f"V{extent.itemsize}")
    if extent.nbytes == 0:
        return np.empty(extent.shape, numpy_dtype)
    interface = {
        "version": 3,
        "data": (pointer, False),
        "shape": extent.shape,
        "strides": None if extent.is_contiguous else extent.strides,
        "typestr": plain_dtype(numpy_dtype).str,
    }
    view: NDArray[Any] = np.asarray(_Memory(interface, owner))
    return view if view.dtype == numpy_dtype else view.view(numpy_dtype)
