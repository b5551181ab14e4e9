"""Runs mutants and says which of them were noticed, and by what."""

import json as json_module
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np

from emulate.mutate.edits import Mutant, mutants
from emulate.mutate.equivalent import reason_of
from emulate.mutate.subjects import Subject, subjects

SCHEDULES = ("fifo", "random:1", "pct:3:1")
"""Of the checked engine; tried in turn until one kills the mutant."""

MAX_STEPS = 1_000_000
"""Several times what the shipped kernels take at their small shapes."""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        mutant: its name.
        kind, file, line: see `emulate.mutate.edits.Mutant`.
        killed_by: id of a finding, ``bytes``, or ``exception`` and its type; empty for a survivor.
        reason: why a survivor is equivalent to the kernel, if that is known.
        how: the schedule of the checked engine that noticed it, or ``interpreted``.
        seconds: [s].
    """

    mutant: str
    kind: str
    file: str
    line: int
    killed_by: str
    reason: str
    how: str
    seconds: float

    @property
    def is_equivalent(self) -> bool:
        """A survivor with a known reason."""
        return not self.killed_by and bool(self.reason)


@dataclass(frozen=True)
class KernelScore:
    """The verdicts on all mutants of a kernel."""

    kernel: str
    verdicts: tuple[Verdict, ...]

    @property
    def counted(self) -> int:
        """Mutants that are not equivalent."""
        return sum(not verdict.is_equivalent for verdict in self.verdicts)

    @property
    def killed(self) -> int:
        """Mutants that were noticed."""
        return sum(bool(verdict.killed_by) for verdict in self.verdicts)

    @property
    def rate(self) -> float:
        """Share of the mutants, without the equivalent ones, that were noticed."""
        return self.killed / self.counted if self.counted else 1.0

    @property
    def survivors(self) -> tuple[Verdict, ...]:
        """Mutants that were not noticed and have no excuse."""
        return tuple(v for v in self.verdicts if not v.killed_by and not v.reason)


def mutate_kernel(
    subject: Subject, numbers: Iterable[int] | None = None, *, everything: bool = False
) -> KernelScore:
    """Run the mutants of one kernel, all or those with these numbers.

    Args:
        subject: the kernel and its launch.
        numbers: positions in `emulate.mutate.edits.mutants`.
        everything: also run those that are known to be equivalent.

    Raises:
        RuntimeError: the kernel itself is not free of findings.
    """
    made = mutants(subject.kernel)
    chosen = range(len(made)) if numbers is None else list(numbers)
    want = _expected(subject)
    verdicts = (_judge(subject, made[n], want, everything) for n in chosen)
    return KernelScore(subject.name, tuple(verdicts))


def _expected(subject: Subject) -> list[bytes]:
    """Bytes of all arrays after the kernel itself has run."""
    args = subject.args()
    findings = _check(subject, subject.kernel, args, "fifo")
    if findings:
        raise RuntimeError(f"mutate: {subject.name} itself has findings: {findings[0]}")
    return _bytes(args)


def _bytes(args: Sequence[Any]) -> list[bytes]:
    return [arg.tobytes() for arg in args if isinstance(arg, np.ndarray)]


def _check(subject: Subject, kernel: Any, args: Any, schedule: str) -> tuple[Any, ...]:
    import emulate

    report = emulate.check(
        kernel,
        subject.grid,
        subject.block,
        *args,
        shared_bytes=subject.shared_bytes,
        schedules=[schedule],
        max_findings=1,
        max_steps=MAX_STEPS,
    )
    return tuple(report.findings)


def _judge(subject: Subject, mutant: Mutant, want: list[bytes], everything: bool) -> Verdict:
    start = time.perf_counter()
    reason = reason_of(mutant.name)
    killed_by, how = "", ""
    if everything or not reason:
        killed_by, how = _kill(subject, mutant, want)
    return Verdict(
        mutant.name,
        mutant.kind,
        mutant.file,
        mutant.line,
        killed_by,
        "" if killed_by else reason,
        how,
        round(time.perf_counter() - start, 3),
    )


def _kill(subject: Subject, mutant: Mutant, want: list[bytes]) -> tuple[str, str]:
    """What notices the mutant, and how it was run; two empty texts if nothing does."""
    # The interpreted engine is several times as fast, and most wrong counts give wrong bytes.
    killed_by = _kill_once(subject, mutant, want, "")
    if killed_by:
        return killed_by, "interpreted"
    for schedule in SCHEDULES:
        killed_by = _kill_once(subject, mutant, want, schedule)
        if killed_by:
            return killed_by, schedule
    return "", ""


def _kill_once(subject: Subject, mutant: Mutant, want: list[bytes], schedule: str) -> str:
    args = subject.args()
    try:
        if schedule:
            findings = _check(subject, mutant.kernel, args, schedule)
            if findings:
                return str(findings[0].id)
        else:
            _launch(subject, mutant.kernel, args)
    except Exception as error:
        return f"exception {type(error).__name__}"
    return "" if _bytes(args) == want else "bytes"


def _launch(subject: Subject, kernel: Any, args: Any) -> None:
    import emulate

    emulate.launch(
        kernel,
        subject.grid,
        subject.block,
        *args,
        shared_bytes=subject.shared_bytes,
        engine="interpreted",
        copies="lazy",
        seed=1,
    )


def _run_chunk(work: tuple[str, list[int]]) -> KernelScore:
    name, numbers = work
    subject = next(subject for subject in subjects() if subject.name == name)
    return mutate_kernel(subject, numbers)


def run(kernel: str | None = None, workers: int | None = None) -> list[KernelScore]:
    """Run the mutants of all kernels whose names contain ``kernel``, in several processes.

    Raises:
        LookupError: no kernel has such a name.
    """
    chosen = [subject for subject in subjects() if kernel is None or kernel in subject.name]
    if not chosen:
        known = ", ".join(subject.name for subject in subjects())
        raise LookupError(f"mutate: expected a part of one of {known}, got {kernel!r}")
    count = workers or os.cpu_count() or 1
    work = []
    for subject in chosen:
        numbers = list(range(len(mutants(subject.kernel))))
        work += [(subject.name, numbers[first::count]) for first in range(count)]
    if count == 1:
        parts = [_run_chunk(piece) for piece in work]
    else:
        with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
            parts = list(pool.map(_run_chunk, work))
    scores = []
    for subject in chosen:
        verdicts = [v for part in parts if part.kernel == subject.name for v in part.verdicts]
        scores.append(KernelScore(subject.name, tuple(verdicts)))
    return scores


def main(kernel: str | None = None, json: bool = False, workers: int | None = None) -> int:
    """Run mutants and print the rates as a table or as JSON; 0 if every rate is at least 98 %."""
    start = time.perf_counter()
    try:
        scores = run(kernel, workers)
    except LookupError as error:
        print(error)
        return 2
    seconds = time.perf_counter() - start
    if json:
        print(json_module.dumps(_as_dict(scores, seconds), indent=1))
    else:
        _print(scores, seconds)
    return 0 if all(score.rate >= 0.98 for score in scores) else 1


def _as_dict(scores: Sequence[KernelScore], seconds: float) -> dict[str, Any]:
    return {
        "seconds": round(seconds, 1),
        "kernels": [
            {
                "kernel": score.kernel,
                "mutants": len(score.verdicts),
                "killed": score.killed,
                "equivalent": len(score.verdicts) - score.counted,
                "rate": round(score.rate, 4),
                "verdicts": [vars(verdict) for verdict in score.verdicts],
            }
            for score in scores
        ],
    }


def _print(scores: Sequence[KernelScore], seconds: float) -> None:
    for score in scores:
        equivalent = len(score.verdicts) - score.counted
        print(
            f"{score.kernel:60} {len(score.verdicts):4} mutants, {score.killed:4} killed, "
            f"{equivalent:3} equivalent: {100 * score.rate:.1f} %"
        )
        for verdict in score.survivors:
            print(f"    survives: line {verdict.line}: {verdict.mutant}")
    print(f"{seconds:.0f} s")
