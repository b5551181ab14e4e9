"""Checks of routing metadata that read it: who owns which rows and which scale tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbmoe.errors import RoutingError, ShapeError
from nbmoe.layouts import TILE_ROWS, ceil_div, tile_starts
from nbmoe.reference.routing import NO_ROW
from nbmoe.validate.call import Call


def first(mask: NDArray[np.bool_]) -> int:
    """Flat index of the first True."""
    return int(np.argmax(mask))


def check_starts(call: Call, arg: str, starts: NDArray[Any], rows: int, of: str) -> None:
    """Refuses row offsets that are no exclusive prefix sum of at most `rows` rows.

    Raises:
        RoutingError: they do not begin at 0, descend, or end beyond the rows.
    """
    steps = np.diff(starts.astype(np.int64))
    if starts[0] != 0:
        raise RoutingError(call.message(arg, f"{arg}[0] == 0", int(starts[0])))
    if (steps < 0).any():
        e = first(steps < 0)
        got = f"{arg}[{e}] = {starts[e]}, {arg}[{e + 1}] = {starts[e + 1]}"
        raise RoutingError(call.message(arg, "ascending row offsets", got))
    if starts[-1] > rows:
        rule = f"{arg}[-1] <= {rows}, the rows of {of}"
        raise RoutingError(call.message(arg, rule, int(starts[-1])))


def check_expert_ids(call: Call, arg: str, ids: NDArray[Any], num_experts: int, of: str) -> None:
    """Refuses slots of experts that do not exist or that have a slot already.

    Raises:
        RoutingError: an id is outside [-1, num_experts), or repeats.
    """
    outside = (ids < -1) | (ids >= num_experts)
    if outside.any():
        s = first(outside)
        rule = f"-1 or ids below {num_experts}, the experts of {of}"
        raise RoutingError(call.message(arg, rule, f"{arg}[{s}] = {ids[s]}"))
    present, times = np.unique(ids[ids >= 0], return_counts=True)
    if (times > 1).any():
        e = present[first(times > 1)]
        slots = np.flatnonzero(ids == e)[:2]
        got = f"{arg}[{slots[0]}] = {arg}[{slots[1]}] = {e}"
        raise RoutingError(call.message(arg, "at most one slot an expert", got))


def check_scale_offsets(
    call: Call, arg: str, starts: NDArray[Any], offsets: NDArray[Any], tiles: int
) -> None:
    """Refuses scale offsets that give two slots one tile or reach beyond the scale buffer.

    Raises:
        RoutingError: they do.
    """
    begin = tile_starts(starts, offsets)
    count = np.diff(starts.astype(np.int64))
    end = begin + -(-count // TILE_ROWS)
    formula = f"scale tiles in order: {arg}[e] = sum over j < e of ceil(count[j] / 128)"
    formula += " - start[e] // 128"
    overlap = begin[1:] < end[:-1]
    if overlap.any():
        e = first(overlap)
        got = f"tiles {begin[e]}..{end[e]} for slot {e}, from {begin[e + 1]} for slot {e + 1}"
        raise RoutingError(call.message(arg, formula, got))
    beyond = end > tiles
    if beyond.any():
        e = first(beyond)
        got = f"tiles {begin[e]}..{end[e]} for slot {e}"
        raise RoutingError(call.message(arg, f"tiles within the {tiles} of the scale buffer", got))


def check_indices(
    call: Call, arg: str, indices: NDArray[Any], used: int, divisor: int, rows: int
) -> None:
    """Refuses gather indices beyond the input; only the first `used` are looked at.

    Raises:
        ShapeError: there are fewer than `used`.
        RoutingError: indices[i] // divisor >= rows.
    """
    if len(indices) < used:
        rule = f"at least row_offsets[-1] = {used} indices"
        raise ShapeError(call.message(arg, rule, f"shape {indices.shape}"))
    outside = indices[:used].astype(np.int64) // divisor >= rows
    if outside.any():
        i = first(outside)
        rule = f"{arg} // {divisor} < {rows}, the rows of input"
        raise RoutingError(call.message(arg, rule, f"{arg}[{i}] = {indices[i]}"))


def check_topk_ids(call: Call, arg: str, ids: NDArray[Any], num_experts: int) -> None:
    """Refuses a choice of experts that do not exist or are chosen twice by a token.

    Raises:
        RoutingError: an id is outside [-1, num_experts), or a row repeats one.
    """
    outside = (ids < -1) | (ids >= num_experts)
    if outside.any():
        at = tuple(int(i) for i in np.argwhere(outside)[0])
        rule = f"-1 or ids below num_experts = {num_experts}"
        raise RoutingError(call.message(arg, rule, f"{arg}{list(at)} = {ids[at]}"))
    if ids.ndim == 2:
        in_order = np.sort(ids, axis=1)
        twice = ((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)).any(axis=1)
        if twice.any():
            t = first(twice)
            got = f"{arg}[{t}] = {ids[t].tolist()}"
            raise RoutingError(call.message(arg, "different experts for a token", got))


def check_restore(call: Call, arg: str, restore: NDArray[Any], rows: int) -> None:
    """Refuses positions beyond the rows and rows that are used twice.

    Raises:
        RoutingError: there are some.
    """
    used = np.flatnonzero(restore != NO_ROW)
    position = restore[used].astype(np.int64)
    if (position >= rows).any():
        i = used[first(position >= rows)]
        rule = f"positions below {rows}, the rows of down, or 0xFFFFFFFF"
        raise RoutingError(call.message(arg, rule, f"{arg}[{i}] = {restore[i]}"))
    repeated = np.bincount(position, minlength=1) > 1
    if repeated.any():
        p = first(repeated)
        i, j = used[position == p][:2]
        rule = "a permutation: each row of down at most once"
        raise RoutingError(call.message(arg, rule, f"{arg}[{i}] = {arg}[{j}] = {p}"))


def used_tiles(starts: NDArray[Any], offsets: NDArray[Any]) -> list[tuple[int, int]]:
    """First and last-but-one scale tile of each slot that has rows."""
    begin = tile_starts(starts, offsets)
    counts = np.diff(starts.astype(np.int64))
    return [
        (int(b), int(b) + ceil_div(int(c), TILE_ROWS))
        for b, c in zip(begin, counts, strict=True)
        if c
    ]
