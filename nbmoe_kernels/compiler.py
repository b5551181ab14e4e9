"""Compiles kernels for a GPU that need not be present, and keeps the result on disk.

numba-cuda turns the function into LTO IR and nvJitLink into a cubin (the LTO route keeps
instructions that whole-program assembly needs, such as `setmaxnreg`). Neither contracts
`a * b + c` to one rounding, so a caller's function in a kernel has the bits of the CPU. The cache
key is the content: every source file of this package, the kernel's own file, what its closure
holds, the argument types, the architecture and the versions of the tools.
"""

import functools
import hashlib
import importlib.metadata
import inspect
import os
import tempfile
import types as pytypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from nbmoe_kernels.device.op import STUBS, Op
from nbmoe_kernels.kernel import CompileError, Kernel

ComputeCapability = tuple[int, int]
LINK_OPTIONS = ("-lto", "-fma=0")
"""Of nvJitLink, which compiles the LTO IR: NVVM's own option does not bind it."""

_TOOLS = ("numba-cuda", "numba", "llvmlite", "nvidia-nvvm", "nvidia-nvjitlink", "cuda-core")


def architecture(cc: ComputeCapability) -> str:
    """``sm_90a`` for (9, 0): from Hopper on with the architecture-specific instructions."""
    return f"sm_{cc[0]}{cc[1]}" + ("a" if cc >= (9, 0) else "")


def cache_directory() -> Path:
    """Folder of compiled kernels: ``$NBMOE_CACHE_DIR`` or ``~/.cache/nbmoe``."""
    root = os.environ.get("NBMOE_CACHE_DIR") or Path.home() / ".cache" / "nbmoe"
    return Path(root) / "cubin"


def compile_ptx(kernel: Kernel, cc: ComputeCapability) -> str:
    """PTX of a kernel, for inspection and for the assembler's report."""
    return str(_library(_checked(kernel, cc)).get_asm_str(_target(cc)))


def compile_cubin(kernel: Kernel, cc: ComputeCapability) -> bytes:
    """Machine code of a kernel, from the disk cache or compiled now."""
    try:
        key = content_key(kernel, cc)
    except (OSError, TypeError) as error:  # a function without source, a value without a text
        raise CompileError(f"{kernel.name}: {error}") from error
    path = cache_directory() / f"{kernel.name}-{architecture(cc)}-{key}.cubin"
    if path.is_file():
        return path.read_bytes()
    cubin = _link(_library(_checked(kernel, cc)).get_ltoir(_target(cc)), cc)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A rename is atomic: another process sees the whole file or none.
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(cubin)
    os.replace(file.name, path)
    return cubin


def _checked(kernel: Kernel, cc: ComputeCapability) -> Kernel:
    if cc < kernel.min_cc:
        raise RuntimeError(
            f"{kernel.name} needs compute capability {kernel.min_cc[0]}.{kernel.min_cc[1]}, "
            f"got {cc[0]}.{cc[1]}"
        )
    return kernel


def _target(cc: ComputeCapability) -> tuple[int, int, str]:
    return (*cc, "a" if cc >= (9, 0) else "")


@functools.cache
def _library(kernel: Kernel) -> Any:
    """The kernel's LLVM IR. It is the same for every architecture: no op looks at one."""
    from numba import cuda

    if getattr(cuda, "implementation", "") != "NVIDIA":
        raise RuntimeError(
            "compiling kernels needs the numba-cuda package and a process without "
            "NUMBA_ENABLE_CUDASIM — pip install 'nbmoe[cu13]' (or [cu12])"
        )
    # cuda.compile() is this function with the IR thrown away; seconds for each architecture.
    from numba.cuda.compiler import _compile_pyfunc_with_fixup

    from nbmoe_kernels.device.ptx import register_ops

    register_ops()
    try:
        with _compiling_for(kernel.min_cc):
            library, _ = _compile_pyfunc_with_fixup(
                _with_device_functions(kernel.py_func, {}),
                _numba_types(kernel),
                device=False,
                abi="numba",
                cc=kernel.min_cc,
                launch_bounds=(kernel.threads, kernel.min_blocks),
            )
    except _numba_errors() as error:
        raise CompileError(f"{kernel.name}: {error}") from error
    _check_grid_dependency(kernel, library.get_llvm_str())
    library._nvvm_options["fma"] = False
    return library


@contextmanager
def _compiling_for(cc: ComputeCapability) -> Iterator[None]:
    """In here device functions are compiled for ``cc``; numba-cuda would ask the current GPU."""
    from numba.cuda import dispatcher
    from numba.cuda.core.compiler_lock import global_compiler_lock

    ask_gpu = dispatcher.get_current_device
    with global_compiler_lock:  # nobody else compiles meanwhile
        dispatcher.get_current_device = lambda: pytypes.SimpleNamespace(compute_capability=cc)
        try:
            yield
        finally:
            dispatcher.get_current_device = ask_gpu


