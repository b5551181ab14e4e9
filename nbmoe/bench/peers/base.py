"""What every peer is: another library's grouped matmuls on the same routing."""

from __future__ import annotations

import abc
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nbmoe.bench.models import Model
from nbmoe.bench.routing import Problem


@dataclass(frozen=True)
class Pair:
    """Gate/up and down of a peer: operands quantized and sorted before, as for us.

    Attributes:
        call: Enqueues both on torch's current stream.
        outputs: The rows that count, as torch tensors.
        error: Relative error of sampled gate/up outputs against float64, on the same operands.
    """

    call: Callable[[], Any]
    outputs: Callable[[], list[Any]]
    error: Callable[[], float]


class Peer(abc.ABC):
    """A kernel of another library.

    Attributes:
        name: What it is called on the command line and in tables.
        activations: Format of the rows, a name of `nbmoe.bench.floors.ELEMENT_BYTES`.
        weights: Format of the weights, likewise.
    """

    name: str
    activations: str
    weights: str

    @abc.abstractmethod
    def available(self) -> str | None:
        """Why it cannot run here, None if it can. Imports nothing heavy."""

    @abc.abstractmethod
    def make_weights(self, model: Model) -> Any:
        """Random weights in the peer's format and layout."""

    @abc.abstractmethod
    def make_pairs(self, weights: Any, problem: Problem) -> Iterator[tuple[str, Pair]]:
        """Its ways to multiply them, each with a name; the fastest one counts."""


def missing_modules(*names: str) -> str | None:
    """Says which module is not installed, None if all are."""
    for name in names:
        try:
            found = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            return f"{name} is not installed"
    return None
