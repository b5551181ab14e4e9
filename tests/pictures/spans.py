"""Sets of moments on a line, as sorted spans (start, end) that do not touch."""

from collections.abc import Iterable

Span = tuple[int, int]


def union(spans: Iterable[Span]) -> list[Span]:
    """The moments of any span."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def outside(spans: Iterable[Span], start: int, end: int) -> list[Span]:
    """The moments from ``start`` to ``end`` that are in no span."""
    free: list[Span] = []
    for first, last in union(spans):
        if start < min(first, end):
            free.append((start, min(first, end)))
        start = max(start, last)
    return [*free, (start, end)] if start < end else free


def common(rows: Iterable[Iterable[Span]], start: int, end: int) -> list[Span]:
    """The moments from ``start`` to ``end`` that each row has a span at."""
    return outside([gap for row in rows for gap in outside(row, start, end)], start, end)