def _check_grid_dependency(kernel: Kernel, text: str) -> None:
    """What follows a kernel may only rely on everything before it having ended if it waits."""
    starts_early = kernel.overlaps_previous or "griddepcontrol.launch_dependents" in text
    if starts_early and "griddepcontrol.wait" not in text:
        raise RuntimeError(
            f"{kernel.name} overlaps another kernel and never calls wait_for_previous_grid"
        )


def _numba_errors() -> tuple[type[Exception], ...]:
    """Bases of what Numba raises; numba-cuda has a copy of its own."""
    from numba.core import errors

    try:
        from numba.cuda.core import errors as cuda_errors
    except ImportError:
        return (errors.NumbaError,)
    return errors.NumbaError, cuda_errors.NumbaError


def _link(ltoir: bytes, cc: ComputeCapability) -> bytes:
    # Not through cuda.core: its LinkerOptions(fma=False) spells the option -fma=false, which
    # nvJitLink refuses when it compiles LTO IR.
    from cuda.bindings import nvjitlink

    options = [f"-arch={architecture(cc)}", *LINK_OPTIONS]
    handle = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, ltoir, len(ltoir), "kernel")
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        text = log.decode(errors="replace").strip("\0\n")
        raise RuntimeError(f"nvJitLink failed for {architecture(cc)}: {text}") from error
    finally:
        nvjitlink.destroy(handle)
    return bytes(cubin)


def _numba_types(kernel: Kernel) -> tuple[Any, ...]:
    from nbmoe_kernels.device.ptx import NUMBA_TYPES, pointer_type

    return tuple(
        pointer_type(p.dtype) if p.is_pointer else NUMBA_TYPES[p.dtype] for p in kernel.params
    )


def _with_device_functions(fn: Callable[..., Any], seen: dict[Any, Any]) -> Any:
    """A clone of ``fn`` in which every function it names is compiled and inlined.

    Those are functions marked as `device_function`, and functions that Numba compiles for the CPU.
    """
    from numba import cuda
    from numba.core.registry import CPUDispatcher

    def replace(value: Any) -> Any:
        is_jitted = isinstance(value, CPUDispatcher)
        if not (is_jitted or getattr(value, "is_device_function", False)):
            return value
        if value not in seen:
            body = _with_device_functions(value.py_func if is_jitted else value, seen)
            seen[value] = cuda.jit(device=True, forceinline=True)(body)
        return seen[value]

    names = fn.__globals__
    used = {n: replace(names[n]) for n in fn.__code__.co_names if n in names}
    cells = tuple(pytypes.CellType(replace(c.cell_contents)) for c in fn.__closure__ or ())
    return pytypes.FunctionType(
        fn.__code__, {**names, **used}, fn.__name__, fn.__defaults__, cells or None
    )


@functools.cache
def _package_digest() -> bytes:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


@functools.cache
def _tool_versions() -> str:
    found = []
    for tool in _TOOLS:
        try:
            found.append(f"{tool}={importlib.metadata.version(tool)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{tool}=none")
    return " ".join(found)


def content_key(kernel: Kernel, cc: ComputeCapability) -> str:
    """Hash of everything that reaches the machine code."""
    digest = hashlib.sha256(_package_digest())
    digest.update(f"{_tool_versions()} {cc} {kernel.threads} {kernel.min_blocks}".encode())
    digest.update(repr(kernel.params).encode())
    _digest_function(digest, kernel.py_func)
    return digest.hexdigest()[:24]


def _digest_function(digest: Any, fn: Callable[..., Any]) -> None:
    code = fn.__code__
    is_ours = _is_ours(code.co_filename)
    if is_ours:
        # `_package_digest` has the source; reading it again takes milliseconds a kernel.
        digest.update(f"{fn.__module__} {code.co_firstlineno} {fn.__qualname__}".encode())
    else:
        digest.update(inspect.getsource(fn).encode())
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        _digest_value(digest, f"{fn.__name__}: closure value {name}", cell.cell_contents)
    if is_ours:
        return  # `_package_digest` has what it names, too
    for name in code.co_names:
        if name in fn.__globals__:
            _digest_value(digest, f"{fn.__name__}: global {name}", fn.__globals__[name])


def _digest_value(digest: Any, what: str, value: Any) -> None:
    digest.update(what.encode())
    value = getattr(value, "py_func", value)  # a function that numba has compiled
    if isinstance(value, pytypes.ModuleType):
        digest.update(value.__name__.encode())
    elif isinstance(op := getattr(value, "op", None), Op) and STUBS.get(op.name) is value:
        digest.update(f"{op.name}{op.params}{op.result}{op.ptx}".encode())
    elif isinstance(value, pytypes.FunctionType):
        _digest_function(digest, value)
    elif isinstance(value, int | float | str | bool | tuple | np.generic | type | None):
        digest.update(repr(value).encode())
    else:
        raise TypeError(f"{what} = {value!r} cannot be hashed")


@functools.cache
def _is_ours(filename: str) -> bool:
    return Path(filename).is_relative_to(Path(__file__).parent)
