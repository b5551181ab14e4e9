"""Compiles a kernel: its Python function to one C function that a fiber starts in."""

import functools
import time
import weakref
from dataclasses import asdict, dataclass
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import errors, types
from numba.core.compiler_lock import global_compiler_lock

from emulate import cache
from emulate.errors import CompileError
from emulate.fast import ops, runtime, shim, twins
from emulate.fast.arguments import emit_arguments
from emulate.fast.build import Build, building, without_garbage_collection
from emulate.fast.calls import call_of
from emulate.fast.locate import KernelCompiler
from emulate.fast.records import FIBER_RUN, RUN_ARGUMENTS
from emulate.fast.units import (
    Assembler,
    ObjectCode,
    emit_call,
    load_or_compile,
    raised,
)
from emulate.fast.words import emit_call as emit_c_call
from emulate.fast.words import emit_fiber, emit_load
from emulate.fingerprint import Unhashable, fingerprint
from emulate.rebind import Rebinder
from emulate.references import check_supported

ENTRY = "emulate_kernel"


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel's machine code and what its launch needs to know.

    Attributes:
        entry: address at which a fiber starts.
        build: facts found during compilation.
        seconds: time that compiling or loading took [s].
        cached: it was loaded from disk.
    """

    entry: int
    build: Build
    seconds: float
    cached: bool


_by_function: "weakref.WeakKeyDictionary[Any, dict[Any, CompiledKernel]]"
_by_function = weakref.WeakKeyDictionary()
_by_content: dict[str, CompiledKernel] = {}


def compiled(
    function: Any, kinds: tuple[types.Type, ...], *, boundscheck: bool
) -> tuple[CompiledKernel, bool]:
    """The machine code of a kernel for argument types, and whether this process had it already."""
    known = _by_function.setdefault(function, {})
    variant = (kinds, boundscheck)
    kernel = known.get(variant)
    if kernel is not None:
        return kernel, True
    with global_compiler_lock, without_garbage_collection():
        runtime.install()
        try:
            key = cache.key("kernel", fingerprint(function), str(kinds), str(boundscheck))
        except Unhashable:
            key = ""
        # A factory that is called again makes another function of the same content.
        kernel = _by_content.get(key)
        had = kernel is not None
        if kernel is None:
            kernel = _load_or_compile(function, kinds, boundscheck, key)
    known[variant] = kernel
    return kernel, had


def _load_or_compile(
    function: Any, kinds: tuple[types.Type, ...], boundscheck: bool, key: str
) -> CompiledKernel:
    start = time.perf_counter()
    unit = functools.partial(_compile, function, kinds, boundscheck)
    try:
        (entry,), facts, cached = load_or_compile(key, [ENTRY], unit, twins.resolve)
    except (errors.NumbaError, AttributeError) as error:  # the latter for unknown names of `cuda`
        raise CompileError(f"{function.__name__}: {error}") from error
    kernel = CompiledKernel(entry, Build(**facts), time.perf_counter() - start, cached)
    if key:
        _by_content[key] = kernel
    return kernel


def _compile(
    function: Any, kinds: tuple[types.Type, ...], boundscheck: bool
) -> tuple[ObjectCode, dict[str, Any]]:
    ops.register_ops()
    check_supported(function, _cuda_module().knows, call_of)
    helper = njit(
        error_model="numpy",
        boundscheck=boundscheck,
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
        pipeline_class=KernelCompiler,
    )
    # Helpers are compiled anew with every kernel, so that their static arrays are the kernel's.
    cuda = _cuda_module()
    replace = functools.partial(shim.replacement, cuda)
    clone = Rebinder(helper, {"numba.cuda": cuda}, replace).clone(function)
    with building(Build(boundscheck=boundscheck)) as build:
        assembler = Assembler(f"kernel {function.__name__}")
        body = assembler.compile(clone, kinds, types.none, boundscheck=boundscheck, located=True)

        def start(builder: ir.IRBuilder) -> None:
            fiber = emit_fiber(builder)
            words = emit_load(builder, emit_load(builder, fiber, FIBER_RUN), RUN_ARGUMENTS)
            args = emit_arguments(assembler.context, builder, kinds, words)
            status, _ = emit_call(builder, body, args)
            emit_c_call(builder, "emulate_leave", [raised(builder, status)], ir.VoidType())
            builder.unreachable()

        assembler.emit(ENTRY, ir.VoidType(), [], start)
        return assembler.finish(), asdict(build)


@functools.cache
def _cuda_module() -> Any:
    return shim.make_module()
