"""Rows as a JSON document, as lines on a terminal, and as tables for documents."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Sequence
from typing import Any

import nbmoe
from nbmoe.bench.entry import LEGS
from nbmoe.bench.floors import BANDWIDTH, RATES
from nbmoe.bench.row import OURS, Row

SCHEMA = 1
METHOD = (
    "us of a replayed CUDA graph between two events: median, 10th and 90th percentile; before each"
    " run 256 MB are written (dirty), or written and then another 256 MB read (clean)"
)
_PACKAGES = (
    *("numba-cuda", "numba", "cuda-core", "cuda-bindings", "numpy", "torch", "triton"),
    *("sgl-deep-gemm", "deep-gemm", "humming-kernels", "vllm"),
)


def document(rows: Iterable[Row], about: dict[str, Any], command: str) -> dict[str, Any]:
    """What `--json` writes.

    Args:
        rows: What was run.
        about: The GPU, measurements of it, skew, seed, missing peers.
        command: The command line.
    """
    return {
        "schema": SCHEMA,
        "date": datetime.date.today().isoformat(),
        "command": command,
        "versions": versions(),
        "method": METHOD,
        "floors": {"bytes_per_s": BANDWIDTH, **{f"flops_{k}_bit": v for k, v in RATES.items()}},
        **about,
        "rows": [row.as_dictionary() for row in rows],
    }


@functools.cache
def versions() -> dict[str, str]:
    """Versions of this library, Python, and what is installed of the rest."""
    found = {"nbmoe": nbmoe.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def dump(path: str, contents: dict[str, Any]) -> None:
    """Writes a document, a row a line."""
    rows = contents["rows"]
    head = json.dumps({**contents, "rows": []}, indent=1)
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    with open(path, "w") as file:
        file.write(head.removesuffix("[]\n}") + f"[\n{lines}\n ]\n}}\n")


HEADING = (
    f"{'T':>6} {'what':<52} {'leg':<14} {'dirty':>9} {'clean':>9} {'p10-p90':>15}"
    f" {'floor':>8} {'of it':>6} {'TFLOP/s':>8} {'error':>8}  hash"
)


def line(row: Row) -> str:
    """A row on a terminal."""
    head = f"{row.tokens:>6} {row.label:<52} {row.leg:<14}"
    if row.times is None:
        return f"{head} {row.note}"
    dirty, clean = row.times.dirty, row.times.clean
    spread = f"{dirty.p10:.1f}-{dirty.p90:.1f}"
    return (
        f"{head} {dirty.median:9.1f} {clean.median:9.1f} {spread:>15} {row.work.floor_us:8.1f}"
        f" {_percent(row.floor_share):>6} {_number(row.tflops, '.0f'):>8}"
        f" {_number(row.error, '.1e'):>8}  {row.digest}{_remark(row)}"
    )


def _remark(row: Row) -> str:
    text = f"  {row.note}" if row.note else ""
    if row.leg == "layer" and row.others:
        text += f"  sum of its {len(row.others)} kernels' legs {sum(row.others.values()):.1f}"
    return text


def markdown(rows: Sequence[Row]) -> str:
    """Tables for documents: for each model the pairs side by side, then our legs."""
    parts = []
    for model in dict.fromkeys(row.model for row in rows):
        of_model = [row for row in rows if row.model == model and row.times is not None]
        if not of_model:
            continue
        pairs = [row for row in of_model if row.leg == "pair"]
        legs = [row for row in of_model if row.leg != "pair"]
        parts += [f"### {model}", ""]
        if pairs:
            parts += [*_table("gate/up + down", pairs), "", *_against_peers(pairs)]
        if legs:
            parts += [*_table("leg", legs), ""]
    return "\n".join(parts)


def _table(title: str, rows: Sequence[Row]) -> list[str]:
    """A line for each thing, a column for each number of tokens; the best of a column bold."""
    tokens = sorted({row.tokens for row in rows})
    is_pair = rows[0].leg == "pair"
    best = {t: _best(rows, t) for t in tokens} if is_pair else {}
    lines = [
        f"| {title} | " + " | ".join(f"T = {t}" for t in tokens) + " | error |",
        "|---|" + "--:|" * (len(tokens) + 1),
    ]
    names: dict[str, dict[int, Row]] = {}
    for row in sorted(rows, key=_place):
        names.setdefault(_name(row, is_pair), {}).setdefault(row.tokens, row)
    for name, cells in names.items():
        texts = [_cell(cells.get(t), best.get(t)) for t in tokens]
        errors = [row.error for row in cells.values() if row.error is not None]
        worst = _number(max(errors, default=None), ".1e")
        lines.append(f"| {name} | " + " | ".join(texts) + f" | {worst} |")
    return lines


def _against_peers(pairs: Sequence[Row]) -> list[str]:
    """Our fastest pair and the peers' fastest one, where there are both."""
    tokens = sorted({row.tokens for row in pairs})
    ours = [_fastest(pairs, t, True) for t in tokens]
    theirs = [_fastest(pairs, t, False) for t in tokens]
    if not any(theirs) or not any(ours):
        return []
    ratios = [
        f"{b.times.dirty.median / a.times.dirty.median:.2f}"
        if a and b and a.times and b.times
        else "-"
        for a, b in zip(ours, theirs, strict=True)
    ]
    return [
        "| fastest | " + " | ".join(f"T = {t}" for t in tokens) + " |",
        "|---|" + "--:|" * len(tokens),
        *(
            f"| {name} | " + " | ".join(_named(row) for row in rows) + " |"
            for name, rows in (("ours", ours), ("peers'", theirs))
        ),
        "| times as fast | " + " | ".join(ratios) + " |",
        "",
    ]


def _fastest(rows: Sequence[Row], tokens: int, is_ours: bool) -> Row | None:
    found = [
        (row.times.dirty.median, i)
        for i, row in enumerate(rows)
        if row.times and row.tokens == tokens and (row.library == OURS) == is_ours
    ]
    return rows[min(found)[1]] if found else None


def _named(row: Row | None) -> str:
    if row is None or row.times is None:
        return "-"
    return f"{row.times.dirty.median:.1f} {row.label}"


def _place(row: Row) -> tuple[bool, int]:
    leg = row.leg.removesuffix("_inner")
    return row.library != OURS, 0 if row.leg == "pair" else LEGS.index(leg)


def _name(row: Row, is_pair: bool) -> str:
    if row.library != OURS:
        return f"{row.library} ({row.format})"
    return row.label if is_pair else f"{row.leg}: {row.label}"


def _best(rows: Sequence[Row], tokens: int) -> float:
    return min(row.times.dirty.median for row in rows if row.tokens == tokens and row.times)


def _cell(row: Row | None, best: float | None) -> str:
    if row is None or row.times is None:
        return "-"
    dirty = f"{row.times.dirty.median:.1f}"
    if best is not None and row.times.dirty.median == best:
        dirty = f"**{dirty}**"
    text = f"{dirty} / {row.times.clean.median:.1f}"
    return text if row.floor_share is None else f"{text} ({_percent(row.floor_share)})"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
