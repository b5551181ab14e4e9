"""The GPUs that the NVIDIA driver shows, asked through the driver alone.

No CUDA context is created, and neither numba nor torch is imported, so asking costs milliseconds
also where there is no GPU.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import sys
from dataclasses import dataclass
from typing import Any

MIN_CAPABILITY = (8, 0)
"""Oldest compute capability that the kernels run on."""

_CAPABILITY_ATTRIBUTES = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{MAJOR,MINOR}


@dataclass(frozen=True)
class Gpu:
    """A GPU: its driver ordinal, its name, its compute capability."""

    ordinal: int
    name: str
    capability: tuple[int, int]

    @property
    def problem(self) -> str:
        """Why the kernels cannot run on it, empty if they can."""
        if self.capability >= MIN_CAPABILITY:
            return ""
        have, need = (f"{major}.{minor}" for major, minor in (self.capability, MIN_CAPABILITY))
        return f"{self.name} has compute capability {have}; the kernels need {need} or newer"


@functools.cache
def find_gpus() -> tuple[tuple[Gpu, ...], str]:
    """Lists the GPUs.

    Returns:
        The GPUs in driver order, and why there are none (empty if there are some).
    """
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return (), f"no NVIDIA driver ({library} is not found)"
    if code := driver.cuInit(0):
        return (), f"the NVIDIA driver does not start (cuInit gives CUDA error {code})"
    count = ctypes.c_int()
    if (code := driver.cuDeviceGetCount(ctypes.byref(count))) or not count.value:
        return (), f"the NVIDIA driver shows no GPU (CUDA error {code})"
    return tuple(_query(driver, i) for i in range(count.value)), ""


def _query(driver: Any, ordinal: int) -> Gpu:
    device = ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    name = ctypes.create_string_buffer(128)
    driver.cuDeviceGetName(name, len(name), device)
    value = ctypes.c_int()
    capability = []
    for attribute in _CAPABILITY_ATTRIBUTES:
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    return Gpu(ordinal, name.value.decode(), (capability[0], capability[1]))


@functools.cache
def missing_packages() -> str:
    """Names what the "gpu" backend needs and Python does not find, empty if all is there."""
    missing = [name for name in ("numba_cuda", "cuda") if importlib.util.find_spec(name) is None]
    return ", ".join(missing)
