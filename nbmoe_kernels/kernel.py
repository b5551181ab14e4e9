"""A kernel: a plain function with its argument types and launch resources.

Kernels are made by factories from frozen configs and are compiled by the executor that runs them,
never at import.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from nbmoe_kernels.device.op import Param, parse_params

Grid = tuple[int, int, int]


class CompileError(RuntimeError):
    """Numba cannot compile a kernel; the message is Numba's."""


class NotLoadedError(RuntimeError):
    """A kernel would have to be compiled and loaded while the stream is being captured."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel that any executor can run.

    Attributes:
        name: unique name, configuration included.
        py_func: the device code, a plain function.
        params: its parameters, in order; ``global`` pointers take flat arrays.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block [bytes].
        min_blocks: blocks that must fit on an SM together; bounds the registers.
        min_cc: first compute capability with every instruction that it uses.
        overlaps_previous: whether it may start before the previous kernel of its stream has
            ended, see `nbmoe_kernels.device.grid_dependency`.
    """

    name: str
    py_func: Callable[..., None]
    params: tuple[Param, ...]
    threads: int
    shared_bytes: int = 0
    min_blocks: int = 1
    min_cc: tuple[int, int] = (8, 0)
    overlaps_previous: bool = False

    def launch(self, executor: "Executor", grid: Grid, *args: Any, stream: Any = None) -> None:
        """Run the kernel on ``grid`` blocks through an executor; allocates nothing.

        Args:
            executor: what runs it (GPU, compiled or interpreted emulation).
            grid: blocks in x, y, z; a grid with a zero is not launched.
            *args: flat arrays for pointer parameters, numbers for scalars.
            stream: the executor's stream, ``None`` for its default.
        """
        if len(args) != len(self.params):
            raise TypeError(f"{self.name} takes {len(self.params)} arguments, got {len(args)}")
        if all(grid):
            executor(self, grid, args, stream)


class Executor(Protocol):
    """Runs kernels somewhere."""

    @property
    def multiprocessors(self) -> int:
        """By which persistent kernels choose their grid."""
        ...

    def __call__(self, kernel: Kernel, grid: Grid, args: tuple[Any, ...], stream: Any) -> None: ...


def kernel(
    params: str,
    *,
    threads: int,
    name: str,
    shared_bytes: int = 0,
    min_blocks: int = 1,
    min_cc: tuple[int, int] = (8, 0),
    overlaps_previous: bool = False,
) -> Callable[[Callable[..., None]], Kernel]:
    """Decorate a device function as a `Kernel`.

    Args:
        params: parameter list in the signature grammar of `nbmoe_kernels.device.op`.
        threads: threads of a block.
        name: unique name, configuration included.
        shared_bytes: dynamic shared memory of a block [bytes].
        min_blocks: blocks that must fit on an SM together.
        min_cc: first compute capability that can run it.
        overlaps_previous: whether it may start before the previous kernel of its stream has
            ended; it then calls `nbmoe_kernels.device.grid_dependency.wait_for_previous_grid`.
    """

    def wrap(py_func: Callable[..., None]) -> Kernel:
        return Kernel(
            name,
            py_func,
            parse_params(params),
            threads,
            shared_bytes,
            min_blocks,
            min_cc,
            overlaps_previous,
        )

    return wrap
