"""What is timed: calls of public operations into their own buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nbmoe.bench.floors import Work
from nbmoe.bench.timing import Call

LEGS = (
    "logits",
    "route",
    "quantize",
    "prepare",
    "gate_up",
    "activate",
    "swiglu",
    "down",
    "combine",
    "pair",
    "layer",
)
"""Parts of a layer, in the order of the data; then gate/up with down, and all of it.

`swiglu` is gate/up with its activation and quantization in one kernel, `activate` the two latter by
themselves; `prepare` turns packed tokens into those of the Hopper kernels.
"""

PACKED, PREPARED, MIXED = "packed", "prepared", "prepared weights, packed tokens"
"""Operands of the matmuls: the documented layouts; those of the Hopper kernels; or these weights
with documented tokens, whose preparation is then part of the time."""

MIXED_PAIR = ("prepare", "gate_up", "prepare_inner", "down")
"""Legs of the last of these."""


@dataclass(frozen=True)
class Step:
    """A call that can be repeated, and what it writes."""

    result: Any
    call: Call


def step(op: Callable[..., Any], *args: Any, **keys: Any) -> Step:
    """Runs an operation; its step repeats it into the same buffers."""
    result = op(*args, **keys)
    out = buffers(result)
    return Step(result, lambda stream: op(*args, **keys, out=out, stream=stream))


def buffers(result: Any) -> Any:
    """What `out=` takes to write a result again: of prepared tokens their data, and scales."""
    if not hasattr(result, "num_slots"):
        return result
    scales = getattr(result, "scales", None)
    return result.data if scales is None else (result.data, scales)


def in_turn(*steps: Step) -> Step:
    """Several steps as one, with the result of the last."""

    def call(stream: Any) -> None:
        for part in steps:
            part.call(stream)

    return Step(steps[-1].result, call)


@dataclass(frozen=True)
class Entry:
    """Something to time.

    Attributes:
        call: Enqueues it.
        outputs: What it writes, to be hashed.
        work: What it has to do at least.
        error: Relative error of sampled outputs against float64, None if there is no such thing.
        parts: For a layer, the legs that it consists of.
        same: A name that is shared by entries whose outputs have the same bytes, empty for none.
    """

    call: Call
    outputs: tuple[Any, ...]
    work: Work
    error: Callable[[], float] | None = None
    parts: tuple[str, ...] = ()
    same: str = ""


@dataclass(frozen=True)
class Case:
    """An entry that is made when its turn comes, because making it may fail."""

    leg: str
    variant: str
    make: Callable[[], Entry]


def arrays(result: Any) -> Iterator[Any]:
    """The arrays of a result, of a tuple of them, or of prepared tokens."""
    out = buffers(result)
    if isinstance(out, tuple):
        for part in out:
            yield from arrays(part)
    else:
        yield out
