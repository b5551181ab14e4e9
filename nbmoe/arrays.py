"""Arrays at the boundary: what is accepted, described once, and allocated in kind.

Accepted are

* numpy arrays, with `ml_dtypes` types or the bit patterns in unsigned integers;
* arrays of Numba's CUDA simulator (`NUMBA_ENABLE_CUDASIM=1`);
* anything on a GPU with `__cuda_array_interface__` (numba, cupy, ...);
* CUDA tensors of torch, by duck typing: this package never imports torch.

Results come back as the same kind of array as the operands.
"""

from __future__ import annotations

import functools
import sys
from enum import Enum
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from nbmoe.errors import ArgTypeError, DTypeError, LayoutError, message

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

_EXTENDED = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
}


def named_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of an element type's name, those of `ml_dtypes` included."""
    return _EXTENDED[name] if name in _EXTENDED else np.dtype(name)


class Kind(Enum):
    """Who owns an array's memory."""

    NUMPY = "numpy"
    SIMULATOR = "numba simulator"
    CUDA = "cuda"
    TORCH = "torch cuda"

    @property
    def on_gpu(self) -> bool:
        """Whether the memory is a GPU's."""
        return self in (Kind.CUDA, Kind.TORCH)


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
        writeable: Whether outputs may be stored there.
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

    def overlaps(self, other: Array) -> bool:
        """Whether two contiguous arrays share a byte."""
        mine, theirs = self.extent.nbytes, other.extent.nbytes
        if not (self.pointer < other.pointer + theirs and other.pointer < self.pointer + mine):
            return False
        return bool(mine and theirs) and self.kind.on_gpu == other.kind.on_gpu

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


def describe(api: str, arg: str, x: Any) -> Array:
    """Describes an operand of any accepted kind. Reads no data.

    Args:
        api: Public function, for messages.
        arg: Argument, for messages.
        x: The caller's object.

    Raises:
        ArgTypeError: `x` is not an array of an accepted kind.
        DTypeError: its `__cuda_array_interface__` has no usable element type.
        LayoutError: its `__cuda_array_interface__` contradicts itself.
    """
    if isinstance(x, np.ndarray):
        return _from_numpy(x, x, Kind.NUMPY)
    if is_simulator_array(x):
        return _from_numpy(x, x._ary, Kind.SIMULATOR)
    if callable(getattr(x, "data_ptr", None)):
        return _from_torch(api, arg, x)
    interface = getattr(x, "__cuda_array_interface__", None)
    if interface is not None:
        return _from_interface(api, arg, x, interface)
    hint = "wrap it with numpy.asarray(x, dtype)" if isinstance(x, list | tuple) else ""
    got = f"{type(x).__name__} {x!r}"[:80]
    raise ArgTypeError(message(api, arg, "an array (numpy, numba, cupy or torch CUDA)", got, hint))


def is_simulator_array(x: Any) -> bool:
    """Whether `x` is a device array of Numba's CUDA simulator."""
    # Asking the class, since instances answer for every attribute of the numpy array inside.
    return type(x).__name__ == "FakeCUDAArray" and isinstance(vars(x).get("_ary"), np.ndarray)


@functools.cache
def _dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.name if dtype.isnative else f"byte-swapped {dtype.name}"


def _from_numpy(owner: Any, x: NDArray[Any], kind: Kind) -> Array:
    return Array(
        owner,
        kind,
        _dtype_name(x.dtype),
        extent(x.shape, x.dtype.itemsize, x.strides),
        x.__array_interface__["data"][0],
        x.flags.writeable,
        x,
    )


def _from_torch(api: str, arg: str, x: Any) -> Array:
    if not x.is_cuda:
        hint = "pass x.numpy(), or move it with x.cuda()"
        raise ArgTypeError(message(api, arg, "a torch tensor on a GPU", f"one on {x.device}", hint))
    itemsize = x.element_size()
    return Array(
        x,
        Kind.TORCH,
        str(x.dtype).removeprefix("torch."),
        extent(tuple(x.shape), itemsize, tuple(s * itemsize for s in x.stride())),
        x.data_ptr(),
        writeable=True,
        device=x.device.index,
    )


