"""Arrays with `__dlpack__` that no other module knows, read from the capsule that they export.

numpy's own `from_dlpack` has no bfloat16 and no eight-bit floats, so the capsule is read here.
The structures are those of dlpack.h 1.1.
"""

from __future__ import annotations

import ctypes
from typing import Any

from nbmoe.errors import ArgTypeError, DTypeError, message
from nbmoe.operand import PACKED_FP4, Array, Kind, extent, host_view, named_dtype

_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_READ_ONLY, _IS_COPIED = 1, 2
_NO_SYNC = -1
_LEGACY_DEFAULT = 1  # DLPack's number of the legacy default stream; 0 is ambiguous and forbidden

_EXTENDED = {
    (4, 16, 1): "bfloat16",
    (10, 8, 1): "float8_e4m3fn",
    (12, 8, 1): "float8_e5m2",
    (14, 8, 1): "float8_e8m0fnu",
    (17, 4, 2): PACKED_FP4,
}
_NUMPY_CODES = {0: "int", 1: "uint", 2: "float"}


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)


def describe(api: str, arg: str, x: Any) -> Array:
    """Describes an array from the capsule that it exports. Nothing is copied or waited for.

    Raises:
        ArgTypeError: It is on a device that is neither the host nor a GPU of CUDA, or cannot be
            exported.
        DTypeError: Its elements have no name here.
    """
    device_type, ordinal = (int(v) for v in x.__dlpack_device__())
    if device_type not in (_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED):
        got = f"one on a device of DLPack type {device_type}"
        raise ArgTypeError(message(api, arg, "a DLPack array on the host or a CUDA GPU", got))
    on_gpu = device_type in (_CUDA, _CUDA_MANAGED)
    try:
        # The stream is known once the call is placed, and told then (`wait_for`).
        capsule = _export(x, _NO_SYNC if on_gpu else None)
    except (BufferError, RuntimeError, ValueError) as error:
        raise ArgTypeError(message(api, arg, "an exportable DLPack array", str(error))) from error
    tensor, flags = _read(capsule)
    dtype = _dtype_name(tensor.dtype)
    if not dtype:
        bits = f"DLPack code {tensor.dtype.code}, {tensor.dtype.bits} bits"
        raise DTypeError(message(api, arg, "a known element type", bits))
    itemsize = named_dtype(dtype).itemsize
    shape = tuple(tensor.shape[: tensor.ndim])
    steps = tuple(s * itemsize for s in tensor.strides[: tensor.ndim]) if tensor.strides else None
    lies = extent(shape, itemsize, steps)
    pointer = (tensor.data or 0) + tensor.byte_offset
    writeable = not flags & (_READ_ONLY | _IS_COPIED)
    if on_gpu:
        return Array(x, Kind.DLPACK, dtype, lies, pointer, writeable, device=ordinal)
    # The capsule frees what it exports when it goes, so the view holds it.
    view = host_view(pointer, dtype, lies, (x, capsule))
    return Array(x, Kind.DLPACK_HOST, dtype, lies, pointer, writeable, view)


def wait_for(x: Any, stream: int) -> None:
    """Makes a stream wait for the work that still fills an array on a GPU.

    Args:
        x: The array.
        stream: Handle of the stream.
    """
    _export(x, stream or _LEGACY_DEFAULT)


def _export(x: Any, stream: int | None) -> Any:
    try:
        return x.__dlpack__(stream=stream, max_version=(1, 1))
    except TypeError:  # written before DLPack 1.0
        return x.__dlpack__(stream=stream) if stream is not None else x.__dlpack__()


def _read(capsule: Any) -> tuple[Any, int]:
    """The tensor of a capsule, and its flags."""
    name = b"dltensor_versioned"
    if _is_valid(capsule, name):
        versioned = _Versioned.from_address(_get_pointer(capsule, name))
        return versioned.tensor, versioned.flags
    return _Tensor.from_address(_get_pointer(capsule, b"dltensor")), 0


def _dtype_name(dtype: Any) -> str:
    key = (dtype.code, dtype.bits, dtype.lanes)
    if key in _EXTENDED:
        return _EXTENDED[key]
    base = _NUMPY_CODES.get(dtype.code)
    return f"{base}{dtype.bits}" if base and dtype.lanes == 1 and dtype.bits >= 8 else ""
