"""Runs mutants and says which of them were noticed, and by what."""

import json as json_module
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from emulate.mutate.edits import Mutant, mutants
from emulate.mutate.equivalent import reason_of
from emulate.mutate.judge import Judge, Kill
from emulate.mutate.subjects import Subject, named, subjects
from emulate.mutate.workers import Find, kill_each


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        mutant: its name.
        kind, file, line: see `emulate.mutate.edits.Mutant`.
        killed_by: id of a finding, ``bytes``, ``exception`` and its type, ``crash`` and the signal
            or exit status with which its process ended, or ``timeout``; empty for a survivor.
        reason: why a survivor is equivalent to the kernel, if that is known.
        how: the schedule of the checked engine that noticed it, or ``interpreted``; empty for a
            crash or a timeout.
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
    """Run the mutants of one kernel in this process, all or those with these numbers.

    Args:
        subject: the kernel and its launches.
        numbers: positions in `emulate.mutate.edits.mutants`.
        everything: also run those that are known to be equivalent.

    Raises:
        RuntimeError: the kernel itself is not free of findings.
    """
    judge = Judge(subject)
    verdicts = []
    for number in range(len(judge.mutants)) if numbers is None else numbers:
        verdict = _without_run(judge.mutants[number])
        if everything or not verdict.reason:
            verdict = _after(verdict, judge.kill(number))
        verdicts.append(verdict)
    return KernelScore(subject.name, tuple(verdicts))


def mutate_kernels(
    chosen: Sequence[Subject], workers: int, find: Find = named
) -> list[KernelScore]:
    """Run all mutants of kernels in processes of their own, which a mutant may end.

    Args:
        chosen: the kernels and their launches.
        workers: how many processes.
        find: makes a subject from its name there.

    Raises:
        RuntimeError: a kernel itself has findings, or ends its process.
    """
    verdicts = {
        (subject.name, number): _without_run(mutant)
        for subject in chosen
        for number, mutant in enumerate(mutants(subject.kernel))
    }
    jobs = [job for job, verdict in verdicts.items() if not verdict.reason]
    for job, kill in zip(jobs, kill_each(jobs, find, workers), strict=True):
        verdicts[job] = _after(verdicts[job], kill)
    return [
        KernelScore(
            subject.name, tuple(v for (name, _), v in verdicts.items() if name == subject.name)
        )
        for subject in chosen
    ]


def _without_run(mutant: Mutant) -> Verdict:
    """The verdict before the mutant has run, which for one with a reason is the last."""
    reason = reason_of(mutant)
    return Verdict(mutant.name, mutant.kind, mutant.file, mutant.line, "", reason, "", 0.0)


def _after(verdict: Verdict, kill: Kill) -> Verdict:
    return replace(
        verdict,
        killed_by=kill.killed_by,
        reason="" if kill.killed_by else verdict.reason,
        how=kill.how,
        seconds=kill.seconds,
    )


def run(kernel: str | None = None, workers: int | None = None) -> list[KernelScore]:
    """Run the mutants of all kernels whose names contain ``kernel``, in several processes.

    Raises:
        LookupError: no kernel has such a name.
    """
    chosen = [subject for subject in subjects() if kernel is None or kernel in subject.name]
    if not chosen:
        known = ", ".join(subject.name for subject in subjects())
        raise LookupError(f"mutate: expected a part of one of {known}, got {kernel!r}")
    return mutate_kernels(chosen, workers or os.cpu_count() or 1)


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
