"""Streams of a call: which are accepted, and which one is used when none is given."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from nbmoe.arrays import Array, Kind
from nbmoe.errors import ArgTypeError, DeviceError, message
from nbmoe.protocols import dlpack

DEFAULT = 0
"""Handle of the legacy default stream."""


def host_stream(api: str, stream: Any) -> None:
    """Accepts what a call on the host may be given: nothing, or a stream of Numba's simulator.

    Raises:
        ArgTypeError: `stream` is something else.
    """
    # Numba's simulator also takes its stream classes themselves for the default streams.
    module = (stream if isinstance(stream, type) else type(stream)).__module__
    is_default = stream is None or (type(stream) is int and stream == DEFAULT)
    if not is_default and not module.startswith("numba.cuda.simulator"):
        got = f"{type(stream).__name__} {stream!r}"[:80]
        raise ArgTypeError(
            message(api, "stream", "None or a stream of Numba's simulator on the host", got)
        )


def gpu_stream(api: str, stream: Any, operands: Iterable[Array]) -> int:
    """Returns the handle of the stream that a call on a GPU uses; it waits for DLPack operands.

    Args:
        api: Public function, for messages.
        stream: A handle, anything with `__cuda_stream__` (numba, cuda.core), a torch stream, or
            None: then torch operands use torch's current stream, others the one that they export
            with `__cuda_array_interface__`, and the legacy default stream where there is none.
        operands: The call's arrays.

    Raises:
        ArgTypeError: `stream` is something else.
        DeviceError: the stream is of another GPU than the operands, or operands export different
            streams and `stream` does not choose.
    """
    arrays = tuple(operands)
    handle = _implied(api, arrays) if stream is None else _given(api, stream, arrays)
    for array in arrays:
        if array.kind is Kind.DLPACK:
            dlpack.wait_for(array.owner, handle)
    return handle


def _given(api: str, stream: Any, arrays: tuple[Array, ...]) -> int:
    home = next((a.device for a in arrays if a.device is not None), None)
    device = _device(stream)
    if home is not None and device is not None and device != home:
        rule = f"a stream of GPU {home}, where the operands are"
        raise DeviceError(message(api, "stream", rule, f"one of GPU {device}"))
    handle = _handle(stream)
    if handle is None:
        got = f"{type(stream).__name__} {stream!r}"[:80]
        rule = "None, a handle, or a numba, cuda.core, cupy or torch stream"
        raise ArgTypeError(message(api, "stream", rule, got))
    return handle


def _implied(api: str, arrays: tuple[Array, ...]) -> int:
    for array in arrays:
        if array.kind is Kind.TORCH:
            return int(sys.modules["torch"].cuda.current_stream(array.device).cuda_stream)
    exported = {a.stream for a in arrays if a.stream}
    if len(exported) > 1:
        got = f"operands exported on {len(exported)} streams"
        raise DeviceError(message(api, "stream", "one stream for the call", got, "pass stream="))
    return exported.pop() if exported else DEFAULT


def _handle(stream: Any) -> int | None:
    if type(stream) is int and stream >= 0:
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        _version, handle = protocol() if callable(protocol) else protocol
        return int(handle)
    for name in ("cuda_stream", "ptr"):  # torch, cupy
        if isinstance(handle := getattr(stream, name, None), int):
            return handle
    return None


def _device(stream: Any) -> int | None:
    device = getattr(stream, "device_id", None)  # cupy
    if device is None:
        owner = getattr(stream, "device", None)  # torch; cuda.core
        device = getattr(owner, "index", getattr(owner, "device_id", None))
    return device if type(device) is int else None


def synchronize(handle: int) -> None:
    """Waits until a stream has finished.

    Raises:
        DeviceError: A kernel on it has failed.
    """
    from cuda.bindings import driver

    (error,) = driver.cuStreamSynchronize(handle)
    if error != driver.CUresult.CUDA_SUCCESS:
        rule = "a stream that finishes"
        raise DeviceError(message("synchronize", "stream", rule, f"CUDA error {error}"))


def is_capturing(handle: int) -> bool:
    """Whether a CUDA graph is being captured, so that nothing may be read from the GPU."""
    from cuda.bindings import driver

    error, status = driver.cuStreamIsCapturing(handle)
    # The default stream cannot be asked while another stream captures: that is an error of its own.
    captures = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
    return bool(error == driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT or status != captures)
