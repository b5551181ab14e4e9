"""What a scheduler is asked and what it answers."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol


class Choice(NamedTuple):
    """One thing that can happen next.

    Attributes:
        kind: a ``thread`` goes on, or an async ``copy`` in flight lands.
        block: linear index of its CTA.
        thread: linear index of the thread in its CTA; of a copy, of the thread that issued it.
        number: tells a thread's copies apart, in the order of issue; 0 for a thread.
    """

    kind: Literal["thread", "copy"]
    block: int
    thread: int
    number: int = 0

    @property
    def warp(self) -> tuple[int, int]:
        """The CTA and the warp of the thread."""
        return self.block, self.thread // 32


class Scheduler(Protocol):
    """Decides what happens next."""

    def pick(self, choices: Sequence[Choice]) -> int:
        """The index of the choice that happens next.

        Args:
            choices: two or more, those that are ready for the longest time first.
        """
        ...
