"""Arrays of jax. They are immutable: fine as inputs, refused as `out=`; results are fresh ones.

A result is written into a buffer that jax has just made and that nobody else can have seen.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbmoe.errors import ArgTypeError, message
from nbmoe.operand import Array, Kind, dtype_name, extent, host_view

_GPU_PLATFORMS = ("gpu", "cuda")


def is_jax(x: Any) -> bool:
    """Whether `x` is an array of jax."""
    return type(x).__module__.partition(".")[0] in ("jaxlib", "jax")


def describe(api: str, arg: str, x: Any) -> Array:
    """Describes an array, after waiting until jax has computed it.

    Raises:
        ArgTypeError: It is a tracer, is spread over devices, or is on a device that is neither the
            host nor a GPU.
    """
    rule = "a jax array on the host or on one GPU"
    try:
        devices = list(x.devices())
    except (AttributeError, TypeError) as error:  # a tracer has no memory
        hint = "call it outside of jax.jit"
        raise ArgTypeError(message(api, arg, rule, f"a {type(x).__name__}", hint)) from error
    if len(devices) != 1:
        raise ArgTypeError(message(api, arg, rule, f"one on {len(devices)} devices"))
    x.block_until_ready()
    dtype = np.dtype(x.dtype)
    lies = extent(tuple(x.shape), dtype.itemsize, None)
    pointer = x.unsafe_buffer_pointer() if lies.nbytes else 0
    name, platform = dtype_name(dtype), devices[0].platform
    if platform == "cpu":
        view = host_view(pointer, name, lies, x)
        return Array(x, Kind.JAX_HOST, name, lies, pointer, writeable=False, view=view)
    if platform not in _GPU_PLATFORMS:
        raise ArgTypeError(message(api, arg, rule, f"one on a device of platform {platform!r}"))
    ordinal = getattr(devices[0], "local_hardware_id", None)
    return Array(x, Kind.JAX, name, lies, pointer, writeable=False, device=ordinal)


@dataclass(frozen=True, eq=False)
class FreshArray:
    """An array that nobody has seen yet, so that an operation may write it and hand it out."""

    array: Any


def describe_fresh(api: str, arg: str, x: FreshArray) -> Array:
    """Describes the array inside, writeable."""
    return describe(api, arg, x.array)._replace(writeable=True)


def empty(like: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> FreshArray:
    """A fresh array of zeros on the same device as another one."""
    (device,) = like.devices()
    numpy = sys.modules["jax"].numpy
    return FreshArray(numpy.zeros(shape, dtype, device=device).block_until_ready())


def from_numpy(array: NDArray[Any]) -> Any:
    """An array with the elements of a numpy array."""
    return sys.modules["jax"].numpy.asarray(array)


def to_host(x: Any) -> NDArray[Any]:
    """Copies an array on a GPU to the host."""
    host: NDArray[Any] = np.asarray(x)
    return host
