"""`nbmoe doctor`: what is installed, what can run where, and the command that mends the rest."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import os
import platform
import re
import sys
from dataclasses import dataclass
from typing import Any

import nbmoe
from nbmoe.cli.drawing import table

_PACKAGES = (
    ("numpy", ""),
    ("ml_dtypes", ""),
    ("safetensors", "checkpoints"),
    ("numba", "emulate, cudasim, reference"),
    ("llvmlite", "emulate"),
    ("greenlet", "emulate"),
    ("numba-cuda", "gpu"),
    ("cuda-core", "gpu"),
    ("cuda-bindings", "gpu"),
)
_LINKERS = ("nvidia-nvjitlink", "nvidia-nvjitlink-cu12")
_NO_PACKAGE = "not installed"


@dataclass(frozen=True)
class Finding:
    """Something that does not work, and the command or step that mends it."""

    what: str
    remedy: str


def add_parser(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="say what can run on this machine, and what to do about the rest",
        description="Exit status 0 if the backend that would be chosen can run, 1 if not.",
    )
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        0 if the backend that a call without arguments would use can run, else 1.
    """
    del args
    findings = _print_packages()
    findings += _print_gpus()
    usable = _print_backends()
    _print_kernels()
    if findings:
        print("\nTo mend")
        print(table([(f"{finding.what}:", finding.remedy) for finding in findings]))
    return 0 if usable else 1


def _print_packages() -> list[Finding]:
    print("Installed")
    where = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    rows = [("nbmoe", nbmoe.__version__, ""), ("python", platform.python_version(), where)]
    rows += [(name, _version(name) or _NO_PACKAGE, use) for name, use in _PACKAGES]
    linker = next((name for name in _LINKERS if _version(name)), _LINKERS[0])
    rows.append((linker, _version(linker) or _NO_PACKAGE, "gpu"))
    print(table(rows))
    findings = []
    numpy_version = _release(_version("numpy"))
    if numpy_version >= (2, 5):
        what = "numpy 2.5 or newer cannot import numba-cuda's compiler"
        findings.append(Finding(what, "pip install 'numpy<2.5'"))
    return findings


def _print_gpus() -> list[Finding]:
    from nbmoe.gpus import find_gpus

    print("\nGPUs")
    gpus, reason = find_gpus()
    if not gpus:
        print(f"  none: {reason}")
        return []
    driver = _driver_version()
    print(f"  driver for CUDA {driver[0]}.{driver[1]}")
    for gpu in gpus:
        major, minor = gpu.capability
        print(f"  {gpu.ordinal}: {gpu.name}, compute capability {major}.{minor}")
    findings = [Finding(gpu.problem, "use --backend emulate") for gpu in gpus if gpu.problem]
    linker = next((_version(name) for name in _LINKERS if _version(name)), "")
    if _release(linker)[:1] > driver[:1]:
        what = f"the driver is for CUDA {driver[0]}, the compiler packages are newer"
        findings.append(Finding(what, "pip install 'nbmoe[cu12]', or update the driver"))
    return findings


def _print_backends() -> bool:
    from nbmoe.backend import NAMES, problem, resolve
    from nbmoe.errors import NbmoeError

    print("\nBackends")
    for name in NAMES:
        trouble = problem(name)
        print(f"  {name:<10} {'yes' if trouble is None else f'no: {trouble.reason}'}")
        if trouble is not None:
            print(f"  {'':<10} to mend: {trouble.remedy}")
    try:
        chosen = resolve(api="doctor")
    except NbmoeError as error:
        print(f"  chosen here: none. {error}")
        return False
    print(f"  chosen here: {chosen.name} ({chosen.reason})")
    return True


def _print_kernels() -> None:
    from nbmoe.backend import NAMES, problem
    from nbmoe.gpus import find_gpus

    print("\nKernels")
    gpus, _ = find_gpus()
    hosts = [name for name in NAMES if name not in ("gpu", "reference")]
    rows = [("", *(f"GPU {gpu.ordinal}" for gpu in gpus), *hosts)]
    gpu_usable = problem("gpu") is None
    for kernel, min_cc in kernel_capabilities().items():
        on_gpus = []
        for gpu in gpus:
            needed = f"needs {min_cc[0]}.{min_cc[1]}"
            can_run = gpu.capability >= min_cc
            on_gpus.append(needed if not can_run else "yes" if gpu_usable else "no")
        on_hosts = ["yes" if problem(name) is None else "no" for name in hosts]
        rows.append((kernel, *on_gpus, *on_hosts))
    print(table(rows))


def kernel_capabilities() -> dict[str, tuple[int, int]]:
    """Oldest compute capability of each kernel, tile shapes and capacities taken together.

    Making a kernel compiles nothing.
    """
    from nbmoe_kernels.catalog import catalog

    found: dict[str, tuple[int, int]] = {}
    for kernel in catalog():
        name = re.sub(r"(_sm\d+\w*|_\d+)$", "", kernel.name)
        found[name] = min(found.get(name, kernel.min_cc), kernel.min_cc)
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, (2, 4) for "2.4.6"."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _driver_version() -> tuple[int, int]:
    """CUDA version that the driver serves. Call only where GPUs were found."""
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10
