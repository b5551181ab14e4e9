"""Backends: who runs the kernels, how one is chosen, and what to do when it cannot run.

| name        | arrays      | what runs                                                      |
|-------------|-------------|----------------------------------------------------------------|
| `gpu`       | of a GPU    | the kernels, compiled by numba-cuda                            |
| `emulate`   | of the host | the same kernels, compiled for the CPU by `emulate`            |
| `cudasim`   | of the host | the same kernels, interpreted, on Numba's simulator's arrays   |
| `reference` | of the host | `nbmoe.reference`, the specification in numpy                  |

All give the same bytes. A call's `backend=` decides, then the variable `NBMOE_BACKEND`, then where
the operands live; nothing falls back silently, and no array is copied to make a backend fit.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from nbmoe.arrays import Array
from nbmoe.errors import ArgTypeError, ConfigError, DeviceError, UnsupportedError, message
from nbmoe.gpus import MIN_CAPABILITY, find_gpus, missing_packages
from nbmoe.streams import synchronize
from nbmoe_kernels.device.op import NUMPY_TYPES, Param
from nbmoe_kernels.kernel import CompileError, Executor, Grid, Kernel

NAMES = ("gpu", "emulate", "cudasim", "reference")
VARIABLE = "NBMOE_BACKEND"

Engine = Literal["fast", "interpreted"]

_ENGINES: dict[str, Engine] = {"emulate": "fast", "cudasim": "interpreted"}
"""Engine of `emulate` that a host backend uses."""


@dataclass(frozen=True)
class Backend:
    """A backend that can run, and why it was chosen."""

    name: str
    reason: str

    @property
    def on_gpu(self) -> bool:
        """Whether operands must be on a GPU."""
        return self.name == "gpu"


class Choice(NamedTuple):
    """What a call's `backend=` or else `NBMOE_BACKEND` asks for.

    Attributes:
        name: Empty if neither asks for anything.
        reason: Which of them did.
    """

    name: str
    reason: str

    @classmethod
    def of(cls, api: str, backend: str | None) -> Choice:
        """Reads the argument, or else the variable.

        Raises:
            ArgTypeError, ConfigError: as `resolve`.
        """
        if backend is not None:
            if not isinstance(backend, str):
                got = f"{type(backend).__name__} {backend!r}"
                raise ArgTypeError(message(api, "backend", f"one of {NAMES} or None", got))
            if backend not in NAMES:
                raise ConfigError(message(api, "backend", f"one of {NAMES}", repr(backend)))
            return cls(backend, f"backend={backend!r}")
        name = os.environ.get(VARIABLE, "").strip()
        if name and name not in NAMES:
            hint = f"mend or unset the environment variable {VARIABLE}"
            raise ConfigError(message(api, VARIABLE, f"one of {NAMES}", repr(name), hint))
        return cls(name, f"{VARIABLE}={name}" if name else "")


@dataclass(frozen=True)
class Problem:
    """Why a backend cannot run, how to mend that, and the error that says so."""

    reason: str
    remedy: str
    error: type[Exception] = DeviceError


def simulator_enabled() -> bool:
    """Whether `numba.cuda` is, or will be at its import, Numba's CUDA simulator."""
    config = sys.modules.get("numba.core.config")
    if config is not None:
        return bool(config.ENABLE_CUDASIM)
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0").strip() not in ("", "0")


def problem(name: str) -> Problem | None:
    """Says why a backend cannot run in this process, None if it can."""
    if name == "gpu":
        return _gpu_problem()
    if name == "cudasim" and not simulator_enabled():
        return Problem(
            "numba.cuda is not the simulator in this process",
            "set NUMBA_ENABLE_CUDASIM=1 before Python starts",
        )
    if name != "reference" and not _has_numba():
        return Problem("numba is not installed", "pip install numba")
    return None


@functools.cache
def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


def _gpu_problem() -> Problem | None:
    if simulator_enabled():
        return Problem(
            "numba.cuda is the simulator in this process",
            "start Python without NUMBA_ENABLE_CUDASIM, or use backend='cudasim'",
        )
    gpus, reason = find_gpus()
    if not gpus:
        return Problem(reason, "use backend='emulate', or install the NVIDIA driver")
    if all(gpu.problem for gpu in gpus):
        return Problem(gpus[0].problem, "use backend='emulate'", UnsupportedError)
    if missing := missing_packages():
        return Problem(f"{missing} not installed", "pip install 'nbmoe[cu13]'")
    return None


def resolve(
    backend: str | None = None, arrays: Sequence[Array] = (), *, api: str = "resolve"
) -> Backend:
    """Chooses the backend of a call.

    Args:
        backend: Name, or None for `NBMOE_BACKEND` or else the automatic choice: with operands,
            where they live; without, "gpu" if one is usable. On the host, "cudasim" if
            `NUMBA_ENABLE_CUDASIM=1`, else "emulate".
        arrays: Operands; the place of the first one decides where nothing is named.
        api: Public function, for messages.

    Raises:
        ArgTypeError: `backend` is not a string.
        ConfigError: the name is unknown; the message says whether it came from the variable.
        DeviceError: the backend cannot run here.
        UnsupportedError: the GPU is too old.
    """
    return resolve_choice(api, Choice.of(api, backend), arrays)


def resolve_choice(api: str, asked: Choice, arrays: Sequence[Array] = ()) -> Backend:
    """As `resolve`, for a choice that was made before."""
    name, reason = asked if asked.name else _automatic(arrays)
    if trouble := problem(name):
        rule = f"a backend that can run ({reason})"
        raise trouble.error(
            message(api, "backend", rule, f"{name!r}: {trouble.reason}", trouble.remedy)
        )
    return Backend(name, reason)


