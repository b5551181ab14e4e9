"""What the checked engine finds: an id, the source lines of both sides, who did it and to what."""

import linecache
from dataclasses import dataclass, replace
from typing import Any

from emulate.errors import EmulationError

IDS: dict[str, str] = {
    "RACE_RAW": "a read is not ordered after another agent's write",
    "RACE_WAR": "a write is not ordered after another agent's read",
    "RACE_WAW": "a write is not ordered after another agent's write",
    "RACE_PROXY": "an async engine uses bytes of a generic write without a proxy fence",
    "SCOPE_TOO_NARROW": "an acquire or a release does not reach the other block",
    "OOB_READ": "a read outside of an array",
    "OOB_WRITE": "a write outside of an array",
    "OOB_NEGATIVE": "a negative index",
    "MISALIGNED": "an address is no multiple of what the access needs",
    "UNINIT_READ": "a read of bytes that nobody has written",
    "BARRIER_DIVERGENT": "threads of a block are in different barriers",
    "BARRIER_EXITED": "threads wait in a barrier for others that have exited",
    "COLLECTIVE_DIVERGENT": "lanes of a warp are in different collectives, or have exited",
    "MBAR_COUNT": "more arrivals or bytes than a phase of an mbarrier expects",
    "MBAR_PHASE": "a phase of an mbarrier completed that nobody has seen or will see",
    "MBAR_INIT_RACE": "an mbarrier is used by one who does not know of its initialisation",
    "MBAR_REINIT_LIVE": "an mbarrier is initialised again while it is in use",
    "DEADLOCK": "threads wait and none can run",
    "LIVELOCK": "the launch does not end within its steps",
    "ASYNC_UNWAITED": "async work is used, or its thread exits, before it is complete",
    "WGMMA_FENCE": "accumulators were changed after the last wgmma.fence",
    "SMEM_OVERFLOW": "more shared memory than a block can have",
    "BLOCK_TOO_LARGE": "more threads than a block can have",
    "GRID_LIMIT": "a grid that no GPU takes",
    "NONDETERMINISTIC_ATOMIC": "a float sum whose rounding depends on the order of arrival",
    "KERNEL_ERROR": "the kernel or a twin raised",
}


@dataclass(frozen=True, order=True)
class Site:
    """A place in the source.

    Attributes:
        file: path of the file.
        line: line in it, from 1 on.
        function: name of the function.
    """

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        """The line's text, empty if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Finding:
    """One fault.

    Attributes:
        id: see `IDS`.
        message: what happened, in one line.
        sites: the source lines: of the access that came first, then of the one that was found.
        threads: who was at each site: (block, thread) linear indices, thread -1 for none.
        actors: who was at each site, in words.
        actions: what was done at each site, in words.
        variable: the array's name, if there is one.
        index: the element's index in it (byte offset for shared memory).
        schedule: token of the run.
    """

    id: str
    message: str
    sites: tuple[Site, ...] = ()
    threads: tuple[tuple[int, int], ...] = ()
    actors: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    variable: str | None = None
    index: Any = None
    schedule: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """What two reports of the same fault have in common."""
        return self.id, self.sites, self.variable

    def with_schedule(self, schedule: str) -> "Finding":
        """The finding with a replay token."""
        return replace(self, schedule=schedule)

    def as_dict(self) -> dict[str, Any]:
        """The finding as JSON values."""
        return {
            "id": self.id,
            "message": self.message,
            "sites": [
                {"file": s.file, "line": s.line, "function": s.function, "source": s.source}
                for s in self.sites
            ],
            "threads": [{"block": block, "thread": thread} for block, thread in self.threads],
            "actors": list(self.actors),
            "actions": list(self.actions),
            "variable": self.variable,
            "index": self.index if isinstance(self.index, int | str | None) else list(self.index),
            "schedule": self.schedule,
        }

    def __str__(self) -> str:
        """The message, then who did what in columns, with the source lines."""
        lines = [f"{self.id}: {self.message}"]
        if self.sites:
            lines += _columns(self._sides())
        if self.schedule:
            lines.append(f"  schedule: {self.schedule}")
        return "\n".join(lines)

    def _sides(self) -> list[list[str]]:
        sides = []
        for at, site in enumerate(self.sites):
            who = self.actors[at] if at < len(self.actors) else ""
            did = self.actions[at] if at < len(self.actions) else ""
            where = f"{site.file.rpartition('/')[2]}:{site.line} in {site.function}"
            sides.append([f"{who} {did}".strip(), where, f"    {site.source}"])
        return sides


def _columns(sides: list[list[str]]) -> list[str]:
    if len(sides) != 2:
        return [f"  {line}" for side in sides for line in side]
    width = max(len(line) for line in sides[0])
    if width > 60:
        return [f"  {line}" for side in sides for line in side]
    pairs = zip(*sides, strict=True)
    return [f"  {left:<{width}} | {right}".rstrip() for left, right in pairs]


class FindingError(EmulationError):
    """The checked engine found faults.

    Attributes:
        findings: all of them.
    """

    def __init__(self, findings: tuple[Finding, ...]) -> None:
        count = len(findings)
        head = "" if count == 1 else f"{count} findings\n"
        super().__init__(head + "\n".join(str(finding) for finding in findings))
        self.findings = findings

    @property
    def ids(self) -> tuple[str, ...]:
        """The findings' ids."""
        return tuple(finding.id for finding in self.findings)
