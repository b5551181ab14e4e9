"""A timeline of a run, for ui.perfetto.dev or chrome://tracing: one row a warp.

Time is the number of the event, not seconds: it is the same in every run of a schedule, and the
speed of an emulator says nothing about a GPU. A process is a CTA; a warp has a row of what its
lanes wait in (barriers, collectives such as an MMA, mbarriers, sleeps) and, once it issued some, a
row of async copies from issue to landing.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_KINDS = (
    ("mma", "mma"),
    ("wgmma", "mma"),
    ("syncthreads", "barrier"),
    ("bar", "barrier"),
    ("nanosleep", "sleep"),
    ("mbar", "wait"),
    ("wait", "wait"),
)
_ROWS_PER_WARP = 16
_COPY_ROW = 8

_active: list["Timeline"] = []


def active() -> "Timeline | None":
    """The timeline that the next launches of interpreted engines add to."""
    return _active[-1] if _active else None


@contextlib.contextmanager
def recording() -> Iterator["Timeline"]:
    """Launches inside the block, on the interpreted or the checked engine, are recorded."""
    timeline = Timeline()
    _active.append(timeline)
    try:
        yield timeline
    finally:
        _active.remove(timeline)


class Timeline:
    """What machines tell: who waits in what, and which copies are in flight."""

    def __init__(self) -> None:
        self._now = 0
        self._slices: list[_Slice] = []
        self._open: dict[tuple[Any, ...], _Slice] = {}
        self._waiting: dict[int, _Slice] = {}
        self._rows: dict[tuple[int, int], list[_Slice | None]] = {}
        self._names: dict[int, str] = {}

    def waits(self, thread: Any, what: str, about: dict[str, str]) -> None:
        """A thread begins to wait; its warp has one slice for all lanes that wait together."""
        key = (thread.block.linear, thread.rank // 32, what, *about.items())
        self._waiting[id(thread)] = self._join(thread, 0, key, what, _kind(what), about)

    def wakes(self, threads: Iterable[Any]) -> None:
        """What threads waited for has happened."""
        self._now += 1
        for thread in threads:
            self._end(thread)

    def goes_on(self, thread: Any) -> None:
        """A thread that waited goes on."""
        self._now += 1
        self._end(thread)

    def _end(self, thread: Any) -> None:
        joined = self._waiting.pop(id(thread), None)
        if joined is not None and joined.end is None:
            self._close(joined)

    def issues(self, thread: Any, name: str, number: int | None, about: dict[str, str]) -> None:
        """A thread issues an async copy; copies without a number that overlap share a slice."""
        key = (thread.block.linear, thread.rank // 32, name, number, *about.items())
        self._join(thread, _COPY_ROW, key, name, "copy", about).flying += 1

    def lands(self, thread: Any, name: str, number: int | None, about: dict[str, str]) -> None:
        """An async copy has landed."""
        self._now += 1
        key = (thread.block.linear, thread.rank // 32, name, number, *about.items())
        joined = self._open.get(key)
        if joined is not None:
            joined.flying -= 1
            if joined.flying == 0:
                self._close(joined)

    def _join(
        self,
        thread: Any,
        first_row: int,
        key: tuple[Any, ...],
        name: str,
        kind: str,
        about: dict[str, str],
    ) -> "_Slice":
        self._now += 1
        joined = self._open.get(key) or self._again(key, kind)
        if joined is None:
            block, warp = key[0], key[1]
            self._names[block] = f"block {thread.block.index}"
            row = warp * _ROWS_PER_WARP + first_row
            rows = self._rows.setdefault((block, row), [])
            if None not in rows:
                rows.append(None)
            place = rows.index(None)
            joined = _Slice(key, name, kind, about, self._now, (block, row), place)
            self._slices.append(joined)
            rows[place] = joined
        self._open[key] = joined
        joined.lanes.add(thread.lane)
        joined.events += 1
        return joined

    def _again(self, key: tuple[Any, ...], kind: str) -> "_Slice | None":
        # A thread that sleeps again and again is in one wait.
        last = self._slices[-1] if self._slices else None
        if kind != "sleep" or last is None or last.key != key:
            return None
        rows = self._rows[last.track]
        if last.end != self._now - 1 or rows[last.place] is not None:
            return None
        last.end = None
        rows[last.place] = last
        return last

    def _close(self, joined: "_Slice") -> None:
        joined.end = self._now
        self._rows[joined.track][joined.place] = None
        self._open.pop(joined.key, None)

    def as_dict(self) -> dict[str, Any]:
        """The trace in the JSON object format of Chrome's trace event specification."""
        slices = sorted(
            (one.as_event(self._now) for one in self._slices),
            key=lambda event: (event["pid"], event["tid"], event["ts"]),
        )
        heads: list[dict[str, Any]] = [
            _metadata("process_name", pid, 0, {"name": name})
            for pid, name in sorted(self._names.items())
        ]
        for pid, tid in sorted({(s["pid"], s["tid"]) for s in slices}):
            heads.append(_metadata("thread_name", pid, tid, {"name": _row_name(tid)}))
            heads.append(_metadata("thread_sort_index", pid, tid, {"sort_index": tid}))
        return {
            "traceEvents": heads + slices,
            "displayTimeUnit": "ms",
            "otherData": {"time": "number of the event; not seconds"},
        }

    def write(self, path: str | Path) -> None:
        """Write the trace to a file."""
        Path(path).write_text(json.dumps(self.as_dict()), encoding="utf-8")


class _Slice:
    """Something that lanes of a warp are in together."""

    def __init__(
        self,
        key: tuple[Any, ...],
        name: str,
        kind: str,
        about: dict[str, str],
        start: int,
        track: tuple[int, int],
        place: int,
    ) -> None:
        self.key = key
        self.name = name
        self.kind = kind
        self.about = about
        self.start = start
        self.end: int | None = None
        self.track = track
        self.place = place
        self.lanes: set[int] = set()
        self.events = 0
        self.flying = 0

    def as_event(self, now: int) -> dict[str, Any]:
        """A complete event; one that has no end, in a deadlock for instance, says so."""
        end = now if self.end is None else self.end
        return {
            "name": self.name if self.end is not None else f"{self.name} (never ends)",
            "cat": self.kind,
            "ph": "X",
            "ts": self.start,
            "dur": max(end - self.start, 1),
            "pid": self.track[0],
            "tid": self.track[1] + min(self.place, _COPY_ROW - 1),
            "args": {**self.about, "lanes": len(self.lanes), "events": self.events},
        }


def _kind(what: str) -> str:
    return next((kind for start, kind in _KINDS if what.startswith(start)), "collective")


def _row_name(tid: int) -> str:
    warp, row = divmod(tid, _ROWS_PER_WARP)
    if row == 0:
        return f"warp {warp}"
    if row < _COPY_ROW:
        return f"warp {warp}, other lanes {row}"
    return f"warp {warp} copies" if row == _COPY_ROW else f"warp {warp} copies {row - _COPY_ROW}"


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}
