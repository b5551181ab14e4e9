"""All schedules of a small launch, up to a bound.

The bound counts delays: a pick of index i delays the i choices that are ready for longer. Most bugs
need one or two (Emmi et al., POPL 2011), and the number of schedules grows with the length of the
run to the power of the bound, whatever the number of threads.
"""

from collections.abc import Iterator

from emulate.schedule.picks import Picks, Recorder

MAX_SCHEDULES = 100_000
"""Schedules of one exploration; a launch that has more is not small."""


class Explorer:
    """Iterates schedules, depth first; each must be run before the next one is asked for.

    Args:
        bound: delays of a schedule.
        limit: schedules at most.

    Attributes:
        complete: every schedule within the bound was given out.
    """

    def __init__(self, bound: int, limit: int = MAX_SCHEDULES) -> None:
        self._bound = bound
        self._limit = limit
        self.complete = False

    def __iter__(self) -> Iterator[Recorder]:
        """The schedules; what a run picked is in the scheduler that it was given."""
        prefix: list[int] = []
        for _ in range(self._limit):
            run = Recorder(Picks(prefix))
            yield run
            following = self._following(run)
            if following is None:
                self.complete = True
                return
            prefix = following

    def _following(self, run: Recorder) -> list[int] | None:
        # The deepest pick that can still grow grows by one; what comes after it starts anew.
        spent = sum(run.picks)
        for depth in reversed(range(len(run.picks))):
            spent -= run.picks[depth]
            grown = run.picks[depth] + 1
            if grown < run.widths[depth] and spent + grown <= self._bound:
                return [*run.picks[:depth], grown]
        return None
