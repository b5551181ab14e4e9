"""Runs the schedule of a token again, and makes a failing one simple.

A token is one line: the schedule's name and a hash of the kernel, ``pct:3:7@1f3a9c2e``. What a run
does depends on the kernel, the launch and the schedule only, so that is all a token has to hold;
the caller gives the kernel and the arguments again.
"""

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from emulate.errors import EmulationError
from emulate.report import Report
from emulate.schedule import Schedule, Scheduler, encode, make
from emulate.schedule.identity import identity
from emulate.schedule.shrink import MAX_RUNS
from emulate.schedule.shrink import shrink as shrink_picks

_TOKEN = re.compile(r"([a-z]+(?::[A-Za-z0-9_:-]*)?)(?:@([0-9a-f]{8}))?")


class TokenError(EmulationError, ValueError):
    """A replay token is damaged, or belongs to another kernel or another version of it."""


def token(schedule: str, kernel: Any) -> str:
    """The token of a run.

    Args:
        schedule: the schedule's name.
        kernel: the kernel that ran.
    """
    return f"{schedule}@{identity(kernel)}"


def schedule_of(text: str, kernel: Any) -> str:
    """The name of the schedule in a token, or in a name alone, which fits every kernel.

    Raises:
        TokenError: it is none, or the kernel's content is not the token's.
    """
    found = _TOKEN.fullmatch(text.strip())
    if found is None:
        raise TokenError(f"token: expected SCHEDULE@HASH, got {text[:60]!r}")
    name, wanted = found[1], found[2]
    try:
        make(name)
    except ValueError as error:
        raise TokenError(f"token: {error}") from None
    if wanted is not None and wanted != identity(kernel):
        raise TokenError(
            f"token: it belongs to kernel content {wanted}, this kernel's is {identity(kernel)}: "
            "the kernel, a helper, a constant or Python's minor version has changed since; "
            "check again for a new token"
        )
    return name


def replay(text: str, kernel: Any, grid: Any, block: Any, *args: Any, **options: Any) -> Report:
    """Check the one run that a token names.

    Args:
        text: the token of a finding, or a schedule's name.
        kernel, grid, block, args, options: as for `emulate.check`.

    Raises:
        TokenError: the token is damaged or of another kernel.
    """
    from emulate import check

    name = schedule_of(text, kernel)
    return check(kernel, grid, block, *args, schedules=[name], **options)


def shrink(
    text: str,
    kernel: Any,
    grid: Any,
    block: Any,
    *args: Any,
    finding: str | None = None,
    max_runs: int = MAX_RUNS,
    **options: Any,
) -> str:
    """The token of a run with the same finding and as few context switches as were found.

    The arguments are left as they were given.

    Args:
        text: the token of a failing run.
        kernel, grid, block, args, options: as for `emulate.check`.
        finding: the id that the run must have; by default the first one of the token's run.
        max_runs: runs at most.

    Raises:
        TokenError: the token is damaged or of another kernel.
        ValueError: the run has no such finding.
    """
    from emulate import check

    arrays = [arg for arg in args if isinstance(arg, np.ndarray) and arg.flags.writeable]
    given = [array.copy() for array in arrays]

    def restore() -> None:
        for array, before in zip(arrays, given, strict=True):
            array[...] = before

    def findings(scheduler: Scheduler) -> Iterable[str]:
        restore()
        report = check(kernel, grid, block, *args, schedules=[scheduler], **options)
        return [one.id for one in report.findings]

    schedule = make(schedule_of(text, kernel))
    ids = list(findings(schedule))
    wanted = finding or (ids[0] if ids else None)
    if wanted is None or wanted not in ids:
        raise ValueError(f"shrink: the run has no finding {wanted or ''}".rstrip())
    small = shrink_picks(schedule.picks, lambda one: wanted in findings(_named(one)), max_runs)
    restore()
    return token(f"picks:{encode(small)}" if small else "fifo", kernel)


def _named(scheduler: Scheduler) -> Schedule:
    return Schedule("", scheduler)
