"""Runs a mutant until something notices it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulate.mutate.edits import mutants
from emulate.mutate.subjects import Subject

SCHEDULES = ("fifo", "random:1", "pct:3:1")
"""Of the checked engine; tried in turn until one kills the mutant."""

MAX_STEPS = 1_000_000
"""Several times what the shipped kernels take at their small shapes."""


@dataclass(frozen=True)
class Kill:
    """What noticed a mutant; see `emulate.mutate.run.Verdict`."""

    killed_by: str
    how: str
    seconds: float


class Judge:
    """Runs mutants of one kernel and compares with the kernel.

    Attributes:
        subject: the kernel and its launches.
        mutants: see `emulate.mutate.edits.mutants`.

    Raises:
        RuntimeError: the kernel itself is not free of findings.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.mutants = mutants(subject.kernel)
        self._want = []
        for grid, make in subject.launches:
            args = make()
            findings = self._check(subject.kernel, grid, args, "fifo")
            if findings:
                raise RuntimeError(f"mutate: {subject.name} itself has findings: {findings[0]}")
            self._want.append(_bytes(args))

    def kill(self, number: int) -> Kill:
        """What notices a mutant, by its number; two empty texts if nothing does."""
        start = time.perf_counter()
        killed_by, how = self._kill(self.mutants[number].kernel)
        return Kill(killed_by, how, round(time.perf_counter() - start, 3))

    def _kill(self, kernel: Any) -> tuple[str, str]:
        # The interpreted engine is several times as fast, and most wrong counts give wrong bytes.
        killed_by = self._kill_once(kernel, "")
        if killed_by:
            return killed_by, "interpreted"
        for schedule in SCHEDULES:
            killed_by = self._kill_once(kernel, schedule)
            if killed_by:
                return killed_by, schedule
        return "", ""

    def _kill_once(self, kernel: Any, schedule: str) -> str:
        for (grid, make), want in zip(self.subject.launches, self._want, strict=True):
            args = make()
            try:
                if schedule:
                    findings = self._check(kernel, grid, args, schedule)
                    if findings:
                        return str(findings[0].id)
                else:
                    self._launch(kernel, grid, args)
            except Exception as error:
                return f"exception {type(error).__name__}"
            if _bytes(args) != want:
                return "bytes"
        return ""

    def _check(self, kernel: Any, grid: Any, args: Any, schedule: str) -> tuple[Any, ...]:
        import emulate

        report = emulate.check(
            kernel,
            grid,
            self.subject.block,
            *args,
            shared_bytes=self.subject.shared_bytes,
            schedules=[schedule],
            max_findings=1,
            max_steps=MAX_STEPS,
        )
        return tuple(report.findings)

    def _launch(self, kernel: Any, grid: Any, args: Any) -> None:
        import emulate

        emulate.launch(
            kernel,
            grid,
            self.subject.block,
            *args,
            shared_bytes=self.subject.shared_bytes,
            engine="interpreted",
            copies="lazy",
            seed=1,
        )


def _bytes(args: Sequence[Any]) -> list[bytes]:
    """Bytes of all arrays."""
    return [arg.tobytes() for arg in args if isinstance(arg, np.ndarray)]
