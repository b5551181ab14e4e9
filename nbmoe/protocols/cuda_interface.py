"""Arrays on a GPU with `__cuda_array_interface__`: numba, cupy and others."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbmoe.errors import DTypeError, LayoutError, message
from nbmoe.operand import Array, Kind, dtype_name, extent, plain_dtype


def describe(api: str, arg: str, x: Any, interface: dict[str, Any]) -> Array:
    """Describes an array from its interface.

    Raises:
        DTypeError: The interface has no usable element type.
        LayoutError: The interface contradicts itself.
    """
    shape = tuple(interface["shape"])
    dtype = getattr(x, "dtype", None)
    try:
        # A typestr has no name for bfloat16; the owner's dtype has.
        dtype = dtype if isinstance(dtype, np.dtype) else np.dtype(interface["typestr"])
    except TypeError:
        got = f"typestr {interface['typestr']!r}"
        raise DTypeError(message(api, arg, "a numpy element type", got)) from None
    strides = interface.get("strides")
    pointer, read_only = interface["data"]
    array = Array(
        x,
        _kind(type(x).__module__),
        dtype_name(dtype),
        extent(shape, dtype.itemsize, None if strides is None else tuple(strides)),
        pointer or 0,
        not read_only,
        device=_ordinal(x),
        stream=interface.get("stream"),
    )
    _check(api, arg, array, interface)
    return array


@functools.cache
def _kind(module: str) -> Kind:
    return Kind.CUPY if module.partition(".")[0] == "cupy" else Kind.CUDA


def _check(api: str, arg: str, array: Array, interface: dict[str, Any]) -> None:
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


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], device: int | None) -> Any:
    """A numba device array; types of `ml_dtypes` are carried as unsigned integers."""
    from numba import cuda

    with cuda.gpus[device or 0]:
        return cuda.device_array(shape, plain_dtype(dtype))


def cupy_empty(shape: tuple[int, ...], dtype: np.dtype[Any], device: int | None) -> Any:
    """A cupy array; types of `ml_dtypes` are carried as unsigned integers."""
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(device or 0):
        return cupy.empty(shape, plain_dtype(dtype))


def to_host(x: Any) -> NDArray[Any]:
    """Copies an array to the host."""
    from numba import cuda

    host: NDArray[Any] = cuda.as_cuda_array(x).copy_to_host()
    return host
