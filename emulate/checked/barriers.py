"""Effects on mbarriers."""

import functools
from typing import Any

import numpy as np

from emulate.checked.clocks import Knowledge, Stamp
from emulate.checked.mbarriers import Copies, Mbar
from emulate.checked.touch import LOCAL_BITS
from emulate.interpreted.block import Thread
from nbmoe_kernels.device import effects as fx
from nbmoe_kernels.device.op import Op

Args = tuple[Any, ...]
_BYTES = 8


def _number(op: Op, value: fx.Number, args: Args) -> int:
    return int(args[op.arguments.index(value)]) if isinstance(value, str) else int(value)


def _address(op: Op, effect: Any, running: Any, site: int, args: Args) -> int:
    """The shadow address of the mbarrier that an effect names."""
    from emulate.checked.ops import span

    access = fx.Access(effect.param, _BYTES, write=True, align=_BYTES)
    found = span(op, access, args, running, site)
    assert found is not None, "an mbarrier lies in shared memory"
    return int(found.array.shadow + found.offset)


def _mbar(op: Op, effect: Any, running: Any, thread: Thread, site: int, args: Args) -> Mbar:
    """The mbarrier that an effect names; reports one that the thread cannot know of."""
    address = _address(op, effect, running, site, args)
    mbar: Mbar | None = thread.block.state.mbars.get(address)
    if mbar is None:
        raise running.reports.halt(
            "MBAR_INIT_RACE",
            f"{op.name}: there is no mbarrier at this address (yet)",
            (site, running.agent, f"calls {op.name}"),
        )
    agent, epoch, init_site = mbar.init
    rank = agent & ((1 << LOCAL_BITS) - 1)
    if rank != thread.rank:
        clocks = thread.block.state.clocks
        if clocks.table[0, thread.rank, rank] < epoch:
            running.reports.add(
                "MBAR_INIT_RACE",
                "nothing orders the use of the mbarrier after its initialisation",
                (init_site, agent, "initialises"),
                (site, running.agent, f"calls {op.name}"),
            )
    return mbar


def before(op: Op, effect: Any, running: Any, thread: Thread, site: int, args: Args) -> None:
    """What an effect on an mbarrier needs before the op runs."""
    running.pause()
    running.flush()
    if isinstance(effect, fx.MbarInit):
        _init(op, effect, running, thread, site, args)
    elif isinstance(effect, fx.MbarInval):
        _mbar(op, effect, running, thread, site, args)
        del thread.block.state.mbars[_address(op, effect, running, site, args)]
    elif isinstance(effect, fx.MbarArrive):
        _arrive(op, effect, running, thread, site, args)
    else:
        mbar = _mbar(op, effect, running, thread, site, args)
        mbar.waiters += 1
        thread.state.target = mbar.target(_number(op, effect.parity, args))


def after(op: Op, effect: Any, running: Any, thread: Thread, site: int, args: Args) -> None:
    """What an effect on an mbarrier means once the op has run."""
    if isinstance(effect, fx.MbarArrive):
        running.changed()
        return
    address = _address(op, effect, running, site, args)
    mbar = thread.block.state.mbars.get(address)
    if mbar is None:
        return
    mbar.waiters -= 1
    seen, target = mbar.phase - 1, thread.state.target
    if seen > target:
        running.reports.add(
            "MBAR_PHASE",
            f"the wait was for phase {target}, and {seen - target} more have completed since",
            (*mbar.last, "arrives"),
            (site, running.agent, "waits"),
        )
    if seen >= 0:
        mbar.see(seen)
        if mbar.done is not None:
            thread.block.state.clocks.acquire(thread, mbar.done)


def _init(op: Op, effect: Any, running: Any, thread: Thread, site: int, args: Args) -> None:
    address = _address(op, effect, running, site, args)
    mbars = thread.block.state.mbars
    old = mbars.get(address)
    if old is not None:
        running.reports.add(
            "MBAR_REINIT_LIVE",
            f"the mbarrier is in phase {old.phase}; it must be invalidated first",
            (old.init[2], old.init[0], "initialises"),
            (site, running.agent, "initialises again"),
        )
    clocks = thread.block.state.clocks
    epoch = int(clocks.table[0, thread.rank, thread.rank])
    mbar = mbars[address] = Mbar(_number(op, effect.count, args), (running.agent, epoch, site))
    thread.state.inits.append(mbar)
    clocks.bump(thread.rank)


