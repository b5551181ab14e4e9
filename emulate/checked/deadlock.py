"""Tells what a launch in which nobody can run has got stuck in."""

from collections import defaultdict
from typing import Any

from emulate.checked.sites import find_site, is_ours, site_of
from emulate.interpreted.block import Block, Thread
from emulate.text import ranges

MAX_GROUPS = 20


def report_deadlock(machine: Any) -> None:
    """Report the most specific reason that can be seen."""
    blocks: dict[int, list[Thread]] = defaultdict(list)
    for thread in machine.threads.values():
        blocks[thread.block.linear].append(thread)
    reasons = [
        reason
        for threads in blocks.values()
        if (reason := _collective(threads) or _barrier(threads))
    ]
    for id, message, threads in reasons:
        machine.reports.add(id, message, *(_side(thread) for thread in threads))
    if not reasons:
        _deadlock(machine, list(machine.threads.values()))


Reason = tuple[str, str, list[Thread]]


def _waits_in_barrier(thread: Thread) -> bool:
    return any(thread in barrier.waiting for barrier in thread.block.barriers.values())


def _collective(threads: list[Thread]) -> Reason | None:
    """A collective whose missing lanes have exited or wait in something that is no memory."""
    units = {id(unit): unit for t in threads for unit in (t.warp, t.group)}
    for unit in units.values():
        if unit.meeting is None or not unit.meeting.threads:
            continue
        came = unit.meeting.threads
        others = [
            t for t in threads if unit.first <= t.rank < unit.first + unit.lanes and t not in came
        ]
        elsewhere = [t for t in others if _waits_in_barrier(t) or _is_in_collective(t)]
        if len(elsewhere) == len(others):
            name = unit.meeting.op.name
            message = f"{name} needs {unit.lanes} lanes, and {len(came)} have come"
            return "COLLECTIVE_DIVERGENT", message, [came[0], *elsewhere[:1]]
    return None


def _is_in_collective(thread: Thread) -> bool:
    return any(
        unit.meeting is not None and thread in unit.meeting.threads
        for unit in (thread.warp, thread.group)
    )


def _barrier(threads: list[Thread]) -> Reason | None:
    """A barrier whose missing threads have exited or wait in another barrier or collective."""
    block: Block = threads[0].block
    waiting = [t for t in threads if _waits_in_barrier(t)]
    if not waiting or any(not _waits_in_barrier(t) and not _is_in_collective(t) for t in threads):
        return None
    filled = [barrier for barrier in block.barriers.values() if barrier.waiting]
    first = filled[0].waiting[0]
    count = filled[0].record[0][2]
    second = next((t for t in threads if t not in filled[0].waiting), None)
    message = (
        f"barrier {filled[0].number} of block {block.linear} needs {count} threads, and "
        f"{filled[0].arrived} have come"
    )
    return "BARRIER_DIVERGENT", message, [first, *([second] if second else [])]


def _side(thread: Thread) -> tuple[int, int, str]:
    agent = int(thread.state.agents[0])
    return stopped_at(thread), agent, f"waits in {thread.waits_in}"


def stopped_at(thread: Thread) -> int:
    """The site of the statement that a thread is in."""
    frame = thread.run.gr_frame if thread.run else None
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return int(thread.state.call[0]) if frame is None else site_of(frame)


def _deadlock(machine: Any, threads: list[Thread]) -> None:
    groups: dict[tuple[int, str, int], list[Thread]] = defaultdict(list)
    for thread in threads:
        site = stopped_at(thread)
        groups[thread.block.linear, thread.waits_in, site].append(thread)
    lines = [f"{len(threads)} threads wait and none can run"]
    for (block, what, site), members in list(groups.items())[:MAX_GROUPS]:
        place = find_site(site)
        ranks = sorted(t.rank for t in members)
        lines.append(f"block {block}, {ranges(ranks)}: {what} (line {place.line})")
    sides: dict[int, tuple[int, int, str]] = {}
    for (_, _, site), members in groups.items():
        sides.setdefault(site, _side(members[0]))
    machine.reports.add("DEADLOCK", "; ".join(lines), *sides.values())
