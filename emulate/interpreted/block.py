"""CTAs, warps and threads of the interpreted engine: what they hold, not what they do."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from greenlet import greenlet

from emulate.schedule.choice import Choice

WARP_LANES = 32
GROUP_LANES = 128

Index = tuple[int, int, int]
Copies = list[Callable[[], object]]


class Dim3:
    """Three int32, as `numba.cuda` types its indices."""

    __slots__ = ("index", "x", "y", "z")

    def __init__(self, index: Index) -> None:
        self.index = index
        self.x, self.y, self.z = (np.int32(i) for i in index)


class Unit:
    """Threads that run collectives together: a warp, or a warpgroup.

    Attributes:
        lanes: threads in it, fewer than a whole unit's at a block's end.
        alive: those that have not exited.
        meeting: the collective that some of them are in.
    """

    __slots__ = ("alive", "first", "lanes", "meeting")

    def __init__(self, first: int, lanes: int) -> None:
        self.first = first
        self.lanes = lanes
        self.alive = lanes
        self.meeting: Any = None


class Barrier:
    """A barrier of a CTA.

    Attributes:
        arrived: threads that have arrived since it was last complete.
        waiting: those of them that wait.
        record: for engines that check: who arrived, and where.
    """

    __slots__ = ("arrived", "number", "record", "votes", "waiting")

    def __init__(self, number: int) -> None:
        self.number = number
        self.arrived = 0
        self.votes = 0
        self.waiting: list[Thread] = []
        self.record: list[Any] = []

    def reset(self) -> tuple[list["Thread"], int]:
        """Begin the next phase; who waited, and the votes."""
        waiting, votes = self.waiting, self.votes
        self.arrived = self.votes = 0
        self.waiting, self.record = [], []
        return waiting, votes


class Block:
    """A CTA. ``state`` is for engines that check."""

    def __init__(self, index: Index, linear: int, threads: int, shared_bytes: int) -> None:
        self.index = index
        self.linear = linear
        self.block_idx = Dim3(index)
        self.size = threads
        self.alive = threads
        self.barrier = Barrier(0)
        self.barriers: dict[int, Barrier] = {0: self.barrier}
        self.static_arrays: dict[Any, Any] = {}
        self.static_bytes = 0
        self.dynamic = shared_memory(shared_bytes)
        self.state: Any = None

    def named_barrier(self, number: int) -> Barrier:
        """The CTA's barrier of a number."""
        barrier = self.barriers.get(number)
        if barrier is None:
            barrier = self.barriers[number] = Barrier(number)
        return barrier


def shared_memory(nbytes: int) -> np.ndarray:
    """Shared memory of a CTA, aligned to 1024, filled with 0xFF so that unwritten bytes show."""
    memory = np.full(nbytes + 1024, 0xFF, np.uint8)
    skip = -memory.ctypes.data % 1024
    return memory[skip : skip + nbytes]


class Thread:
    """A CUDA thread.

    Attributes:
        open_groups: async copies since the last commit, by the name of the group.
        groups: committed groups that nobody has waited for yet.
        flights: async copies issued so far.
        state: for engines that check.
    """

    __slots__ = (
        "block",
        "choice",
        "flights",
        "group",
        "groups",
        "lane",
        "open_groups",
        "rank",
        "result",
        "run",
        "state",
        "thread_idx",
        "waits_in",
        "warp",
    )

    def __init__(self, block: Block, thread_idx: Dim3, rank: int, warp: Unit, group: Unit) -> None:
        self.block = block
        self.thread_idx = thread_idx
        self.rank = rank
        self.lane = rank % WARP_LANES
        self.warp = warp
        self.group = group
        self.waits_in = ""
        self.result = 0
        self.open_groups: dict[str, Copies] = {}
        self.groups: dict[str, list[Copies]] = {}
        self.flights = 0
        self.state: Any = None
        self.choice = Choice("thread", block.linear, rank)
        self.run: greenlet

    def waiting_groups(self) -> Iterator[Copies]:
        """All committed groups that are still open."""
        for groups in self.groups.values():
            yield from groups

    def commit(self, name: str) -> None:
        """Close the open group."""
        self.groups.setdefault(name, []).append(self.open_groups.pop(name, []))

    def wait_groups(self, name: str, pending: int) -> None:
        """Complete all but the ``pending`` newest groups."""
        groups = self.groups.get(name, [])
        while len(groups) > pending:
            for copy in groups.pop(0):
                copy()


def make_threads(block: Block, thread_idx: list[Dim3]) -> list[Thread]:
    """The threads of a CTA, with their warps and warpgroups."""
    count = block.size
    warps = [Unit(at, min(count - at, WARP_LANES)) for at in range(0, count, WARP_LANES)]
    groups = [Unit(at, min(count - at, GROUP_LANES)) for at in range(0, count, GROUP_LANES)]
    return [
        Thread(
            block, thread_idx[rank], rank, warps[rank // WARP_LANES], groups[rank // GROUP_LANES]
        )
        for rank in range(count)
    ]
