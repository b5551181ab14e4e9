"""Processes that run mutants, because a mutant may end the process that runs it.

A twin or compiled code that a mutant sends astray can crash. A worker runs one mutant at a time, so
that its death is the death of that mutant; another worker takes its place.
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
            try:
                self._ask(subject)
            except (EOFError, OSError):
                raise RuntimeError(f"mutate: {subject} itself ends its process") from None
            self._subject = subject
        start = time.perf_counter()
        try:
            kill: Kill = self._ask(number)
        except (EOFError, OSError):
            seconds = round(time.perf_counter() - start, 3)
            kill = Kill(f"crash {self._cause_of_death()}", "", seconds)
            self._pipe.close()
            self._start()
        return kill

    def _ask(self, question: str | int) -> Any:
        self._pipe.send(question)
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _cause_of_death(self) -> str:
        self._process.join()
        code = self._process.exitcode or 0
        return Signals(-code).name if code < 0 else f"exit {code}"

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


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