def _from_interface(api: str, arg: str, x: Any, interface: dict[str, Any]) -> Array:
    shape = tuple(interface["shape"])
    dtype = getattr(x, "dtype", None)
    try:
        # A typestr has no name for bfloat16; the owner's dtype has.
        dtype = dtype if isinstance(dtype, np.dtype) else np.dtype(interface["typestr"])
    except TypeError:
        got = f"typestr {interface['typestr']!r}"
        raise DTypeError(message(api, arg, "a numpy element type", got)) from None
    strides = interface.get("strides")
    strides = None if strides is None else tuple(strides)
    pointer, read_only = interface["data"]
    array = Array(
        x,
        Kind.CUDA,
        _dtype_name(dtype),
        extent(shape, dtype.itemsize, strides),
        pointer or 0,
        not read_only,
        device=_ordinal(x),
        stream=interface.get("stream"),
    )
    _check_interface(api, arg, array, interface)
    return array


def _check_interface(api: str, arg: str, array: Array, interface: dict[str, Any]) -> None:
    rule = "a consistent __cuda_array_interface__"
    held = getattr(array.owner, "nbytes", None)
    extent = array.extent
    if len(extent.strides) != len(extent.shape):
        raise LayoutError(
            message(api, arg, rule, f"strides {array.strides} for shape {array.shape}")
        )
    if not array.pointer and extent.nbytes:
        raise LayoutError(message(api, arg, rule, f"a null pointer for shape {array.shape}"))
    if isinstance(held, int) and held < extent.nbytes:
        got = f"{held} bytes for shape {array.shape} of {array.dtype}"
        raise LayoutError(message(api, arg, rule, got))
    if interface.get("mask") is not None:
        raise LayoutError(message(api, arg, "an array without a mask", "a masked array"))


def _ordinal(x: Any) -> int | None:
    device = getattr(x, "device", None)
    ordinal = getattr(device, "id", None)  # cupy
    if ordinal is None and (memory := getattr(x, "gpu_data", None)) is not None:  # numba
        ordinal = getattr(getattr(getattr(memory, "context", None), "device", None), "id", None)
    return ordinal if isinstance(ordinal, int) else None


def empty(like: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Allocates an output of the same kind and on the same device as an operand.

    Host arrays are zeroed, since callers see the bytes that no kernel writes. bfloat16 comes back
    as `torch.bfloat16` for torch, as uint16 bit patterns for other GPU arrays.

    Args:
        like: The operand.
        shape: Sizes [elements].
        dtype: Element type, `ml_dtypes.bfloat16` included.
    """
    dtype = np.dtype(dtype)
    if like.kind is Kind.TORCH:
        return like.owner.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype.name))
    if like.kind is Kind.CUDA:
        from numba import cuda

        device_type = np.dtype(np.uint16) if dtype == BFLOAT16 else dtype
        with cuda.gpus[like.device or 0]:
            return cuda.device_array(shape, device_type)
    zeros = np.zeros(shape, dtype)
    return _simulated(zeros) if like.kind is Kind.SIMULATOR else zeros


def like_operand(array: NDArray[Any], like: Array) -> Any:
    """Returns a host result in the kind of a host operand."""
    return _simulated(array) if like.kind is Kind.SIMULATOR else array


def _simulated(array: NDArray[Any]) -> Any:
    from numba import cuda

    return cuda.to_device(array)


def to_backend(array: NDArray[Any], backend: str) -> Any:
    """Puts a numpy array where a backend's kernels can reach it.

    Args:
        array: Any contiguous numpy array.
        backend: "gpu", "cudasim", "emulate" or "reference".

    Returns:
        A numba device array for "gpu" (bfloat16 as uint16 bit patterns) and "cudasim" (Numba's
        simulator array), the array itself otherwise.
    """
    array = np.ascontiguousarray(array)
    if backend == "gpu":
        from numba import cuda

        return cuda.to_device(array.view(np.uint16) if array.dtype == BFLOAT16 else array)
    return _simulated(array) if backend == "cudasim" else array


def to_numpy(array: Any, dtype: DTypeLike | None = None) -> NDArray[Any]:
    """Copies an array of any accepted kind to the host; waits for the GPU where there is one.

    Args:
        array: Any accepted kind of array.
        dtype: If given, the element type that the bits are, of the same size. Numba device arrays
            carry bfloat16 as uint16, so this is how it comes back.

    Raises:
        ArgTypeError: `array` is not an array.
    """
    described = describe("to_numpy", "array", array)
    host = read(described)
    return host if dtype is None else host.view(dtype)


def read(array: Array) -> NDArray[Any]:
    """The data of an operand as numpy: a view of host memory, a copy of a GPU's."""
    if array.view is not None:
        return array.view
    if array.kind is Kind.TORCH:
        torch = sys.modules["torch"]
        flat: NDArray[np.uint8] = (
            array.owner.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        )
        return flat.view(named_dtype(array.dtype)).reshape(array.shape)
    from numba import cuda

    host: NDArray[Any] = cuda.as_cuda_array(array.owner).copy_to_host()
    return host
