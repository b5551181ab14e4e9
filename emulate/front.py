"""The front door: one call that runs a kernel on the CPU."""

from typing import Any, Literal

import numpy as np

from emulate.options import Options, check_shape
from emulate.rebind import plain_function
from emulate.report import Report

Extents = int | tuple[int, ...]


def launch(
    kernel: Any,
    grid: Extents,
    block: Extents,
    *args: Any,
    shared_bytes: int = 0,
    engine: Literal["fast", "interpreted"] = "fast",
    boundscheck: bool = True,
    copies: Literal["eager", "lazy"] = "eager",
    seed: int | None = None,
    resident: int | Literal["all"] | None = None,
) -> Report:
    """Run a CUDA kernel on the CPU, to its end.

    Args:
        kernel: a plain function, a `numba.cuda.jit` kernel, or an object with ``py_func``.
        grid: CTAs in x, y, z.
        block: threads of a CTA in x, y, z.
        *args: numpy arrays, which the kernel changes in place, and numbers.
        shared_bytes: dynamic shared memory of a CTA [bytes].
        engine: ``fast`` compiles the kernel; ``interpreted`` runs it as Python.
        boundscheck: an index out of bounds raises `KernelError`. The interpreted engine always
            checks.
        copies: an async copy lands when it is issued (``eager``), or as late as the program allows,
            at the wait that covers it (``lazy``; the interpreted engine is always eager).
        seed: threads run in a random order that this number repeats, instead of first in, first
            out.
        resident: CTAs alive at one time. By default some run side by side, and the next ones start
            when there is room or when all threads wait, so that a CTA may wait for any other;
            ``all`` starts all CTAs first; a number never exceeds it, so that a CTA that waits for
            one that has no room is a deadlock.

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
    """
    function = plain_function(kernel)
    shape = check_shape(grid, block, shared_bytes)
    options = Options(boundscheck=boundscheck, copies=copies, seed=seed, resident=resident)
    values = tuple(_argument(i, arg) for i, arg in enumerate(args))
    if engine == "fast":
        from emulate.fast.engine import launch as run_fast

        return run_fast(function, shape, values, options)
    if engine == "interpreted":
        from emulate.interpreted.engine import launch as run_interpreted

        return run_interpreted(function, shape, values, options)
    raise ValueError(f'engine: expected "fast" or "interpreted", got {engine!r}')


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
