"""Arrays at the boundary: what is accepted, described once, and allocated in kind.

| arrays                                    | results                                           |
|-------------------------------------------|---------------------------------------------------|
| numpy, with `ml_dtypes` types or bits     | numpy                                             |
| Numba's CUDA simulator                    | the same                                          |
| torch, on the host or a GPU, with its eight-bit and four-bit floats | torch, on the same device |
| jax, on the host or a GPU                 | jax; `out=` is refused, as its arrays are immutable |
| cupy                                      | cupy                                              |
| numba, anything with `__cuda_array_interface__` | numba device arrays                         |
| anything else with `__dlpack__`           | numpy on the host, numba device arrays on a GPU   |

Nothing is copied. torch, jax and cupy are never imported here. numba and cupy carry bfloat16 as
uint16 and eight-bit floats as uint8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from nbmoe.errors import ArgTypeError, message
from nbmoe.operand import (
    BFLOAT16,
    Array,
    Extent,
    Kind,
    dtype_name,
    extent,
    named_dtype,
    plain_dtype,
)
from nbmoe.protocols import cuda_interface, dlpack, jax_array, torch_tensor

__all__ = [
    "BFLOAT16",
    "Array",
    "Extent",
    "Kind",
    "describe",
    "empty",
    "extent",
    "is_simulator_array",
    "like_operand",
    "named_dtype",
    "read",
    "to_backend",
    "to_numpy",
]


def describe(api: str, arg: str, x: Any) -> Array:
    """Describes an operand of any accepted kind. Reads no data.

    Args:
        api: Public function, for messages.
        arg: Argument, for messages.
        x: The caller's object.

    Raises:
        ArgTypeError: `x` is not an array of an accepted kind.
        DTypeError: its protocol names no usable element type.
        LayoutError: its `__cuda_array_interface__` contradicts itself.
    """
    if isinstance(x, np.ndarray):
        return _from_numpy(x, x, Kind.NUMPY)
    if is_simulator_array(x):
        return _from_numpy(x, x._ary, Kind.SIMULATOR)
    if type(x) is jax_array.FreshArray:
        return jax_array.describe_fresh(api, arg, x)
    if torch_tensor.is_tensor(x):
        return torch_tensor.describe(api, arg, x)
    if jax_array.is_jax(x):
        return jax_array.describe(api, arg, x)
    interface = getattr(x, "__cuda_array_interface__", None)
    if interface is not None:
        return cuda_interface.describe(api, arg, x, interface)
    # A numpy scalar exports nothing, but a class may answer for every name.
    if hasattr(type(x), "__dlpack__") and hasattr(type(x), "__dlpack_device__"):
        return dlpack.describe(api, arg, x)
    hint = "wrap it with numpy.asarray(x, dtype)" if isinstance(x, list | tuple) else ""
    got = f"{type(x).__name__} {x!r}"[:80]
    rule = "an array (numpy, numba, torch, jax, cupy or with __dlpack__)"
    raise ArgTypeError(message(api, arg, rule, got, hint))


def is_simulator_array(x: Any) -> bool:
    """Whether `x` is a device array of Numba's CUDA simulator."""
    # Asking the class, since instances answer for every attribute of the numpy array inside.
    return type(x).__name__ == "FakeCUDAArray" and isinstance(vars(x).get("_ary"), np.ndarray)


def _from_numpy(owner: Any, x: NDArray[Any], kind: Kind) -> Array:
    return Array(
        owner,
        kind,
        dtype_name(x.dtype),
        extent(x.shape, x.dtype.itemsize, x.strides),
        x.__array_interface__["data"][0],
        x.flags.writeable,
        x,
    )


def empty(like: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Allocates an output of the same kind and on the same device as an operand.

    Host arrays are zeroed, since callers see the bytes that no kernel writes. An array of jax comes
    in a `FreshArray`, which an operation takes as `out=` and returns as the array.

    Args:
        like: The operand.
        shape: Sizes [elements].
        dtype: Element type, those of `ml_dtypes` included.
    """
    dtype = np.dtype(dtype)
    kind = like.kind
    if kind in (Kind.TORCH, Kind.TORCH_HOST):
        return torch_tensor.empty(like.owner, shape, dtype, zero=kind is Kind.TORCH_HOST)
    if kind in (Kind.JAX, Kind.JAX_HOST):
        return jax_array.empty(like.owner, shape, dtype)
    if kind is Kind.CUPY:
        return cuda_interface.cupy_empty(shape, dtype, like.device)
    if kind.on_gpu:
        return cuda_interface.empty(shape, dtype, like.device)
    zeros = np.zeros(shape, dtype)
    return _simulated(zeros) if kind is Kind.SIMULATOR else zeros


def like_operand(array: NDArray[Any], like: Array) -> Any:
    """Returns a host result in the kind of a host operand."""
    if like.kind is Kind.SIMULATOR:
        return _simulated(array)
    if like.kind is Kind.TORCH_HOST:
        return torch_tensor.from_numpy(array)
    return jax_array.from_numpy(array) if like.kind is Kind.JAX_HOST else array


def _simulated(array: NDArray[Any]) -> Any:
    from numba import cuda

    return cuda.to_device(array)


def to_backend(array: NDArray[Any], backend: str) -> Any:
    """Puts a numpy array where a backend's kernels can reach it.

    Args:
        array: Any contiguous numpy array.
        backend: "gpu", "cudasim", "emulate" or "reference".

    Returns:
        A numba device array for "gpu" (types of `ml_dtypes` as unsigned integers) and "cudasim"
        (Numba's simulator array), the array itself otherwise.
    """
    array = np.ascontiguousarray(array)
    if backend == "gpu":
        from numba import cuda

        return cuda.to_device(array.view(plain_dtype(array.dtype)))
    return _simulated(array) if backend == "cudasim" else array


def to_numpy(array: Any, dtype: DTypeLike | None = None) -> NDArray[Any]:
    """An array of any accepted kind as numpy; waits for the GPU where there is one.

    Args:
        array: Any accepted kind of array.
        dtype: If given, the element type that the bits are, of the same size. numba and cupy
            arrays carry bfloat16 as uint16, so this is how it comes back.

    Returns:
        A view of host memory, read-only if the array is; a copy of a GPU's.

    Raises:
        ArgTypeError: `array` is not an array.
    """
    described = describe("to_numpy", "array", array)
    host = read(described)
    if not described.writeable and host.flags.writeable:
        host = host.view()
        host.flags.writeable = False
    return host if dtype is None else host.view(dtype)


def read(array: Array) -> NDArray[Any]:
    """The data of an operand as numpy: a view of host memory, a copy of a GPU's."""
    if array.view is not None:
        return array.view
    return _copied(array)[: array.shape[0]] if array.shape else _copied(array)


def _copied(array: Array) -> NDArray[Any]:
    """All data of an operand's owner on a GPU."""
    if array.kind is Kind.TORCH:
        return torch_tensor.to_host(array.owner, array.dtype)
    if array.kind is Kind.JAX:
        return jax_array.to_host(array.owner)
    if array.kind is Kind.DLPACK:
        return cuda_interface.to_host(_DevicePointer(array))
    return cuda_interface.to_host(array.owner)


class _DevicePointer:
    """An array on a GPU under an interface that numba reads."""

    def __init__(self, array: Array) -> None:
        self.owner = array.owner
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "strides": None if array.extent.is_contiguous else array.strides,
            "typestr": plain_dtype(named_dtype(array.dtype)).str,
            "data": (array.pointer, not array.writeable),
        }
