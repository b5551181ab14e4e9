"""Units of machine code: Numba functions made into C functions that are found by symbol.

A unit is one object file. It is compiled once a machine, kept by content in the cache, and linked
into the process with its symbols made known to LLVM, so that other units can call it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import types
from numba.core.compiler import Compiler, Flags, compile_extra
from numba.core.registry import cpu_target

from emulate import cache
from emulate.fast.locate import KernelCompiler
from emulate.fast.words import I64, word


def make_flags(*, boundscheck: bool, nrt: bool = True) -> Flags:
    """Numba's flags for code of this engine.

    Divisions follow IEEE (``error_model='numpy'``): a Python exception in arithmetic would be a
    difference from the GPU. There is no fastmath: nothing is contracted or reordered.
    """
    flags = Flags()
    flags.nrt = nrt
    flags.error_model = "numpy"
    flags.boundscheck = boundscheck
    flags.no_compile = True
    flags.no_cpython_wrapper = True
    flags.no_cfunc_wrapper = True
    return flags


@dataclass(frozen=True)
class ObjectCode:
    """An object file and the names of the functions that it calls in others."""

    code: bytes
    imports: tuple[str, ...]


@dataclass(frozen=True)
class Function:
    """A function compiled into a library that is not finished yet."""

    fndesc: Any
    signature: Any
    library: Any
    context: Any


class Assembler:
    """Collects functions into one object file."""

    def __init__(self, name: str) -> None:
        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()
        self.context = cpu_target.target_context
        self.library = self.context.codegen().create_library(name)
        self.library.enable_object_caching()

    def compile(
        self,
        function: Callable[..., Any],
        args: tuple[types.Type, ...],
        result: types.Type,
        *,
        boundscheck: bool = False,
        located: bool = False,
    ) -> Function:
        """Compile a Python function into this library."""
        done = compile_extra(
            cpu_target.typing_context,
            self.context,
            function,
            args,
            result,
            make_flags(boundscheck=boundscheck),
            {},
            library=self.library,
            pipeline_class=KernelCompiler if located else Compiler,
        )
        return Function(done.fndesc, done.signature, self.library, self.context)

    def emit(self, symbol: str, result: ir.Type, params: list[ir.Type], body: Any) -> None:
        """Add a C function whose code ``body(builder, *arguments)`` writes."""
        module = self.library.create_ir_module(symbol)
        function = ir.Function(module, ir.FunctionType(result, params), name=symbol)
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        body(builder, *function.args)
        self.library.add_ir_module(module)

    def export(self, symbol: str, function: Function) -> None:
        """Add a C function on int64 words that calls a compiled one, which must not raise."""
        result = function.signature.return_type

        def body(builder: ir.IRBuilder, *args: ir.Value) -> None:
            _, value = emit_call(builder, function, args)
            if result is types.none:
                builder.ret_void()
            else:
                builder.ret(value)

        kind = ir.VoidType() if result is types.none else I64
        self.emit(symbol, kind, [I64] * len(function.signature.args), body)

    def export_guarded(self, symbol: str, function: Function) -> None:
        """Add a C function ``int64 symbol(int64)``: 0, or the address of what was raised."""

        def body(builder: ir.IRBuilder, argument: ir.Value) -> None:
            status, _ = emit_call(builder, function, (argument,))
            builder.ret(raised(builder, status))

        self.emit(symbol, I64, [I64], body)

    def finish(self) -> ObjectCode:
        """The object code."""
        self.library.finalize()
        functions = self.library._final_module.functions
        imports = [f.name for f in functions if f.is_declaration and f.name[:5] != "llvm."]
        return ObjectCode(bytes(self.library._get_compiled_object()), tuple(imports))


def emit_call(builder: ir.IRBuilder, function: Function, args: Any) -> tuple[Any, ir.Value]:
    """LLVM code: call a compiled function; its status and its value."""
    context = function.context
    callee = context.declare_function(builder.module, function.fndesc)
    signature = function.signature
    status, value = context.call_conv.call_function(
        builder, callee, signature.return_type, signature.args, args
    )
    return status, value


def raised(builder: ir.IRBuilder, status: Any) -> ir.Value:
    """LLVM code: the address of the exception's description, 0 if there was none."""
    return builder.select(status.is_error, builder.ptrtoint(status.excinfoptr, I64), word(0))


_engines: list[llvm.ExecutionEngine] = []

Compile = Callable[[], tuple[ObjectCode, dict[str, Any]]]


def load_or_compile(
    key: str,
    symbols: list[str],
    compile_unit: Compile,
    resolve: Callable[[str], None] = lambda name: None,
) -> tuple[list[int], dict[str, Any], bool]:
    """Link the unit stored under ``key``, after compiling it if there is none.

    Args:
        key: the unit's content; empty for a unit that cannot be kept.
        symbols: the functions that it defines.
        compile_unit: makes the object code, and facts to be stored with it.
        resolve: called with every function that the unit needs and LLVM does not know yet.

    Returns:
        The functions' addresses, the facts, and whether the unit came from disk.
    """
    # Also makes Numba's runtime known to LLVM, which loaded code may call.
    cpu_target.target_context.refresh()
    stored = cache.load(key) if key else None
    if stored:
        header, code = stored
        unit, facts = ObjectCode(code, tuple(header["imports"])), header["facts"]
    else:
        unit, facts = compile_unit()
        if key:
            cache.save(key, {"imports": unit.imports, "facts": facts}, unit.code)
    for name in unit.imports:
        if not llvm.address_of_symbol(name):
            resolve(name)
    return _link(unit, symbols), facts, bool(stored)


def _link(unit: ObjectCode, symbols: list[str]) -> list[int]:
    """Load object code, make its symbols known to LLVM and return their addresses."""
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    for name in unit.imports:
        # LLVM would let the code jump to 0.
        if not llvm.address_of_symbol(name):
            raise RuntimeError(f"compiled code calls {name}, which this process does not have")
    engine.add_object_file(llvm.ObjectFileRef.from_data(unit.code))
    engine.finalize_object()
    _engines.append(engine)  # the code lives as long as the process
    addresses = [engine.get_function_address(symbol) for symbol in symbols]
    for symbol, address in zip(symbols, addresses, strict=True):
        llvm.add_symbol(symbol, address)
    return addresses
