"""Tensors of torch, on the host and on GPUs of NVIDIA, by duck typing."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbmoe.errors import ArgTypeError, message
from nbmoe.operand import Array, Kind, extent, host_view, named_dtype

# torch has no zeros of every eight-bit type; bits of the same size are 0 alike.
_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


@functools.cache
def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def is_tensor(x: Any) -> bool:
    """Whether `x` looks like a tensor of torch."""
    return callable(getattr(x, "data_ptr", None))


def describe(api: str, arg: str, x: Any) -> Array:
    """Describes a tensor.

    Raises:
        ArgTypeError: It is neither on the host nor on a GPU of CUDA.
    """
    itemsize = x.element_size()
    dtype = _dtype_name(x.dtype)
    on_gpu = x.is_cuda
    if not on_gpu and x.device.type != "cpu":
        got = f"one on {x.device}"
        raise ArgTypeError(message(api, arg, "a torch tensor on the host or a CUDA GPU", got))
    lies = extent(tuple(x.shape), itemsize, tuple(s * itemsize for s in x.stride()))
    pointer = x.data_ptr()
    # Autograd does not see what kernels write.
    writeable = not getattr(x, "requires_grad", False)
    if on_gpu:
        return Array(x, Kind.TORCH, dtype, lies, pointer, writeable, device=x.device.index)
    view = host_view(pointer, dtype, lies, x)
    return Array(x, Kind.TORCH_HOST, dtype, lies, pointer, writeable, view)


def empty(like: Any, shape: tuple[int, ...], dtype: np.dtype[Any], *, zero: bool) -> Any:
    """A tensor on the same device as another one.

    Args:
        like: The other tensor.
        shape: Sizes [elements].
        dtype: Element type; torch calls those of `ml_dtypes` by the same names.
        zero: Whether its bytes are 0.
    """
    torch = sys.modules["torch"]
    if not zero:
        return like.new_empty(shape, dtype=getattr(torch, dtype.name))
    bits = like.new_zeros(shape, dtype=getattr(torch, _BITS[dtype.itemsize]))
    return bits.view(getattr(torch, dtype.name))


def from_numpy(array: NDArray[Any]) -> Any:
    """A tensor on the memory of a contiguous numpy array."""
    torch = sys.modules["torch"]
    bits = array.view(_BITS[array.dtype.itemsize])
    return torch.from_numpy(bits).view(getattr(torch, array.dtype.name))


def to_host(x: Any, dtype: str) -> NDArray[Any]:
    """Copies a tensor on a GPU to the host, waiting for the current stream."""
    torch = sys.modules["torch"]
    flat: NDArray[np.uint8] = x.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return flat.view(named_dtype(dtype)).reshape(tuple(x.shape))
