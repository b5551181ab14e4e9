"""The module that takes the place of `numba.cuda` in kernels of the fast engine."""

# Compiled functions and intrinsics are typed by Numba, not by annotations.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import types as pytypes
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cuda as real_cuda
from numba import njit
from numba.core import types
from numba.core.imputils import lower_constant, lower_getattr
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic, models, register_model, typeof_impl

from emulate.fast import arrays, atomics, stock
from emulate.fast import records as rec
from emulate.fast.locate import source_line
from emulate.fast.words import I32, I64, emit_call, emit_fiber, emit_load, word


class Dim3:
    """``cuda.threadIdx`` and its kin: a name in a kernel, without a value of its own."""

    def __init__(self, name: str) -> None:
        self.name = name


class Dim3Type(types.Opaque):
    """Its Numba type."""

    def __init__(self, name: str) -> None:
        self.place = name
        super().__init__(f"emulate.{name}")


register_model(Dim3Type)(models.OpaqueModel)


@typeof_impl.register(Dim3)
def _type_of_dim3(value: Dim3, context: Any) -> Dim3Type:
    return Dim3Type(value.name)


@lower_constant(Dim3Type)
def _constant_dim3(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return context.get_dummy_value()


# (record that is reached from the fiber, field)
_PLACES = {
    "threadIdx": (None, rec.FIBER_TID),
    "blockIdx": (rec.FIBER_BLOCK, rec.BLOCK_INDEX),
    "blockDim": (rec.FIBER_RUN, rec.RUN_BLOCK),
    "gridDim": (rec.FIBER_RUN, rec.RUN_GRID),
}


@infer_getattr
class _Dim3Attributes(AttributeTemplate):  # type: ignore[misc]
    key = Dim3Type

    def generic_resolve(self, value: Dim3Type, attribute: str) -> types.Type | None:
        return types.int32 if attribute in ("x", "y", "z") else None


def _lower_axis(axis: int, name: str) -> None:
    @lower_getattr(Dim3Type, name)
    def load_axis(context: Any, builder: Any, kind: Dim3Type, value: Any) -> ir.Value:
        return builder.trunc(_emit_place(builder, kind.place, axis), I32)


def _emit_place(builder: Any, place: str, axis: int) -> ir.Value:
    record, offset = _PLACES[place]
    base = emit_fiber(builder)
    if record is not None:
        base = emit_load(builder, base, record)
    return emit_load(builder, base, offset + 8 * axis)


for _axis, _name in enumerate("xyz"):
    _lower_axis(_axis, _name)


@intrinsic
def _barrier(typingctx, vote):
    def codegen(context, builder, signature, args):
        return emit_call(builder, "emulate_barrier", [args[0], word(source_line(builder))], I64)

    return types.int64(types.int64), codegen


@intrinsic
def syncthreads(typingctx):
    """Wait for all threads of the block."""

    def codegen(context, builder, signature, args):
        emit_call(builder, "emulate_barrier", [word(0), word(source_line(builder))], I64)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def nanosleep(typingctx, ns):
    """Let other threads run."""

    def codegen(context, builder, signature, args):
        operands = [word(rec.WAIT_RETRY), word(source_line(builder))]
        emit_call(builder, "emulate_retry", operands, ir.VoidType())
        return context.get_dummy_value()

    return types.void(types.uint32), codegen


@intrinsic
def _fence(typingctx):
    # Memory is sequentially consistent here; a call would only keep LLVM from keeping values.
    def codegen(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic(prefer_literal=True)
def grid(typingctx, ndim):
    """The thread's index in the grid: int64, or a tuple for 2 and 3 dimensions."""
    return _grid_like(ndim, lambda builder, axis: _emit_index(builder, axis))


@intrinsic(prefer_literal=True)
def gridsize(typingctx, ndim):
    """Threads of the grid in each dimension."""
    return _grid_like(ndim, lambda builder, axis: _emit_size(builder, axis))


def _emit_size(builder: Any, axis: int) -> ir.Value:
    return builder.mul(
        _emit_place(builder, "gridDim", axis), _emit_place(builder, "blockDim", axis)
    )


def _emit_index(builder: Any, axis: int) -> ir.Value:
    first = builder.mul(
        _emit_place(builder, "blockIdx", axis), _emit_place(builder, "blockDim", axis)
    )
    return builder.add(first, _emit_place(builder, "threadIdx", axis))


def _grid_like(ndim: Any, emit: Any) -> Any:
    if not isinstance(ndim, types.IntegerLiteral) or ndim.literal_value not in (1, 2, 3):
        return None
    n = ndim.literal_value
    result = types.int64 if n == 1 else types.UniTuple(types.int64, n)  # type: ignore[attr-defined]

    def codegen(context, builder, signature, args):
        values = [emit(builder, axis) for axis in range(n)]
        return values[0] if n == 1 else context.make_tuple(builder, result, values)

    return result(ndim), codegen


_helper = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


@_helper
def syncthreads_count(predicate):
    """Barrier; the number of threads whose predicate holds."""
    return np.int32(_barrier(np.int64(1) if predicate else np.int64(0)))


@_helper
def syncthreads_and(predicate):
    """Barrier; 1 if every thread's predicate holds."""
    missing = _barrier(np.int64(0) if predicate else np.int64(1))
    return np.int32(1) if missing == 0 else np.int32(0)


@_helper
def syncthreads_or(predicate):
    """Barrier; 1 if some thread's predicate holds."""
    return np.int32(1) if _barrier(np.int64(1) if predicate else np.int64(0)) else np.int32(0)


class CudaModule(pytypes.ModuleType):
    """The names of `numba.cuda` that kernels may use."""

    def knows(self, name: str) -> bool:
        """Whether there is a name, ``syncthreads`` or ``atomic.add``."""
        if name in stock.VALUES:
            return True
        value: Any = self
        for part in name.split("."):
            value = getattr(value, part, None)
        return value is not None


def replacement(cuda: CudaModule, value: Any) -> Any:
    """What replaces a member of `numba.cuda` that a kernel imported by name, else None."""
    real = vars(real_cuda)
    names = (name for name in vars(cuda) if not name.startswith("_") and name in real)
    return next((vars(cuda)[name] for name in names if real[name] is value), None)


def make_module() -> CudaModule:
    """The module."""
    cuda = CudaModule("emulate.cuda")
    shared = pytypes.ModuleType("emulate.cuda.shared")
    local = pytypes.ModuleType("emulate.cuda.local")
    shared.array = arrays.shared_array  # type: ignore[attr-defined]
    local.array = arrays.local_array  # type: ignore[attr-defined]
    members: dict[str, Any] = {name: Dim3(name) for name in _PLACES}
    members |= {
        "shared": shared,
        "local": local,
        "atomic": atomics.make_module(),
        "syncthreads": syncthreads,
        "syncthreads_count": syncthreads_count,
        "syncthreads_and": syncthreads_and,
        "syncthreads_or": syncthreads_or,
        "threadfence": _fence,
        "threadfence_block": _fence,
        "threadfence_system": _fence,
        "nanosleep": nanosleep,
        "grid": grid,
        "gridsize": gridsize,
    }
    cuda.__dict__.update(members)
    cuda.__dict__.update(stock.members(cuda))
    return cuda