def check_reach(api: str, backend: str | None, arrays: dict[str, Array]) -> None:
    """Refuses operands that live on two devices or out of a named backend's reach.

    Args:
        api: Public function, for messages.
        backend: The call's `backend=`.
        arrays: Operands by argument name.

    Raises:
        ArgTypeError, ConfigError: as `resolve`.
        DeviceError: an operand is where the backend cannot reach it.
    """
    check_choice_reaches(api, Choice.of(api, backend), arrays)


def check_choice_reaches(api: str, asked: Choice, arrays: dict[str, Array]) -> None:
    """As `check_reach`, for a choice that was made before."""
    name, reason = asked
    first_arg, first = next(iter(arrays.items()))
    on_gpu = first.kind.on_gpu if not name else name == "gpu"
    because = reason if name else f"as {first_arg} is"
    home = first.device
    for arg, array in arrays.items():
        place = "GPU" if array.kind.on_gpu else "host"
        if array.kind.on_gpu != on_gpu:
            rule = f"an array of the {'GPU' if on_gpu else 'host'} ({because})"
            hint = "move it explicitly: nbmoe.arrays.to_backend() and to_numpy()"
            raise DeviceError(message(api, arg, rule, f"one of the {place}", hint))
        if home is None:
            home = array.device
        if array.device is not None and array.device != home:
            rule = f"an array of GPU {home}, as {first_arg} is"
            raise DeviceError(message(api, arg, rule, f"one of GPU {array.device}"))
    if on_gpu and home is not None:
        _check_capability(api, first_arg, home)


def _check_capability(api: str, arg: str, ordinal: int) -> None:
    gpus, _ = find_gpus()
    if ordinal < len(gpus) and gpus[ordinal].problem:
        rule = f"an array of a GPU of compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}+"
        raise UnsupportedError(message(api, arg, rule, gpus[ordinal].problem))


def _automatic(arrays: Sequence[Array]) -> tuple[str, str]:
    simulator = simulator_enabled()
    host = "cudasim" if simulator else "emulate"
    if arrays:
        if arrays[0].kind.on_gpu:
            return "gpu", "the operands are on a GPU"
        where = "the operands are on the host"
        return host, f"{where}, NUMBA_ENABLE_CUDASIM=1" if simulator else where
    trouble = problem("gpu")
    if trouble is None:
        return "gpu", "a usable GPU is here"
    return host, "NUMBA_ENABLE_CUDASIM=1" if simulator else f"no usable GPU: {trouble.reason}"


def explain(backend: str | None = None) -> str:
    """Says which backend a call without operands would use and why, one line for each backend.

    Args:
        backend: As in `resolve`.
    """
    asked = Choice.of("explain", backend)
    name, reason = asked if asked.name else _automatic(())
    lines = [f"backend: {name} ({reason})"]
    for other in NAMES:
        trouble = problem(other)
        state = f"no: {trouble.reason} — {trouble.remedy}" if trouble else "can run"
        lines.append(f"  {other:<10}{state}")
    return "\n".join(lines)


@functools.cache
def executor(name: str, device: int | None = None, *, waits: bool = False) -> Executor:
    """Returns the executor of a backend that runs kernels.

    Args:
        name: "gpu", "emulate" or "cudasim".
        device: Ordinal of the GPU, None for the current one.
        waits: Whether a launch on a GPU returns when the kernel has finished, for arrays of
            libraries whose streams cannot be made to wait (jax).
    """
    if name == "gpu":
        from nbmoe_kernels.launcher import GpuExecutor

        return WaitingExecutor(GpuExecutor(device)) if waits else GpuExecutor(device)
    return EmulateExecutor(_ENGINES[name])


class WaitingExecutor:
    """Runs kernels on a GPU and waits for each."""

    def __init__(self, executor: Executor) -> None:
        """Takes the executor that launches."""
        self.executor = executor

    @property
    def multiprocessors(self) -> int:
        """Multiprocessors of the GPU."""
        return self.executor.multiprocessors

    def __call__(self, kernel: Kernel, grid: Grid, args: tuple[Any, ...], stream: Any) -> None:
        """Launches `kernel` as the executor does; returns when the stream has finished."""
        self.executor(kernel, grid, args, stream)
        synchronize(stream)


class EmulateExecutor:
    """Runs kernels on the host with `emulate`.

    Attributes:
        multiprocessors: So few that persistent blocks take several tiles.
    """

    multiprocessors = 2

    def __init__(self, engine: Engine) -> None:
        """Takes the name of an engine of `emulate.launch`."""
        self.engine = engine

    def __call__(self, kernel: Kernel, grid: Grid, args: tuple[Any, ...], stream: Any) -> None:
        """Launches `kernel` over `grid`; `stream` has no meaning on the host.

        Args:
            kernel: A `nbmoe_kernels` kernel.
            grid: Thread blocks in x, y, z.
            args: numpy arrays and numbers in the order of `kernel.params`.
            stream: Ignored: the call returns when the kernel has finished.

        Raises:
            CompileError: Numba cannot compile the kernel.
        """
        import emulate

        values = [_argument(p, a) for p, a in zip(kernel.params, args, strict=True)]
        try:
            emulate.launch(
                kernel,
                grid,
                kernel.threads,
                *values,
                shared_bytes=kernel.shared_bytes,
                engine=self.engine,
            )
        except emulate.CompileError as error:
            raise CompileError(str(error)) from error


def _argument(param: Param, value: Any) -> Any:
    """Gives an argument the exact type that the kernel declares."""
    dtype = NUMPY_TYPES[param.dtype]
    if param.kind == "scalar":
        return dtype(value)
    # A kernel does not touch an empty array, but its pointer must be one: engines index from it.
    return value.reshape(-1).view(dtype) if value.size else np.zeros(1, dtype)
