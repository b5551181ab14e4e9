"""Schedules by name: `fifo`, `random:SEED`, `pct:DEPTH:SEED`, `adversarial:SEED`,
`exhaustive:BOUND`, `picks:TEXT`."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

from emulate.schedule.choice import Scheduler
from emulate.schedule.explore import MAX_SCHEDULES, Explorer
from emulate.schedule.picks import Picks, Recorder, decode, encode
from emulate.schedule.policies import Adversarial, Fifo, Pct, Random

FORMS = "fifo, random:SEED, pct:DEPTH:SEED, adversarial:SEED, exhaustive:BOUND, picks:TEXT"
DEFAULT = ("fifo", "adversarial:0", "adversarial:1", "random", "pct:2", "pct:3")
"""What ``default`` stands for; those without a seed get every seed in turn."""

_POLICIES: dict[str, tuple[int, Callable[..., Scheduler]]] = {
    "fifo": (0, Fifo),
    "random": (1, Random),
    "pct": (2, Pct),
    "adversarial": (1, Adversarial),
}


class Schedule:
    """A scheduler with the name that repeats its run.

    Attributes:
        picks: what it has picked so far; zeros at the end may be left out.
    """

    def __init__(self, name: str, scheduler: Scheduler) -> None:
        self._name = name
        if isinstance(scheduler, Fifo):  # always 0: nothing to note
            self.picks: list[int] = []
            self.pick = scheduler.pick
        else:
            recorder = scheduler if isinstance(scheduler, Recorder) else Recorder(scheduler)
            self.picks = recorder.picks
            self.pick = recorder.pick

    @property
    def name(self) -> str:
        """The name; of one that has none, its picks so far."""
        return self._name or f"picks:{encode(self.picks)}"

    def __str__(self) -> str:
        return self.name


def make(name: str) -> Schedule:
    """The schedule of a name.

    Raises:
        ValueError: no such schedule, a part of the name is missing, or it stands for many.
    """
    policy, _, rest = name.partition(":")
    if policy == "picks":
        return Schedule(name, Picks(decode(rest)))
    if policy == "exhaustive":
        raise ValueError(f"schedule: {name} is a series of schedules, not one")
    if policy not in _POLICIES:
        raise ValueError(f"schedule: expected {FORMS}, got {name!r}")
    count, kind = _POLICIES[policy]
    numbers = _numbers(name, rest)
    if len(numbers) != count:
        raise ValueError(f"schedule: expected {FORMS}, got {name!r}")
    if policy == "pct" and numbers[0] < 1:
        raise ValueError(f"schedule: expected a depth from 1 on, got {name!r}")
    return Schedule(name, kind(*numbers))


def expand(schedules: str | Iterable[str] = "default", seeds: int | Iterable[int] = 4) -> list[str]:
    """The names that a request stands for.

    Args:
        schedules: a name, several, or ``default``; ``random``, ``adversarial``, ``pct`` and
            ``pct:DEPTH`` without a seed stand for one schedule a seed.
        seeds: the seeds, or how many to count from 0.

    Raises:
        ValueError: an unknown name, no name at all or no seed.
    """
    asked = [schedules] if isinstance(schedules, str) else list(schedules)
    numbers = list(range(seeds)) if isinstance(seeds, int) else [int(seed) for seed in seeds]
    if not asked or not numbers:
        raise ValueError("schedules: expected a schedule and a seed, got none")
    names: list[str] = []
    for one in asked:
        for form in DEFAULT if one == "default" else (one,):
            names += [name for name in _seeded(form, numbers) if name not in names]
    return names


def _seeded(form: str, seeds: Sequence[int]) -> list[str]:
    policy, _, rest = form.partition(":")
    if policy == "exhaustive":
        _bound(form, rest)
        return [form]
    if form == "pct":
        form, rest = "pct:3", "3"
    given = len(rest.split(":")) if rest else 0
    wanted = _POLICIES.get(policy, (given, None))[0]
    names = [f"{form}:{seed}" for seed in seeds] if given == wanted - 1 else [form]
    for name in names:
        make(name)
    return names


def series(names: Iterable[str]) -> Iterator[Schedule]:
    """The schedules of names from `expand`; run each before asking for the next one.

    ``exhaustive:BOUND`` gives all of its own, and warns if it stops before the last one.
    """
    for name in names:
        policy, _, rest = name.partition(":")
        if policy == "exhaustive":
            explorer = Explorer(_bound(name, rest))
            for run in explorer:
                yield Schedule("", run)
            if not explorer.complete:
                warnings.warn(f"{name}: stopped after {MAX_SCHEDULES} schedules", stacklevel=2)
        else:
            yield make(name)


def _bound(name: str, rest: str) -> int:
    numbers = _numbers(name, rest)
    if len(numbers) != 1:
        raise ValueError(f"schedule: expected exhaustive:BOUND, got {name!r}")
    return numbers[0]


def _numbers(name: str, rest: str) -> list[int]:
    parts = rest.split(":") if rest else []
    if not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):
        raise ValueError(f"schedule: expected {FORMS}, got {name!r}")
    return [int(part) for part in parts]
