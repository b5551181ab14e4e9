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
from dataclasses import dataclass
from enum import Enum
from typing import Any

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


@dataclass(frozen=True)
class Array:
    """What an operand is, without its data.

    Attributes:
        owner: The caller's object, which keeps the memory alive.
        kind: Who owns the memory.
        shape: Sizes [elements].
        dtype: Name of the element type, for example "uint8" or "bfloat16".
        itemsize: Size of an element [bytes].
        strides: Distance between neighbours along each axis [bytes].
        pointer: Address of the first element.
        writeable: Whether outputs may be stored there.
        view: The memory as numpy, None for memory of a GPU.
        device: Ordinal of the GPU, None where the memory is the host's or the owner does not say.
        stream: Stream that the owner exports the memory on, None if it does not.
    """

    owner: Any
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    strides: tuple[int, ...]
    pointer: int
    writeable: bool
    view: NDArray[Any] | None = None
    device: int | None = None
    stream: int | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for n in self.shape:
            size *= n
        return size

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether elements lie in C order without gaps; axes of one element do not matter."""
        if self.size == 0:
            return True
        expected = self.itemsize
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n != 1 and stride != expected:
                return False
            expected *= n
        return True

    def overlaps(self, other: Array) -> bool:
        """Whether two contiguous arrays share a byte."""
        if self.kind.on_gpu != other.kind.on_gpu or not (self.nbytes and other.nbytes):
            return False
        return (
            self.pointer < other.pointer + other.nbytes
            and other.pointer < self.pointer + self.nbytes
        )

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
        x.shape,
        _dtype_name(x.dtype),
        x.dtype.itemsize,
        x.strides,
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
        tuple(x.shape),
        str(x.dtype).removeprefix("torch."),
        itemsize,
        tuple(s * itemsize for s in x.stride()),
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
    if strides is None:
        strides = _c_strides(shape, dtype.itemsize)
    pointer, read_only = interface["data"]
    array = Array(
        x,
        Kind.CUDA,
        shape,
        _dtype_name(dtype),
        dtype.itemsize,
        tuple(strides),
        pointer or 0,
        not read_only,
        device=_ordinal(x),
        stream=interface.get("stream"),
    )
    _check_interface(api, arg, array, interface)
    return array


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides, step = [], itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def _check_interface(api: str, arg: str, array: Array, interface: dict[str, Any]) -> None:
    rule = "a consistent __cuda_array_interface__"
    held = getattr(array.owner, "nbytes", None)
    if len(array.strides) != len(array.shape):
        raise LayoutError(
            message(api, arg, rule, f"strides {array.strides} for shape {array.shape}")
        )
    if array.nbytes and not array.pointer:
        raise LayoutError(message(api, arg, rule, f"a null pointer for shape {array.shape}"))
    if isinstance(held, int) and held < array.nbytes:
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
