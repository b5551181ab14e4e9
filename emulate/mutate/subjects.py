"""The shipped kernels at small shapes, for their mutants to be run on.

A shape is small, but reaches every loop and branch: several groups of slots a warp, empty and
masked experts, partial tiles of rows and of K, and more K than the pipeline has stages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from emulate.mutate.matmuls import matmul
from emulate.mutate.prepared import PREPARED, multiply
from emulate.mutate.quantizers import QUANTIZERS
from emulate.mutate.quantizers_fp8 import FP8_QUANTIZERS
from emulate.mutate.routing import ROUTING

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Subject:
    """A kernel with a launch.

    Attributes:
        name: the kernel's name.
        kernel: the kernel.
        grid, block, shared_bytes: the launch.
        args: makes the arguments, the same ones each time.
    """

    name: str
    kernel: Any
    grid: Any
    block: Any
    shared_bytes: int
    args: Callable[[], Arguments]


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
            grid, args = make(kernel)
            return Subject(
                kernel.name, kernel.py_func, grid, kernel.threads, kernel.shared_bytes, args
            )
    raise LookupError(f"mutate: no launch is known for {kernel.name}")


_LAUNCHES: dict[str, Callable[[Any], tuple[Any, Callable[[], Arguments]]]] = {
    **ROUTING,
    **QUANTIZERS,
    **FP8_QUANTIZERS,
    **PREPARED,
    "matmul_grouped": lambda kernel: (multiply if "_sm90_" in kernel.name else matmul)(kernel),
}
