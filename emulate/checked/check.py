"""`emulate.check`: the checked engine over many schedules."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from emulate.checked.engine import Checks, run
from emulate.findings import Finding, FindingError
from emulate.front import arguments
from emulate.options import (
    BLOCK_LIMITS,
    GRID_LIMITS,
    MAX_THREADS,
    Options,
    Shape,
    check_shape,
    shared_limit,
)
from emulate.rebind import plain_function
from emulate.replay import token
from emulate.report import Report
from emulate.schedule import Schedule, Scheduler, expand, make, series


def check(
    kernel: Any,
    grid: Any,
    block: Any,
    *args: Any,
    shared_bytes: int = 0,
    schedules: str | Iterable[str | Scheduler] = "default",
    seeds: int | Iterable[int] = 4,
    cc: tuple[int, int] = (9, 0),
    strict_wgmma: bool = False,
    resident: Any = None,
    max_steps: int | None = None,
    ignore: Iterable[str] = (),
    max_findings: int = 100,
    raise_on_finding: bool = False,
) -> Report:
    """Run a kernel in the checked engine under many schedules and collect what is wrong.

    Every run starts from the arguments as they were given. The arrays hold the last run's results
    afterwards.

    Args:
        kernel, grid, block, args: as for `emulate.launch`. An output or scratch array may be
            marked with `emulate.uninitialised`.
        shared_bytes: dynamic shared memory of a block [bytes].
        schedules: names (see `emulate.schedule`), schedulers, or ``default``.
        seeds: seeds of schedules that are named without one, or how many.
        cc: compute capability whose limits apply.
        strict_wgmma: every warp of a warpgroup has to wait for its part of a product itself.
        resident: blocks that are alive at one time, as for `emulate.launch`.
        max_steps: switches between threads after which a run is a livelock.
        ignore: ids of findings that are not wanted.
        max_findings: stop after so many.
        raise_on_finding: raise them.

    Returns:
        The report; its ``findings`` are without duplicates, each with the token of the first run
        that had it.

    Raises:
        ValueError: a launch that makes no sense, or an unknown schedule.
        FindingError: there are findings, and ``raise_on_finding``.
    """
    function = plain_function(kernel)
    args = arguments(args)
    options = Options(resident=resident, cc=(int(cc[0]), int(cc[1])))
    found: dict[Any, Finding] = {}
    limits = list(_limits(grid, block, shared_bytes, options.cc))
    if limits:
        report = Report("checked", 0.0, 0.0, True, 0, 0, findings=tuple(limits))
    else:
        shape = check_shape(grid, block, shared_bytes)
        checks = Checks(strict_wgmma, max_steps, frozenset(ignore))
        report = _run_all(
            kernel, function, shape, args, options, checks, _expand(schedules, seeds), found,
            max_findings,
        )  # fmt: skip
    if raise_on_finding and report.findings:
        raise FindingError(report.findings)
    return report


def _run_all(
    kernel: Any, function: Any, shape: Shape, args: tuple[Any, ...], options: Options,
    checks: Checks, schedules: Iterable[Any], found: dict[Any, Finding], most: int,
) -> Report:  # fmt: skip
    arrays = [arg for arg in args if isinstance(arg, np.ndarray) and arg.flags.writeable]
    saved = [array.copy() for array in arrays]
    seconds, runs, alive = 0.0, 0, 0
    for schedule in schedules:
        if runs:
            for array, before in zip(arrays, saved, strict=True):
                array[...] = before
        report, findings = run(function, shape, args, options, schedule, checks)
        runs += 1
        seconds += report.seconds
        alive = max(alive, report.resident)
        name = getattr(schedule, "name", "")
        for finding in findings:
            if finding.key not in found:
                found[finding.key] = finding.with_schedule(token(name, kernel) if name else "")
        # A livelock takes long to be recognised, and other schedules have it as well.
        if len(found) >= most or any(finding.id == "LIVELOCK" for finding in findings):
            break
    return Report(
        "checked", seconds, 0.0, True, shape.blocks, alive,
        findings=tuple(found.values()), schedules=runs,
    )  # fmt: skip


def _expand(schedules: Any, seeds: Any) -> Iterator[Any]:
    wanted = [schedules] if isinstance(schedules, str) else list(schedules)
    if not wanted:
        expand([], seeds)  # raises
    for one in wanted:
        if isinstance(one, str):
            yield from series(expand(one, seeds))
        else:
            yield one


def _limits(grid: Any, block: Any, shared_bytes: int, cc: tuple[int, int]) -> Iterator[Finding]:
    """What no GPU of this compute capability launches."""
    for name, value, limits, id in (
        ("grid", grid, GRID_LIMITS, "GRID_LIMIT"),
        ("block", block, BLOCK_LIMITS, "BLOCK_TOO_LARGE"),
    ):
        extents = tuple(value) if isinstance(value, tuple | list) else (value,)
        known = [n for n in extents if isinstance(n, int | np.integer)]
        if len(known) == len(extents) <= 3 and min(known, default=0) >= 1:
            if any(n > most for n, most in zip(known, limits, strict=False)):
                yield Finding(id, f"{name} {value}: the extents can be up to {limits}")
            elif name == "block" and math.prod(map(int, known)) > MAX_THREADS:
                message = (
                    f"block {value}: {math.prod(map(int, known))} threads; {MAX_THREADS} can be"
                )
                yield Finding(id, message)
    if isinstance(shared_bytes, int | np.integer) and shared_bytes > shared_limit(cc):
        yield Finding(
            "SMEM_OVERFLOW",
            f"{shared_bytes} bytes of dynamic shared memory; a block of compute capability "
            f"{cc[0]}.{cc[1]} can have {shared_limit(cc)}",
        )


def launch(function: Any, shape: Shape, args: tuple[Any, ...], options: Options) -> Report:
    """One checked run, for `emulate.launch`.

    Raises:
        FindingError: something is wrong.
    """
    schedule: Schedule = make("fifo" if options.seed is None else f"random:{options.seed}")
    report, findings = run(function, shape, args, options, schedule, Checks())
    if findings:
        name = token(schedule.name, function)
        raise FindingError(tuple(finding.with_schedule(name) for finding in findings))
    return report
