"""Launches kernels on a GPU.

cuda.core finds the device, loads the cubins and understands streams. The launch itself packs all
arguments into one buffer with one call and hands the driver prepared pointers into it, so its cost
hardly grows with the number of arguments; of a prepared launch configuration only the grid and the
stream are set. Nothing is allocated on the device, synchronised or read back; only a kernel's first
launch on a device compiles or loads it.
"""

import ctypes
import struct
import threading
from typing import Any

from nbmoe_kernels.compiler import compile_cubin
from nbmoe_kernels.kernel import Grid, Kernel, NotLoadedError

_DEFAULT_SHARED_BYTES = 48 * 1024
_SLOT_BYTES = 8
# Every argument has its own 8-byte slot.
_PACK_FORMATS = {"u8": "B7x", "u16": "H6x", "u32": "I4x", "u64": "Q", "i32": "i4x", "i64": "q"}
_PACK_FORMATS |= {"f32": "f4x", "f64": "d"}


class _LoadedKernel:
    """A kernel on a device: its function, its launch configuration and its argument buffer."""

    def __init__(self, driver: Any, module: Any, function: Any, kernel: Kernel) -> None:
        self.module = module  # unloads the code when it is collected
        self.function = function
        self.config = _launch_config(driver, kernel)
        formats = ("Q" if p.is_pointer else _PACK_FORMATS[p.dtype] for p in kernel.params)
        self.packer = struct.Struct("<" + "".join(formats))
        self.buffer = ctypes.create_string_buffer(_SLOT_BYTES * len(kernel.params))
        first = ctypes.addressof(self.buffer)
        slots = (first + _SLOT_BYTES * i for i in range(len(kernel.params)))
        self.slots = (ctypes.c_void_p * len(kernel.params))(*slots)
        self.slots_address = ctypes.addressof(self.slots)
        # The driver call releases the interpreter lock after the buffer is packed.
        self.lock = threading.Lock()


def _launch_config(driver: Any, kernel: Kernel) -> Any:
    """What is the same in every launch of a kernel."""
    config = driver.CUlaunchConfig()
    config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
    config.sharedMemBytes = kernel.shared_bytes
    if kernel.overlaps_previous:
        overlap = driver.CUlaunchAttribute()
        ids = driver.CUlaunchAttributeID
        overlap.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [overlap]
        config.numAttrs = 1
    return config


class GpuExecutor:
    """Runs kernels on a GPU.

    Array arguments are device addresses (integers); scalars are Python or numpy numbers. A stream
    is a cuda.core stream, an object with ``cuda_stream`` (torch) or ``handle`` (numba, cupy's
    ``ptr`` as an integer), or a raw handle; ``None`` is the legacy default stream.

    Attributes:
        cc: compute capability.
        multiprocessors: by which persistent kernels choose their grid.
    """

    def __init__(self, device_id: int | None = None) -> None:
        from cuda.bindings import driver
        from cuda.core import Device

        self._driver = driver
        self.device = Device(device_id)
        self.device.set_current()
        capability = self.device.compute_capability
        self.cc = (capability.major, capability.minor)
        self.multiprocessors = int(self.device.properties.multiprocessor_count)
        self._several_devices = len(Device.get_all_devices()) > 1
        self._loaded: dict[Kernel, _LoadedKernel] = {}
        self._streams: dict[int, Any] = {}

    def __call__(self, kernel: Kernel, grid: Grid, args: tuple[Any, ...], stream: Any) -> None:
        loaded = self._loaded.get(kernel)
        if loaded is None:
            loaded = self._loaded[kernel] = self._load(kernel, self._stream(stream))
        handle = self._stream(stream)
        if self._several_devices:
            self.device.set_current()
        config = loaded.config
        with loaded.lock:
            loaded.packer.pack_into(loaded.buffer, 0, *args)
            config.gridDimX, config.gridDimY, config.gridDimZ = grid
            config.hStream = handle
            (error,) = self._driver.cuLaunchKernelEx(
                config, loaded.function, loaded.slots_address, 0
            )
        if error:
            raise RuntimeError(f"launch of {kernel.name} on grid {grid} failed: {error!r}")

    def _load(self, kernel: Kernel, stream: Any) -> _LoadedKernel:
        driver = self._driver
        _, capturing = driver.cuStreamIsCapturing(stream)
        if capturing != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
            raise NotLoadedError(f"{kernel.name} is not loaded yet")
        from cuda.core import ObjectCode

        self.device.set_current()
        module = ObjectCode.from_cubin(compile_cubin(kernel, self.cc))
        function = module.get_kernel(entry_symbol(module.code))
        if kernel.shared_bytes > _DEFAULT_SHARED_BYTES:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (error,) = driver.cuKernelSetAttribute(
                attribute, kernel.shared_bytes, function.handle, self.device.device_id
            )
            if error:
                raise RuntimeError(
                    f"{kernel.name} needs {kernel.shared_bytes} bytes of shared memory: {error!r}"
                )
        # A CUkernel may stand where a CUfunction is asked for; the wrapper classes may not.
        return _LoadedKernel(driver, module, driver.CUfunction(int(function.handle)), kernel)

    def _stream(self, stream: Any) -> Any:
        handle: Any = 0
        if stream is not None:
            handle = getattr(stream, "cuda_stream", None)
            if handle is None:
                handle = getattr(stream, "handle", stream)
            handle = int(getattr(handle, "value", handle) or 0)
        known = self._streams.get(handle)
        if known is None:
            known = self._streams[handle] = self._driver.CUstream(handle)
        return known


def entry_symbol(cubin: bytes) -> str:
    """The symbol of a cubin's only kernel: the name of its ``.text.`` section."""
    marker = b".text."
    start = cubin.index(marker) + len(marker)
    return cubin[start : cubin.index(b"\0", start)].decode()
