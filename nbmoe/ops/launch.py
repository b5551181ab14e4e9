"""What an operation does between its checks and its kernel: operands, outputs, executor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbmoe import arrays, backend
from nbmoe.activation import GatedActivation
from nbmoe.arrays import Array, Kind, describe
from nbmoe.backend import Backend
from nbmoe.errors import CaptureError, ConfigError
from nbmoe.validate import Call, Elements
from nbmoe_kernels.kernel import CompileError, Executor, Grid, Kernel, NotLoadedError

_NO_ELEMENTS = np.empty(0, np.uint8)


def executor(chosen: Backend, call: Call) -> Executor:
    """The executor of the backend, for the GPU that holds the operands.

    A launch raises CaptureError if its kernel is not loaded and its stream is being captured.
    """
    if not chosen.on_gpu:
        return backend.executor(chosen.name)
    device, waits = None, False
    for operands in (call.inputs, call.outputs):
        for array in operands.values():
            if device is None:
                device = array.device
            waits = waits or array.kind is Kind.JAX
    return _CallExecutor(backend.executor(chosen.name, device, waits=waits), call)


class _CallExecutor:
    """Runs the kernels of one call on a GPU; errors name the call."""

    def __init__(self, run: Executor, call: Call) -> None:
        self.run = run
        self.call = call

    @property
    def multiprocessors(self) -> int:
        """Those of the GPU."""
        return self.run.multiprocessors

    def __call__(self, kernel: Kernel, grid: Grid, args: tuple[Any, ...], stream: Any) -> None:
        try:
            self.run(kernel, grid, args, stream)
        except NotLoadedError as error:
            rule = "a stream whose capture uses kernels that are loaded"
            hint = "warm up first: run the call once before the capture"
            raise CaptureError(self.call.message("stream", rule, error, hint)) from error


@contextmanager
def compiling(call: Call, activation: GatedActivation) -> Iterator[None]:
    """Launches in here compile the caller's function, if the activation has one.

    Raises:
        ConfigError: Numba cannot compile it.
    """
    try:
        yield
    except CompileError as error:
        if activation.gated_activation_fn is None:
            raise
        rule = "a gated_activation_fn that Numba compiles"
        hint = "functions that it calls need numba.njit; objects and files are out of reach"
        got = f"{activation.gated_activation_fn.__name__}: {_reason(error)}"
        raise ConfigError(call.message("activation", rule, got, hint)) from error


def _reason(error: CompileError) -> str:
    """The line of Numba's message that says what is wrong; the first ones say where it was."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line and "Failed in " not in line), str(error))


def flat(chosen: Backend, *operands: Array | None) -> tuple[Any, ...]:
    """Operands as executors take them: flat numpy arrays on the host, addresses on a GPU.

    None becomes an empty array or a null address: the kernel is told not to touch it.
    """
    if chosen.on_gpu:
        return tuple(0 if a is None else a.pointer for a in operands)
    return tuple(_NO_ELEMENTS if a is None else _kernel_view(a).reshape(-1) for a in operands)


def _kernel_view(operand: Array) -> NDArray[Any]:
    """A host operand as kernels declare it: codes and scales of a byte as uint8."""
    view = host_view(operand)
    return view.view(np.uint8) if view.itemsize == 1 else view


def host_view(operand: Array) -> NDArray[Any]:
    """A host operand, with uint16 read as what it holds: bfloat16 bits."""
    assert operand.view is not None, "checked: the operand is on the host"
    return operand.view.view(arrays.BFLOAT16) if operand.dtype == "uint16" else operand.view


def allocate(call: Call, arg: str, shape: tuple[int, ...], elements: Elements) -> Array:
    """An output of the same kind and place as the call's first operand."""
    like = next(iter(call.inputs.values()))
    return describe(call.api, arg, arrays.empty(like, shape, arrays.named_dtype(elements.storage)))


def store(
    output: Array, result: NDArray[Any], parts: Iterable[tuple[int, int]] | None = None
) -> None:
    """Copies a result of the reference into an output: all of it, or some ranges of axis 0."""
    into = host_view(output).view(result.dtype)
    for begin, end in ((0, len(result)),) if parts is None else parts:
        into[begin:end] = result[begin:end]
