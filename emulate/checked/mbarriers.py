"""mbarriers of a block: their phases, who arrived in them and what the waiters learn.

The twins keep the state that programs see in 8 bytes of shared memory. Here is what is needed to
judge: full phase numbers instead of a parity, and clocks.
"""

from dataclasses import dataclass, field
from typing import Any

from emulate.checked.clocks import Stamp


@dataclass(eq=False)
class Copies:
    """Async copies that one thread issues to one mbarrier: an agent.

    Attributes:
        local: number of the agent in its block.
        epoch: of the newest copy.
        in_flight: epochs of those that have not landed.
    """

    local: int
    epoch: int = 0
    in_flight: set[int] = field(default_factory=set)

    @property
    def complete(self) -> int:
        """All copies up to this epoch have landed."""
        return min(self.in_flight) - 1 if self.in_flight else self.epoch


@dataclass(eq=False)
class Mbar:
    """One mbarrier.

    Attributes:
        count: arrivals that complete a phase.
        pending, awaited: arrivals and bytes that the running phase still needs.
        phase: number of the running phase.
        observed: number of the last phase whose completion a wait has seen, -1 for none.
        current, done: what arrivals of the running phase have released, and of the last one.
        init: agent, epoch and site of the initialisation.
        is_fenced: async copies see the initialisation.
        copies: by rank of the issuing thread.
        unseen: sites and agents of copies that no wait has covered yet, by phase.
        last: site and agent of the latest arrival.
    """

    count: int
    init: tuple[int, int, int]
    pending: int = 0
    awaited: int = 0
    phase: int = 0
    observed: int = -1
    is_fenced: bool = False
    current: Stamp | None = None
    done: Stamp | None = None
    copies: dict[int, Copies] = field(default_factory=dict)
    unseen: list[tuple[int, int, int]] = field(default_factory=list)
    waiters: int = 0
    last: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.pending = self.count

    @property
    def is_busy(self) -> bool:
        """A phase is under way, or somebody waits."""
        in_flight = any(copies.in_flight for copies in self.copies.values())
        return self.pending != self.count or self.awaited != 0 or in_flight or self.waiters > 0

    def release(self, stamp: Stamp, site: int, agent: int) -> None:
        """An arrival or a copy hands over what it knows."""
        self.current = Stamp.join(self.current, stamp)
        self.last = site, agent

    def advance(self) -> bool:
        """Complete the phase if it can be; whether nobody has seen the one before."""
        if self.pending or self.awaited:
            return False
        missed = self.phase > 0 and self.observed < self.phase - 1
        self.done, self.current = self.current, None
        self.pending = self.count
        self.phase += 1
        return missed

    def see(self, phase: int) -> None:
        """A wait has seen the completion of a phase."""
        self.observed = max(self.observed, phase)
        self.unseen = [copy for copy in self.unseen if copy[0] > phase]

    def target(self, parity: int) -> int:
        """The phase whose completion a wait for a parity waits for, as things stand."""
        return self.phase if self.phase & 1 == parity & 1 else self.phase - 1


def describe(mbar: Mbar) -> dict[str, Any]:
    """The state in numbers, for messages."""
    return {"phase": mbar.phase, "arrivals": mbar.pending, "bytes": mbar.awaited}
