"""The experts of a layer: from the input and its groups of rows to the down projection's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from nbmoe import ops
from nbmoe.arrays import BFLOAT16, to_backend
from nbmoe.backend import Backend
from nbmoe.nn.run import Groups, Run

Put = Callable[[Any], Any]
"""Moves a numpy array to the backend."""


class Experts(Protocol):
    """All experts of one kind.

    Attributes:
        num_experts: E.
        hidden_size: H [elements].
        moe_dim: D [elements].
        stages: Names of the stages in order.
    """

    num_experts: int
    hidden_size: int
    moe_dim: int

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages in order."""
        ...

    def __call__(self, x: Any, groups: Groups, run: Run) -> Any:
        """Computes the experts.

        Args:
            x: (T, H) bfloat16.
            groups: The rows of each expert.
            run: The call.

        Returns:
            (M, H) bfloat16, a buffer of the workspace.
        """
        ...


def gathered(x: Any, groups: Groups, hidden_size: int, run: Run) -> Any:
    """The rows of the groups as bfloat16: the input itself if they are its rows."""
    if groups.order is None:
        return x
    rows = run.array("rows", (groups.rows, hidden_size), BFLOAT16)
    ops.gather_rows(
        x,
        groups.order,
        divisor=groups.divisor,
        weights=groups.weights,
        out=rows,
        **run.options,
    )
    return rows


def putter(backend: Backend) -> Put:
    """Moves arrays to a backend."""
    return lambda array: to_backend(array, backend.name)
