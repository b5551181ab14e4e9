"""Processes that run mutants, because a mutant may end the process that runs it.

A twin or compiled code that a mutant sends astray can crash, and a loop other than the edited one
can go on for ever. A worker runs one mutant at a time, so that its death is the death of that
mutant; another worker takes its place.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from signal import Signals
from typing import Any

from emulate.mutate.judge import Judge, Kill
from emulate.mutate.subjects import Subject

Find = Callable[[str], Subject]
"""Makes a subject from its name; a function of a module, for it goes to other processes."""

TIMES, LEAST_SECONDS = 20, 60
"""A mutant may take so many times as long as the kernel's first check, and so much more."""


def kill_each(jobs: Iterable[tuple[str, int]], find: Find, count: int) -> Iterator[Kill]:
    """What noticed each mutant, in order.

    Args:
        jobs: names of subjects and numbers of mutants.
        find: makes the subjects again.
        count: processes.

    Raises:
        RuntimeError: a kernel itself has findings, or ends its process.
    """
    workers = [_Worker(find) for _ in range(count)]
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def kill(job: tuple[str, int]) -> Kill:
        worker = idle.get()
        try:
            return worker.kill(*job)
        finally:
            idle.put(worker)

    try:
        with ThreadPoolExecutor(count) as threads:
            yield from threads.map(kill, jobs)
    finally:
        for worker in workers:
            worker.close()


class _Worker:
    """A process, which is started anew when a mutant has ended it."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._start()

    def _start(self) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, self._find), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        self._subject = ""

    def kill(self, subject: str, number: int) -> Kill:
        if subject != self._subject:
            self._prepare(subject)
        start = time.perf_counter()
        self._pipe.send(number)
        try:
            if self._pipe.poll(self._limit):
                return _answered(self._pipe.recv())  # type: ignore[no-any-return]
            self._process.kill()
            cause = "timeout"
        except (EOFError, ConnectionError):
            cause = f"crash {self._cause_of_death()}"
        kill = Kill(cause, "", round(time.perf_counter() - start, 3))
        self.close()
        self._start()
        return kill

    def _prepare(self, subject: str) -> None:
        start = time.perf_counter()
        self._pipe.send(subject)
        try:
            _answered(self._pipe.recv())
        except (EOFError, ConnectionError):
            raise RuntimeError(f"mutate: {subject} itself ends its process") from None
        self._subject = subject
        self._limit = LEAST_SECONDS + TIMES * (time.perf_counter() - start)

    def _cause_of_death(self) -> str:
        self._process.join()
        code = self._process.exitcode or 0
        return Signals(-code).name if code < 0 else f"exit {code}"

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _answered(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


def _work(pipe: Connection, find: Find) -> None:
    """A worker's process: a subject's name makes it the one whose mutants come as numbers."""
    judge: Judge
    while True:
        try:
            question = pipe.recv()
        except EOFError:  # the run has ended
            return
        try:
            if isinstance(question, str):
                judge = Judge(find(question))
                pipe.send(None)
            else:
                pipe.send(judge.kill(question))
        except Exception as error:
            pipe.send(error)
