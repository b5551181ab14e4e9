"""A machine of a few lines: threads are generators that yield where they may be interrupted."""

from collections.abc import Callable, Iterator
from typing import Any

from emulate.schedule import Choice, Scheduler

Program = Callable[[int, dict[str, Any]], Iterator[None]]


def run(
    program: Program, threads: int, scheduler: Scheduler, *, block_threads: int = 32
) -> tuple[dict[str, Any], list[Choice]]:
    """Runs threads to their end; the shared state and who ran in which order.

    A thread that yields a name blocks until the state has that name; ``copy`` in the state is a
    list of functions that land later, each a choice.
    """
    state: dict[str, Any] = {"copy": []}
    ready = [
        (Choice("thread", i // block_threads, i % block_threads), program(i, state))
        for i in range(threads)
    ]
    blocked: list[tuple[str, Any]] = []
    order = []
    while ready or blocked or state["copy"]:
        for name, who in [b for b in blocked if b[0] in state]:
            blocked.remove((name, who))
            ready.append(who)
        choices = [choice for choice, _ in ready]
        choices += [Choice("copy", 0, 0, number) for number, _ in state["copy"]]
        if not choices:
            raise RuntimeError("deadlock")
        index = scheduler.pick(choices) if len(choices) > 1 else 0
        order.append(choices[index])
        if index >= len(ready):
            state["copy"].pop(index - len(ready))[1]()
            continue
        choice, thread = ready.pop(index)
        try:
            name = next(thread)
        except StopIteration:
            continue
        if name is None:
            ready.append((choice, thread))
        else:
            blocked.append((name, (choice, thread)))
    return state, order


def lost_update(thread: int, state: dict[str, Any]) -> Iterator[None]:
    """Every thread adds one, not atomically."""
    for _ in range(3):
        old = state.get("sum", 0)
        if thread in state.get("careless", (1, 2)):
            yield None
        state["sum"] = old + 1
        yield None


def late_flag(thread: int, state: dict[str, Any]) -> Iterator[None]:
    """Thread 0 sets data, then a flag; the others spin on the flag."""
    if thread == 0:
        yield None
        state["flag"] = 1
        return
    while "flag" not in state:
        yield None


def two_orders(thread: int, state: dict[str, Any]) -> Iterator[None]:
    """Fails if thread 3 is first, and thread 2 comes between thread 0's two steps."""
    log = state.setdefault("log", [])
    log.append((thread, 0))
    yield None
    log.append((thread, 1))