def fence_inits(thread: Thread) -> None:
    """Async copies see the mbarriers that the thread has made."""
    for mbar in thread.state.inits:
        mbar.is_fenced = True
    thread.state.inits.clear()


def _arrive(op: Op, effect: Any, running: Any, thread: Thread, site: int, args: Args) -> None:
    mbar = _mbar(op, effect, running, thread, site, args)
    count, expected = _number(op, effect.count, args), _number(op, effect.expect, args)
    if count > mbar.pending:
        raise running.reports.halt(
            "MBAR_COUNT",
            f"{count} arrivals at an mbarrier whose phase {mbar.phase} needs {mbar.pending} more",
            (*mbar.last, "arrives"),
            (site, running.agent, "arrives"),
        )
    mbar.awaited += expected
    if count:
        clocks = thread.block.state.clocks
        mbar.release(clocks.snapshot(thread), site, running.agent)
        clocks.bump(thread.rank)
        mbar.pending -= count
    _advance(running, mbar, site, running.agent)


def _advance(running: Any, mbar: Mbar, site: int, agent: int) -> None:
    if mbar.advance():
        running.reports.add(
            "MBAR_PHASE",
            f"phase {mbar.phase - 1} completes and nobody has waited for phase {mbar.phase - 2}",
            (mbar.init[2], mbar.init[0], "initialises"),
            (site, agent, "completes the phase"),
        )


def issue(
    op: Op, effect: Any, running: Any, thread: Thread, site: int, args: Args
) -> tuple[int, int]:
    """An async copy begins that an mbarrier counts; its agent and epoch."""
    mbar = _mbar(op, effect, running, thread, site, args)
    if not mbar.is_fenced:
        running.reports.add(
            "MBAR_INIT_RACE",
            "no fence makes the mbarrier's initialisation visible to async copies",
            (mbar.init[2], mbar.init[0], "initialises"),
            (site, running.agent, f"calls {op.name}"),
        )
    clocks = thread.block.state.clocks
    copies = mbar.copies.get(thread.rank)
    if copies is None:
        local = clocks.new_agent(f"a copy ({op.name})", thread.rank)
        copies = mbar.copies[thread.rank] = Copies(local)
    copies.epoch += 1
    copies.in_flight.add(copies.epoch)
    agent = clocks.agent(copies.local)
    mbar.unseen.append((mbar.phase, site, agent))
    nbytes = _number(op, effect.nbytes, args)
    stamp = clocks.snapshot(thread)
    thread.state.landing = functools.partial(
        _land, running, mbar, copies, copies.epoch, thread.block.linear, stamp, nbytes, site
    )
    return copies.local, copies.epoch


def fork(thread: Thread) -> None:
    """What the thread does from now on, its copy does not know."""
    thread.block.state.clocks.bump(thread.rank)


def _land(
    running: Any, mbar: Mbar, copies: Copies, epoch: int, block: int, stamp: Stamp, nbytes: int,
    site: int,
) -> None:  # fmt: skip
    copies.in_flight.discard(epoch)
    row = stamp.own.rows[block]
    if row.shape[1] <= copies.local:
        wider = np.zeros((2, copies.local + 1), np.int32)
        wider[:, : row.shape[1]] = row
        row = wider
    row[:, copies.local] = copies.complete
    agent = block << LOCAL_BITS | copies.local
    mbar.release(Stamp(Knowledge({**stamp.own.rows, block: row}), stamp.narrow), site, agent)
    mbar.awaited -= nbytes
    if mbar.awaited < 0 and mbar.pending == 0:
        raise running.reports.halt(
            "MBAR_COUNT",
            f"phase {mbar.phase} gets {-mbar.awaited} bytes more than it expects",
            (mbar.init[2], mbar.init[0], "initialises"),
            (site, agent, f"brings {nbytes} bytes"),
        )
    _advance(running, mbar, site, agent)
