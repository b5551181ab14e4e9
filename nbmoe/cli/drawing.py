"""Drawings for the terminal: progress, tables, routing. Plain lines when redirected."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TextIO

import numpy as np
import numpy.typing as npt

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = " .:-=+*%#"
_BAR_WIDTH = 24
MAX_TOKEN_COLUMNS = 64


def has_unicode(stream: TextIO) -> bool:
    """Whether block characters can be written to a stream."""
    try:
        _BLOCKS.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


class Progress:
    """A progress bar on a terminal, one line a step elsewhere.

    Use as a context manager; leaving it ends the line.

    Args:
        stream: Where to draw.
        steps: Number of steps.
    """

    def __init__(self, stream: TextIO, steps: int) -> None:
        self._stream = stream
        self._steps = steps
        self._done = 0
        self._live = stream.isatty()
        self._full, self._empty = ("█", "░") if has_unicode(stream) else ("#", "-")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live:
            self._draw("done" if kind is None else "stopped")
            print(file=self._stream, flush=True)

    def step(self, name: str) -> None:
        """Says that step `name` begins, and that the one before it is done."""
        if self._live:
            self._draw(name)
        else:
            print(f"[{self._done + 1}/{self._steps}] {name}", file=self._stream, flush=True)
        self._done += 1

    def _draw(self, name: str) -> None:
        filled = _BAR_WIDTH * min(self._done, self._steps) // self._steps
        bar = self._full * filled + self._empty * (_BAR_WIDTH - filled)
        # Erasing to the end of the line removes what a longer name left there.
        print(f"\r{bar} {name}\x1b[K", end="", file=self._stream, flush=True)


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Left-aligned columns, two spaces apart."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = (
        indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def seconds(value: float) -> str:
    """A duration in the unit that suits it."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"


def routing_map(topk_ids: npt.NDArray[np.int32], num_experts: int, stream: TextIO) -> str:
    """One line an expert: which tokens chose it, and a bar of how many rows it got.

    A column is a token (the first 64): a full mark for its first choice, a light one for the
    others. The bars count all tokens.

    Args:
        topk_ids: i32 [T, k], -1 for none.
        num_experts: E.
        stream: Where it will be printed, which decides the characters.
    """
    first, other, none, bar = "█▒·█" if has_unicode(stream) else "#+.#"
    counts = np.bincount(topk_ids[topk_ids >= 0], minlength=num_experts)
    most = max(int(counts.max(initial=0)), 1)
    shown = topk_ids[:MAX_TOKEN_COLUMNS]
    lines = []
    for expert in range(num_experts):
        marks = np.where((shown == expert).any(axis=1), other, none)
        marks[shown[:, 0] == expert] = first
        length = -(-_BAR_WIDTH * int(counts[expert]) // most)
        lines.append(f"  expert {expert:>3} {''.join(marks)}  {bar * length} {counts[expert]}")
    return "\n".join(lines)


def load_strip(counts: npt.NDArray[np.int64], stream: TextIO, width: int = 64) -> str:
    """One character an expert, as high as its share of the fullest; `width` experts a line.

    Args:
        counts: Rows of each expert [rows].
        stream: Where it will be printed, which decides the characters.
        width: Experts a line.
    """
    levels = _BLOCKS if has_unicode(stream) else _ASCII_BLOCKS
    most = max(int(counts.max(initial=0)), 1)
    steps = -(-(len(levels) - 1) * counts // most)
    marks = [levels[step] for step in steps]
    return "\n".join(
        "  " + "".join(marks[begin : begin + width]) for begin in range(0, len(marks), width)
    )
