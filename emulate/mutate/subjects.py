"""The shipped kernels at small shapes, for their mutants to be run on.

A shape is small, but reaches every loop and branch: several groups of slots a warp, empty and
masked experts, partial tiles of rows and of K, and more K than the pipeline has stages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from emulate.mutate.matmuls import matmul, mega_ffn
from emulate.mutate.matmuls_sm90 import multiply
from emulate.mutate.prepared import PREPARED
from emulate.mutate.quantizers import QUANTIZERS
from emulate.mutate.quantizers_fp8 import FP8_QUANTIZERS
from emulate.mutate.routing import ROUTING

Arguments = tuple[Any, ...]
Launch = tuple[Any, Callable[[], Arguments]]


@dataclass(frozen=True)
class Subject:
    """A kernel with its launches.

    Attributes:
        name: the kernel's name.
        kernel: the kernel.
        grid, block, shared_bytes: the first launch.
        args: makes its arguments, the same ones each time.
        others: grids and arguments of more launches, for what the first does not reach.
    """

    name: str
    kernel: Any
    grid: Any
    block: Any
    shared_bytes: int
    args: Callable[[], Arguments]
    others: tuple[Launch, ...] = ()

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Grids and arguments of all launches."""
        return (self.grid, self.args), *self.others


def subjects() -> list[Subject]:
    """All kernels of the catalog."""
    from nbmoe_kernels.catalog import catalog

    return [_subject(kernel) for kernel in catalog()]


def named(name: str) -> Subject:
    """The subject with this name."""
    from nbmoe_kernels.catalog import catalog

    return next(_subject(kernel) for kernel in catalog() if kernel.name == name)


def _subject(kernel: Any) -> Subject:
    for prefix, make in _LAUNCHES.items():
        if kernel.name.startswith(prefix):
            (grid, args), *others = make(kernel)
            return Subject(
                kernel.name,
                kernel.py_func,
                grid,
                kernel.threads,
                kernel.shared_bytes,
                args,
                tuple(others),
            )
    raise LookupError(f"mutate: no launch is known for {kernel.name}")


def _multiply(kernel: Any) -> tuple[Launch, ...]:
    return multiply(kernel) if "_sm90_" in kernel.name else (matmul(kernel),)


def _ffn(kernel: Any) -> tuple[Launch, ...]:
    return multiply(kernel) if "_sm90_" in kernel.name else (mega_ffn(kernel),)


def _once(make: Callable[[Any], Launch]) -> Callable[[Any], tuple[Launch, ...]]:
    return lambda kernel: (make(kernel),)


_LAUNCHES: dict[str, Callable[[Any], tuple[Launch, ...]]] = {
    prefix: _once(make)
    for prefix, make in (ROUTING | QUANTIZERS | FP8_QUANTIZERS | PREPARED).items()
} | {"matmul_grouped": _multiply, "mega_ffn": _ffn}
