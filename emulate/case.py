"""A launch as a value: what the command line and the pytest plugin run."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """A kernel with everything that a launch needs.

    Attributes:
        kernel: a plain function, a `numba.cuda.jit` kernel, or an object with ``py_func``.
        grid: CTAs in x, y, z.
        block: threads of a CTA in x, y, z.
        args: numpy arrays and numbers.
        shared_bytes: dynamic shared memory of a CTA [bytes].
        options: more arguments of `emulate.check`, by name.
    """

    kernel: Any
    grid: int | tuple[int, ...]
    block: int | tuple[int, ...]
    args: tuple[Any, ...] = ()
    shared_bytes: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(getattr(self.kernel, "__name__", None) or getattr(self.kernel, "name", "kernel"))

    def launch(self, **options: Any) -> Any:
        """Run it once; see `emulate.launch`."""
        from emulate.front import launch

        return launch(
            self.kernel,
            self.grid,
            self.block,
            *self.args,
            shared_bytes=self.shared_bytes,
            **options,
        )

    def check(self, **options: Any) -> Any:
        """Check it over schedules; see `emulate.check`."""
        from emulate import check

        return check(
            self.kernel,
            self.grid,
            self.block,
            *self.args,
            shared_bytes=self.shared_bytes,
            **{**self.options, **options},
        )
