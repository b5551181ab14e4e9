"""Schedulers: first in first out, random, PCT, adversarial.

Each is deterministic: the same choices give the same picks. Threads that spin are a problem of
every policy with priorities, because they would starve the thread that they wait for. So in PCT one
that was picked many times in a row goes behind all others, and what the adversary keeps waiting has
its turn in the end.
"""

import random
from collections.abc import Sequence

from emulate.schedule.choice import Choice

SPIN_PICKS = 64
"""A thread that is picked so many times while others are ready is taken to be spinning."""
LONGEST_RUN_BITS = 14
"""Change points of PCT lie within the first 2**14 picks."""


class Fifo:
    """What is ready for the longest time happens next; async copies land in order of issue."""

    def pick(self, choices: Sequence[Choice]) -> int:
        """The first one."""
        return 0


class Random:
    """Every choice is as likely as any other."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def pick(self, choices: Sequence[Choice]) -> int:
        """Any one."""
        # randrange() asks for more bits than are needed and is twice as slow.
        return int(self._random.random() * len(choices))


class Pct:
    """Probabilistic concurrency testing.

    Threads and copies have random priorities and the highest that is ready runs. At ``depth - 1``
    random moments the running one drops below all others. A bug that needs ``depth`` ordering
    constraints is found with a probability that does not shrink exponentially with the run's
    length (Burckhardt et al., ASPLOS 2010). The run's length is not known here, so the moments are
    drawn so that each power of two is as likely as any other: short and long runs are both hit.
    """

    def __init__(self, depth: int, seed: int) -> None:
        self._random = random.Random(seed)
        moments = (self._random.uniform(0, LONGEST_RUN_BITS) for _ in range(depth - 1))
        self._changes = sorted(int(2**moment) for moment in moments)
        self._priorities: dict[Choice, float] = {}
        self._lowest = 0.0
        self._picks = 0
        self._last: Choice | None = None
        self._in_a_row = 0

    def pick(self, choices: Sequence[Choice]) -> int:
        """The one of the highest priority."""
        self._picks += 1
        index = self._highest(choices)
        while self._changes and self._changes[0] <= self._picks:
            self._changes.pop(0)
            self._drop(choices[index])
            index = self._highest(choices)
        chosen = choices[index]
        self._in_a_row = self._in_a_row + 1 if chosen == self._last else 1
        self._last = chosen
        if self._in_a_row == SPIN_PICKS:
            self._drop(chosen)
            self._in_a_row = 0
        return index

    def _highest(self, choices: Sequence[Choice]) -> int:
        known = self._priorities
        try:
            priorities = [known[choice] for choice in choices]
        except KeyError:
            for choice in choices:
                if choice not in known:
                    known[choice] = self._random.random()
            priorities = [known[choice] for choice in choices]
        return priorities.index(max(priorities))

    def _drop(self, choice: Choice) -> None:
        self._lowest -= 1.0
        self._priorities[choice] = self._lowest


class Adversarial:
    """The order that kernels least expect.

    Async copies land as late as they can. One warp starves: it runs only when all others wait.
    Otherwise the last CTA comes first, in it the last warp, and in that the thread that is ready
    for the longest time. Odd seeds starve every second warp instead of one, so that neighbours are
    far apart.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._odd = seed % 2
        self._starved: tuple[int, int] | None = None
        self._ranks: dict[Choice, tuple[bool, bool, int, int]] = {}
        self._oldest: Choice | None = None
        self._passed_over = 0
        self._turns = 0

    def pick(self, choices: Sequence[Choice]) -> int:
        """The one that comes first in that order."""
        if self._starved is None:
            self._starved = choices[int(self._random.random() * len(choices))].warp
        if self._is_overdue(choices):
            return 0
        known = self._ranks
        try:
            ranks = [known[choice] for choice in choices]
        except KeyError:
            for choice in choices:
                known.setdefault(choice, self._rank(choice))
            ranks = [known[choice] for choice in choices]
        return ranks.index(min(ranks))

    def _is_overdue(self, choices: Sequence[Choice]) -> bool:
        # What was passed over for so long may be what all others spin on: everybody has a turn.
        if self._turns:
            self._turns -= 1
            return True
        if choices[0] != self._oldest:
            self._oldest, self._passed_over = choices[0], 0
        self._passed_over += 1
        if self._passed_over <= SPIN_PICKS * len(choices):
            return False
        self._passed_over, self._turns = 0, len(choices)
        return True

    def _rank(self, choice: Choice) -> tuple[bool, bool, int, int]:
        block, warp = choice.warp
        starves = warp % 2 == 1 if self._odd else choice.warp == self._starved
        return choice.kind == "copy", starves, -block, -warp
