"""The exception of a launch that did not finish."""

from collections import defaultdict
from typing import Any

from emulate import stock
from emulate.errors import (
    CollectiveDivergence,
    Deadlock,
    EarlyExit,
    EmulationError,
    KernelError,
    ResourceError,
    StackOverflow,
    UnsupportedOp,
)
from emulate.fast import records as rec
from emulate.fast.calls import op_number, shown_operands
from emulate.fast.exceptions import raised_error
from emulate.fast.stock import masked_function
from emulate.text import ranges
from nbmoe_kernels.device.effects import NamedBarrier
from nbmoe_kernels.device.op import TABLE, Op, Timing


def failure(status: int, function: Any, memory: Any) -> EmulationError:
    """What went wrong in a launch, from the records that it left."""
    if status == rec.HUB_DEADLOCK:
        return Deadlock(_describe_deadlock(function, memory))
    error = int(memory.run[rec.RUN_ERROR // 8])
    detail = int(memory.run[rec.RUN_ERROR_DETAIL // 8])
    number = (int(memory.run[rec.RUN_ERROR_FIBER // 8]) - memory.fibers.base) // rec.STACK_BYTES
    where = f"{_thread(memory, number)} of {function.__name__}{_line(function, memory, number)}"
    if error == rec.ERROR_RAISED:
        return raised_error(detail, where)
    if error == rec.ERROR_DIVERGENT:
        return CollectiveDivergence(
            f"{where} called {_op_name(detail)} while other lanes of its "
            f"{'warp' if _lanes(detail) == rec.WARP_LANES else 'warpgroup'} wait in "
            f"{_other_op(memory, number, _lanes(detail))}"
        )
    if error == rec.ERROR_EXITED:
        return EarlyExit(f"syncthreads in a block of which a thread has exited, seen by {where}")
    if error == rec.ERROR_PARTIAL_UNIT:
        lanes = _lanes(detail)
        unit = "warp" if lanes == rec.WARP_LANES else "warpgroup"
        return KernelError(
            f"{_op_name(detail)} needs a whole {unit}; the block's {memory.shape.threads} threads "
            f"are no multiple of {lanes}, in {where}"
        )
    if error == rec.ERROR_NAMED_ID:
        return KernelError(f"named barrier {detail}: expected a number from 0 to 15, in {where}")
    if error == rec.ERROR_NAMED_COUNT:
        return KernelError(
            f"named barrier: expected a positive multiple of {rec.WARP_LANES} threads, got "
            f"{detail}, in {where}"
        )
    if error == rec.ERROR_NAMED_OTHER:
        return KernelError(
            f"named barrier {detail}: threads that wait there came with another count, in {where}"
        )
    if error == rec.ERROR_MASK:
        index = memory.fibers.field(rec.FIBER_OPERANDS, number + 1)[number]
        message = stock.mask_message(masked_function(int(index)), detail)
        return UnsupportedOp(f"{message}, in {where}")
    if error == rec.ERROR_GRID:
        return ResourceError(
            f"a grid barrier needs all {memory.shape.blocks} blocks alive at one time, and only "
            f"{memory.blocks.shape[0]} can be, in {where}"
        )
    return StackOverflow(f"more than {rec.STACK_BYTES} bytes of stack, in {where}")


def _describe_deadlock(function: Any, memory: Any) -> str:
    shape = memory.shape
    count = int(memory.run[rec.RUN_USED // 8]) * shape.threads
    done = memory.fibers.field(rec.FIBER_DONE, count)
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for number in range(count):
        if not done[number]:
            what = _wait_name(memory, number) + _line(function, memory, number)
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


def _wait_name(memory: Any, number: int) -> str:
    what = int(memory.fibers.field(rec.FIBER_WAITS_IN, number + 1)[number])
    fixed = {
        rec.WAIT_BARRIER: "syncthreads",
        rec.WAIT_RETRY: "nanosleep",
        rec.WAIT_GRID: "this_grid().sync()",
    }
    if what in fixed:
        return fixed[what]
    op = _find_op(what)
    if op is None or (op.timing is not Timing.WAIT and not _is_barrier(op)):
        return _op_name(what)
    words = [
        int(memory.fibers.field(rec.FIBER_OPERANDS + 8 * i, number + 1)[number])
        for i in range(rec.OPERAND_WORDS)
    ]
    operands = zip(shown_operands(op), words, strict=False)
    return f"{op.name}({', '.join(f'{name}={value}' for name, value in operands)})"


def _is_barrier(op: Op) -> bool:
    return any(isinstance(effect, NamedBarrier) for effect in op.effects or ())


def _find_op(number: int) -> Op | None:
    ops = (*TABLE.values(), *stock.ops())
    return next((op for op in ops if op_number(op) == number), None)


def _op_name(number: int) -> str:
    op = _find_op(number)
    return op.name if op else "an op"


def _lanes(number: int) -> int:
    op = _find_op(number)
    return int(op.scope) if op else rec.WARP_LANES


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


def _other_op(memory: Any, number: int, lanes: int) -> str:
    slot, rank = divmod(number, memory.shape.threads)
    units = memory.warps if lanes == rec.WARP_LANES else memory.warpgroups
    return _op_name(int(units.records[slot, rank // lanes, rec.UNIT_OP // 8]))
