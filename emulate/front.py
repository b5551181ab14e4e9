"""The front door: one call that runs a kernel on the CPU."""

import dataclasses
from typing import Any, Literal

import numpy as np

from emulate.errors import UnsupportedPlatform
from emulate.options import Options, Shape, check_shape
from emulate.rebind import plain_function
from emulate.report import Report

Extents = int | tuple[int, ...]


def launch(
    kernel: Any,
    grid: Extents,
    block: Extents,
    *args: Any,
    shared_bytes: int = 0,
    engine: Literal["fast", "interpreted", "checked"] = "fast",
    boundscheck: bool = True,
    copies: Literal["eager", "lazy", "random"] = "eager",
    seed: int | None = None,
    resident: int | Literal["all"] | None = None,
    cc: tuple[int, int] = (9, 0),
) -> Report:
    """Run a CUDA kernel on the CPU, to its end.

    Args:
        kernel: a plain function, a `numba.cuda.jit` kernel, or an object with ``py_func``.
        grid: CTAs in x, y, z.
        block: threads of a CTA in x, y, z.
        *args: numpy arrays, which the kernel changes in place, and numbers.
        shared_bytes: dynamic shared memory of a CTA [bytes].
        engine: ``fast`` compiles the kernel; ``interpreted`` runs it as Python, and does so for
            ``fast`` too on a machine for which there are no fibers; the report's ``note`` says so.
            ``checked`` is `emulate.check` with one schedule, and raises what it finds.
        boundscheck: an index out of bounds raises `KernelError`. The interpreted engine always
            checks.
        copies: async work completes when it is issued (``eager``), as late as the program allows,
            at the wait that covers it (``lazy``), or at a time in between that ``seed`` decides
            (``random``).
        seed: threads run in a random order that this number repeats, instead of first in, first
            out.
        resident: CTAs alive at one time. By default some run side by side, and the next ones start
            when there is room or when all threads wait, so that a CTA may wait for any other;
            ``all`` starts all CTAs first; a number never exceeds it, so that a CTA that waits for
            one that has no room is a deadlock.
        cc: compute capability whose limits apply: shared memory, and ops that came later.

    Returns:
        What the launch took.

    Raises:
        ValueError: a grid, a block or a size of shared memory that no GPU takes.
        TypeError: the kernel or an argument is of no known type.
        CompileError: the fast engine cannot compile the kernel.
        KernelError: the kernel raised, for instance for an index out of bounds.
        Deadlock: threads wait and none can run.
        CollectiveDivergence: lanes of a warp are in different collectives.
        EarlyExit: threads wait in a barrier of which others will never know.
        UnsupportedOp: the kernel uses an op or a function of `numba.cuda` that has no
            implementation here, or one that ``cc`` does not have.
    """
    function = plain_function(kernel)
    shape = check_shape(grid, block, shared_bytes)
    options = Options(boundscheck=boundscheck, copies=copies, seed=seed, resident=resident, cc=cc)
    values = arguments(args)
    if engine == "checked":
        from emulate.checked.check import launch as run_checked

        return run_checked(function, shape, values, options)
    values = tuple(v.view(np.ndarray) if isinstance(v, np.ndarray) else v for v in values)
    if engine == "fast":
        return _launch_fast(function, shape, values, options)
    if engine == "interpreted":
        from emulate.interpreted.engine import launch as run_interpreted

        return run_interpreted(function, shape, values, options)
    raise ValueError(f'engine: expected "fast", "interpreted" or "checked", got {engine!r}')


def _launch_fast(function: Any, shape: Shape, values: tuple[Any, ...], options: Options) -> Report:
    try:
        from emulate.fast.engine import launch as run_fast

        return run_fast(function, shape, values, options)
    except UnsupportedPlatform as reason:
        from emulate.interpreted.engine import launch as run_interpreted

        report = run_interpreted(function, shape, values, options)
        return dataclasses.replace(report, note=str(reason))


def arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a launch as NumPy arrays and numbers.

    Raises:
        TypeError: an argument of no known type.
    """
    return tuple(_argument(position, arg) for position, arg in enumerate(args))


def _argument(position: int, value: Any) -> Any:
    # Arrays of Numba's simulator wrap numpy arrays, device arrays and in-kernel views differently.
    while type(value).__module__.startswith("numba.cuda.simulator"):
        inner = getattr(value, "_item", None)
        value = getattr(value, "_ary", None) if inner is None else inner
    if isinstance(value, np.ndarray | np.generic | bool | int | float | complex):
        return value
    raise TypeError(
        f"argument {position}: expected a numpy array or a number, got {type(value).__name__}"
    )
