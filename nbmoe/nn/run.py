"""What the parts of a layer share during one call: buffers, stream, clock and routing."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe.nn.trace import StageClock
from nbmoe.nn.workspace import Workspace
from nbmoe.reference import RoutingIndices


@dataclass
class Run:
    """One call of a layer.

    Attributes:
        workspace: Where intermediates go.
        clock: Measures stages.
        stream: The caller's stream.
        prefix: Goes before buffers' names, so that shared experts have their own.
        found: Every intermediate by name, prefix included.
        keeps: Whether quantized rows are kept in their documented layouts, for a trace.
    """

    workspace: Workspace
    clock: StageClock
    stream: Any = None
    prefix: str = ""
    found: dict[str, Any] = field(default_factory=dict)
    keeps: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Keywords that every operation takes."""
        return {"backend": self.workspace.backend, "stream": self.stream}

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Times the body as a stage."""
        return self.clock.stage(name)

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """The buffer of an intermediate, which a trace keeps."""
        array = self.workspace.array(self.prefix + name, shape, dtype)
        self.found[self.prefix + name] = array
        return array

    def scratch(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """The buffer of something that no trace shows."""
        return self.workspace.array(self.prefix + name, shape, dtype)

    def untimed(self, prefix: str) -> Run:
        """The same call for a part of the layer that is one stage as a whole."""
        return Run(self.workspace, StageClock(), self.stream, prefix, self.found, self.keeps)


@dataclass(frozen=True)
class Groups:
    """Which rows of the input the experts compute, in which order.

    Attributes:
        starts: (S + 1,) uint32 prefix sums of rows per slot [rows].
        offsets: (S,) uint32 scale offsets [128-row tiles].
        ids: (S,) int32 expert of each slot.
        rows: M, rows of all slots and those of none.
        order: (M,) uint32 source of each row times `divisor`, None if the rows are the input's.
        divisor: What `order` counts for each input row.
        weights: (T, divisor) float32 factors of the input, None for none.
    """

    starts: Any
    offsets: Any
    ids: Any
    rows: int
    order: Any = None
    divisor: int = 1
    weights: Any = None

    @classmethod
    def of(cls, indices: RoutingIndices, tokens: int, k: int, weights: Any = None) -> Groups:
        """The groups of tokens that ``k`` experts each were chosen for."""
        return cls(
            starts=indices.expert_start_indices,
            offsets=indices.scales_offset,
            ids=indices.expert_ids,
            rows=tokens * k,
            order=indices.token_expert_order,
            divisor=k,
            weights=weights,
        )

    @property
    def slots(self) -> tuple[Any, Any, Any]:
        """What block-scaled operations take."""
        return self.starts, self.offsets, self.ids


def routing_buffers(run: Run, slots: int, experts: int) -> RoutingIndices:
    """The arrays that group ``slots`` routed rows by expert."""
    sizes = (slots, experts + 1, slots, experts, 2, experts)
    return RoutingIndices(
        *(
            run.array(name, (size,), np.int32 if name == "expert_ids" else np.uint32)
            for name, size in zip(RoutingIndices._fields, sizes, strict=True)
        )
    )


def one_group(workspace: Workspace, rows: int) -> Groups:
    """All rows of the input, in one slot of expert 0."""
    return Groups(
        workspace.constant_row("one_group.starts", rows, _starts),
        workspace.constant_rows("one_group.offsets", 1, lambda n: np.zeros(n, np.uint32)),
        workspace.constant_rows("one_group.ids", 1, lambda n: np.zeros(n, np.int32)),
        rows,
    )


def _starts(count: int) -> npt.NDArray[np.uint32]:
    """Row t is [0, t]: where one group of t rows starts and ends."""
    starts = np.zeros((count, 2), np.uint32)
    starts[:, 1] = np.arange(count)
    return starts
