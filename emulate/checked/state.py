"""What the checked engine knows of threads and blocks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emulate.checked.arrays import TileState
from emulate.checked.clocks import Clocks, Knowledge, Stamp
from emulate.checked.mbarriers import Mbar
from emulate.checked.shadow import Region


@dataclass(eq=False)
class Group:
    """A thread's async work of one kind, in groups: ``cp``, ``bulk`` or ``wgmma``.

    Attributes:
        local: the agent that does it, -1 before the first.
        epoch: of the open group.
        work: (site, tile or None) of the open group's members.
        closed: epoch and members of committed groups that were not waited for.
    """

    local: int = -1
    epoch: int = 1
    work: list[tuple[int, TileState | None]] = field(default_factory=list)
    closed: list[tuple[int, list[tuple[int, TileState | None]]]] = field(default_factory=list)

    def commit(self) -> None:
        """Close the open group."""
        self.closed.append((self.epoch, self.work))
        self.work = []
        self.epoch += 1

    def complete(self, pending: int) -> int:
        """Complete all but the newest groups; the epoch that is reached, 0 for none."""
        reached = 0
        while len(self.closed) > pending:
            reached, work = self.closed.pop(0)
            for _, tile in work:
                if tile is not None and tile.group == (self.local, reached):
                    tile.product = None
        return reached

    @property
    def unwaited(self) -> list[int]:
        """Sites of work that nobody has waited for."""
        sites = [site for _, work in self.closed for site, _ in work]
        return sites + [site for site, _ in self.work]


class ThreadState:
    """A thread's side.

    Attributes:
        known: of other blocks.
        agents, epochs: of the thread and of its ``cp`` copies, for `emulate.checked.touch.flush`.
        fence: what its last fence released, for the relaxed atomics after it.
        seen: what its relaxed loads have met, for the next fence.
        call: site and arguments of the op that it is in.
        inits: mbarriers that it made and not yet fenced.
        landing: what to do when the async copy lands that it is about to issue.
        target: the mbarrier phase that it waits for.
        spins: how often its log was full since it last waited.
        fenced: the tick of its last ``wgmma.fence``.
    """

    __slots__ = (
        "agents",
        "call",
        "epochs",
        "fence",
        "fenced",
        "groups",
        "inits",
        "known",
        "landing",
        "seen",
        "spins",
        "target",
    )

    def __init__(self, agent: int) -> None:
        self.known: Knowledge | None = None
        self.agents = np.array([agent, -1], np.int64)
        self.epochs = np.ones(2, np.int64)
        self.groups: dict[str, Group] = {}
        self.fence: Stamp | None = None
        self.seen: list[tuple[Stamp, int, int]] = []
        self.call: tuple[int, tuple[Any, ...]] = (0, ())
        self.inits: list[Mbar] = []
        self.landing: Callable[[], None] | None = None
        self.target = 0
        self.fenced = -1
        self.spins = 0

    def group(self, name: str) -> Group:
        """The thread's groups of a kind."""
        group = self.groups.get(name)
        if group is None:
            group = self.groups[name] = Group()
        return group


class BlockState:
    """A block's side.

    Attributes:
        regions: shared memory: the dynamic part and static arrays.
        mbars: mbarriers by shadow address.
        units: async agents of warps and warpgroups, by their first thread.
    """

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self.regions: list[Region] = []
        self.mbars: dict[int, Mbar] = {}
        self.units: dict[tuple[str, int], int] = {}
