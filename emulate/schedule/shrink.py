"""Makes the schedule of a failing run simple: delta debugging on its picks.

A pick of 0 is first in, first out, so the picks that are not 0 are the context switches that the
failure may need. Most of them are noise.
"""

import itertools
from collections.abc import Callable, Sequence

from emulate.schedule.choice import Scheduler
from emulate.schedule.picks import Picks, Recorder

MAX_RUNS = 500


def shrink(
    picks: Sequence[int], fails: Callable[[Scheduler], bool], max_runs: int = MAX_RUNS
) -> list[int]:
    """The picks of a failing run with as few deviations from first in, first out as were found.

    Args:
        picks: a run that fails.
        fails: runs a schedule and tells whether it fails in the same way.
        max_runs: calls of ``fails`` at most.

    Returns:
        Picks that fail; without one of their deviations they do not, unless ``max_runs`` was
        reached.

    Raises:
        ValueError: ``picks`` does not fail.
    """
    search = _Search(fails, max_runs)
    first = search.run(list(picks))
    if first is None:
        raise ValueError("shrink: the run to start from does not fail")
    return search.minimise(first)


class _Search:
    def __init__(self, fails: Callable[[Scheduler], bool], max_runs: int) -> None:
        self._fails = fails
        self._left = max_runs

    def run(self, picks: list[int]) -> list[int] | None:
        """The picks that a run really made, up to its last deviation, if it fails."""
        if self._left == 0:
            return None
        self._left -= 1
        recorder = Recorder(Picks(picks))
        if not self._fails(recorder):
            return None
        end = max((i + 1 for i, pick in enumerate(recorder.picks) if pick), default=0)
        return recorder.picks[:end]

    def minimise(self, picks: list[int]) -> list[int]:
        # ddmin: zero the complement of smaller and smaller chunks of the deviations.
        chunks = 2
        while self._left:
            where = [i for i, pick in enumerate(picks) if pick]
            if not where:
                break
            chunks = min(chunks, len(where))
            better = self._first_smaller(picks, where, chunks)
            if better is not None:
                picks, chunks = better, max(chunks - 1, 2)
            elif chunks == len(where):
                break
            else:
                chunks *= 2
        return picks

    def _first_smaller(self, picks: list[int], where: list[int], chunks: int) -> list[int] | None:
        bounds = [len(where) * i // chunks for i in range(chunks + 1)]
        parts = [set(where[a:b]) for a, b in itertools.pairwise(bounds)]
        everything = set(where)
        keeps = [everything - part for part in parts]
        if chunks > 2:
            keeps = parts + keeps  # for two parts, the complements are the parts
        for keep in keeps:
            tried = self.run([pick if i in keep else 0 for i, pick in enumerate(picks)])
            # A run may make other choices than it was told, so it is counted again.
            if tried is not None and sum(p > 0 for p in tried) < len(where):
                return tried
        return None
