"""Runs planted cases on the checked engine and prints what came of it."""

import json as json_module
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np

from emulate.planted.suite import SuiteMissing, load_suite, stock_results

SEEDS = 2
"""Of every kind of schedule that has seeds: 9 schedules in all."""


@dataclass(frozen=True)
class Outcome:
    """What became of one case.

    Attributes:
        name, group: the case.
        expected: id of the finding, or ``BYTES``.
        caught: the bug was reported with the expected id and every marked line, and with nothing
            but its consequences besides; or its output differs, for ``BYTES``.
        found: what was reported for the bug, as ``ID line/line``.
        quiet: the correct twin has no finding.
        alarms: what was reported for the correct twin.
        right: the correct twin's output is right.
        seconds: time of both [s].
    """

    name: str
    group: str
    expected: str
    caught: bool
    found: tuple[str, ...]
    quiet: bool
    alarms: tuple[str, ...]
    right: bool
    seconds: float

    @property
    def passed(self) -> bool:
        """Caught, and quiet and right without the bug."""
        return self.caught and self.quiet and self.right


def run_case(case: Any) -> Outcome:
    """Run a case with its bug and without."""
    start = time.perf_counter()
    findings, args = _check(case, True)
    if case.finds == "BYTES":
        caught = not findings and not case.is_right(args)
    else:
        caught = any(map(case.catches, findings)) and all(map(case.explains, findings))
    alarms, clean_args = _check(case, False)
    return Outcome(
        case.name,
        case.group,
        case.finds,
        caught,
        tuple(_brief(f) for f in findings),
        not alarms,
        tuple(_brief(f) for f in alarms),
        case.is_right(clean_args),
        time.perf_counter() - start,
    )


def _check(case: Any, bug: bool) -> tuple[Sequence[Any], tuple[Any, ...]]:
    """The findings, and the arguments as the last schedule left them."""
    import emulate

    args = tuple(a.copy() if isinstance(a, np.ndarray) else a for a in case.args())
    report = emulate.check(
        case.make(bug),
        case.grid,
        case.block,
        *args,
        shared_bytes=case.shared_bytes,
        seeds=SEEDS,
        **case.options,
    )
    return report.findings, args


def _brief(finding: Any) -> str:
    lines = "/".join(str(site.line) for site in finding.sites)
    return f"{finding.id} {lines}".strip()


def _run_named(name: str) -> Outcome:
    return run_case(next(case for case in load_suite() if case.name == name))


def run_suite(names: Iterable[str], workers: int) -> list[Outcome]:
    """Run cases by name in several processes, in the order given."""
    chosen = list(names)
    if workers <= 1:
        return [_run_named(name) for name in chosen]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_run_named, chosen, chunksize=4))


def main(json: bool = False, workers: int | None = None) -> int:
    """Run the suite and print it as a table or as JSON; 0 if every case passes."""
    try:
        cases = load_suite()
    except SuiteMissing as error:
        print(error)
        return 2
    start = time.perf_counter()
    outcomes = run_suite((case.name for case in cases), workers or os.cpu_count() or 1)
    seconds = time.perf_counter() - start
    stock = stock_results()
    passed = sum(outcome.passed for outcome in outcomes)
    if json:
        summary = {
            "cases": len(outcomes),
            "caught": sum(outcome.caught for outcome in outcomes),
            "false_alarms": sum(not outcome.quiet for outcome in outcomes),
            "wrong_output": sum(not outcome.right for outcome in outcomes),
            "seconds": round(seconds, 2),
        }
        rows = [
            {**asdict(outcome), "passed": outcome.passed, "stock": stock.get(outcome.name)}
            for outcome in outcomes
        ]
        print(json_module.dumps({"summary": summary, "cases": rows}, indent=1))
    else:
        _print_table(outcomes, stock)
        print(f"{passed} of {len(outcomes)} cases pass, {seconds:.0f} s")
    return 0 if passed == len(outcomes) else 1


def _print_table(outcomes: Sequence[Outcome], stock: dict[str, str]) -> None:
    width = max(len(outcome.name) for outcome in outcomes)
    group = ""
    for outcome in outcomes:
        if outcome.group != group:
            group = outcome.group
            print(f"\n{group}")
        verdict = "caught" if outcome.caught else "MISSED"
        twin = "clean" if outcome.quiet and outcome.right else "FALSE ALARM"
        if outcome.quiet and not outcome.right:
            twin = "WRONG OUTPUT"
        print(
            f"  {outcome.name:{width}} {outcome.expected:23} {verdict:7} {twin:12} "
            f"{outcome.seconds:6.2f} s  stock: {stock.get(outcome.name, '-')}"
        )
        if not outcome.caught:
            print(f"      found: {', '.join(outcome.found) or 'nothing'}")
        if not outcome.quiet:
            print(f"      reported for the twin: {', '.join(outcome.alarms)}")
