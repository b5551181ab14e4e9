"""The exception of a launch that did not finish."""

from collections import defaultdict
from typing import Any

from emulate.errors import (
    CollectiveDivergence,
    Deadlock,
    EarlyExit,
    EmulationError,
    KernelError,
    StackOverflow,
)
from emulate.fast import ops
from emulate.fast import records as rec
from emulate.fast.exceptions import read_exception
from emulate.text import ranges


def failure(status: int, function: Any, memory: Any) -> EmulationError:
    """What went wrong in a launch, from the records that it left."""
    if status == rec.HUB_DEADLOCK:
        return Deadlock(_describe_deadlock(function, memory))
    error = int(memory.run[rec.RUN_ERROR // 8])
    detail = int(memory.run[rec.RUN_ERROR_DETAIL // 8])
    number = (int(memory.run[rec.RUN_ERROR_FIBER // 8]) - memory.fibers.base) // rec.STACK_BYTES
    where = f"{_thread(memory, number)} of {function.__name__}{_line(function, memory, number)}"
    if error == rec.ERROR_RAISED:
        return KernelError(f"{read_exception(detail)}, in {where}")
    if error == rec.ERROR_DIVERGENT:
        return CollectiveDivergence(
            f"{where} called {ops.op_name(detail)} while other lanes of its warp wait in "
            f"{_other_op(memory, number)}"
        )
    if error == rec.ERROR_EXITED:
        return EarlyExit(f"syncthreads in a block of which a thread has exited, seen by {where}")
    if error == rec.ERROR_PARTIAL_WARP:
        return KernelError(
            f"{ops.op_name(detail)} needs a whole warp; the block's {memory.shape.threads} threads "
            f"are no multiple of {rec.WARP_LANES}, in {where}"
        )
    return StackOverflow(f"more than {rec.STACK_BYTES} bytes of stack, in {where}")


def _describe_deadlock(function: Any, memory: Any) -> str:
    shape = memory.shape
    count = int(memory.run[rec.RUN_USED // 8]) * shape.threads
    done = memory.fibers.field(rec.FIBER_DONE, count)
    waits_in = memory.fibers.field(rec.FIBER_WAITS_IN, count)
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for number in range(count):
        if not done[number]:
            what = _wait_name(int(waits_in[number])) + _line(function, memory, number)
            groups[number // shape.threads, what].append(number % shape.threads)
    total = sum(len(ranks) for ranks in groups.values())
    lines = [f"{total} threads of {function.__name__} wait and none can run:"]
    for (slot, what), ranks in list(groups.items())[:20]:
        lines.append(f"  block {_block(memory, slot)}, {ranges(ranks)}: {what}")
    if len(groups) > 20:
        lines.append(f"  and {len(groups) - 20} groups more")
    unstarted = shape.blocks - int(memory.run[rec.RUN_NEXT_BLOCK // 8])
    if unstarted:
        lines.append(f"  {unstarted} blocks were not started: resident={memory.blocks.shape[0]}")
    return "\n".join(lines)


def _wait_name(number: int) -> str:
    if number == rec.WAIT_BARRIER:
        return "syncthreads"
    if number == rec.WAIT_RETRY:
        return "nanosleep"
    return ops.op_name(number)


def _line(function: Any, memory: Any, number: int) -> str:
    line = int(memory.fibers.field(rec.FIBER_LINE, number + 1)[number])
    return f" (line {line} of {function.__code__.co_filename})" if line else ""


def _block(memory: Any, slot: int) -> tuple[int, int, int]:
    x, y, z = memory.blocks[slot, rec.BLOCK_INDEX // 8 : rec.BLOCK_INDEX // 8 + 3]
    return int(x), int(y), int(z)


def _thread(memory: Any, number: int) -> str:
    slot, rank = divmod(number, memory.shape.threads)
    size_x, size_y, _ = memory.shape.block
    index = (rank % size_x, rank // size_x % size_y, rank // (size_x * size_y))
    return f"block {_block(memory, slot)} thread {index}"


def _other_op(memory: Any, number: int) -> str:
    slot, rank = divmod(number, memory.shape.threads)
    return ops.op_name(int(memory.warps[slot, rank // rec.WARP_LANES, rec.WARP_OP // 8]))
