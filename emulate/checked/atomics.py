"""Atomic accesses and fences: which of them order threads, and for whom."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emulate.checked.barriers import fence_inits
from emulate.checked.clocks import Narrow, Stamp
from emulate.checked.touch import INIT
from emulate.interpreted.block import Thread
from nbmoe_kernels.device import effects as fx
from nbmoe_kernels.device.op import NUMPY_TYPES, Op, Timing

Args = tuple[Any, ...]
_ACQUIRES = ("acquire", "acq_rel", "sc", "seq_cst")
_RELEASES = ("release", "acq_rel", "sc", "seq_cst")
_WIDTH = {"cta": 0, "cluster": 0, "gpu": 1, "sys": 1}
"""Whether a scope reaches other blocks: there are no clusters of more than one."""
MAX_HISTORY = 4096


@dataclass(eq=False)
class Location:
    """An address that atomics use.

    Attributes:
        history: values that it had, each with what its release sequence hands over. A waiter may
            have gone on as soon as a value was there, so it learns only what that one hands over.
        last: site and agent of the latest release.
    """

    history: list[tuple[Any, Stamp | None]] = field(default_factory=list)
    last: tuple[int, int] = (0, 0)

    @property
    def stamp(self) -> Stamp | None:
        """What the current value hands over."""
        return self.history[-1][1] if self.history else None

    def put(self, value: Any, stamp: Stamp | None) -> None:
        """The location has a new value."""
        if self.history and not value >= self.history[-1][0]:
            self.history.clear()  # it is no counter, or it starts again
        if len(self.history) >= MAX_HISTORY:
            del self.history[: MAX_HISTORY // 2]
        self.history.append((value, stamp))


def _location(running: Any, address: int, value: Any) -> Location:
    location: Location | None = running.atomics.get(address)
    if location is None:
        location = running.atomics[address] = Location([(value, None)])
    return location


def before(op: Op, effect: fx.Atomic, running: Any, thread: Thread, site: int, args: Args) -> None:
    """Check an atomic access, and let others go first."""
    from emulate.checked.ops import span

    running.pause()
    running.flush()
    access = _Natural(effect.param, effect.nbytes, effect.kind)
    found = span(op, access, args, running, site)
    if found is None:
        return
    touch(running, thread, found.array, found.offset, effect, site)
    address = found.array.shadow + found.offset
    value = found.array.data.reshape(-1)[found.offset // found.array.itemsize]
    location = _location(running, address, value)
    if op.timing is not Timing.WAIT:
        acquire(running, thread, location, location.stamp, effect, site)


class _Natural:
    """An access whose address is a multiple of its size."""

    def __init__(self, param: str, nbytes: fx.Number, kind: str) -> None:
        self.param = param
        self.nbytes = nbytes
        self.kind = kind
        self.align = nbytes if isinstance(nbytes, int) else 0


def after(op: Op, effect: fx.Atomic, running: Any, thread: Thread, site: int, args: Args) -> None:
    """The op has run: take what its value hands over, or hand over."""
    at = op.arguments.index(effect.param)
    array, index = args[at], int(args[at + 1])
    if not hasattr(array, "shadow"):
        return
    location: Location = running.atomics[array.shadow + index * array.itemsize]
    if op.timing is Timing.WAIT:
        stamp = _first_that_is_ready(op, location, array, args)
        acquire(running, thread, location, stamp, effect, site)
    if effect.kind != "load":
        release(running, thread, location, array.data.reshape(-1)[index], effect, site)


def _first_that_is_ready(op: Op, location: Location, array: Any, args: Args) -> Stamp | None:
    cell = np.empty(1, array.dtype)
    casts = [NUMPY_TYPES[p.dtype] for p in op.params if p.kind == "scalar"]
    values = [cast(value) for cast, value in zip(casts, args[2:], strict=True)]
    for value, stamp in location.history:
        cell[0] = value
        if op.twin(cell, 0, *values):
            return stamp
    return location.stamp


def touch(
    running: Any, thread: Thread, array: Any, offset: int, effect: fx.Atomic, site: int
) -> None:
    """Check an atomic access against shadow memory."""
    nbytes = effect.nbytes
    assert isinstance(nbytes, int)
    start = array.shadow - array.region.base + offset
    bits = start | nbytes
    granule = (bits & -bits).bit_length() - 1
    running.shadow.refine(array.region, granule)
    offsets = np.arange(start, start + nbytes, 1 << array.region.shift)
    rows = running.shadow.rows[(offsets >> array.region.shift) + array.region.row]
    if effect.kind == "rmw" and not (rows[:, 3] & INIT).all():
        element, index = running.reports.element(array.region, array.region.base + start)
        running.reports.add(
            "UNINIT_READ",
            f"{element}: nobody has written it",
            (site, running.agent, "reads and writes"),
            variable=array.region.name,
            index=index,
        )
    clocks = thread.block.state.clocks
    clock = clocks.table[:, thread.rank, : clocks.width].copy()
    running.touch(
        array.region,
        offsets,
        granule,
        int(thread.state.agents[0]),
        int(clock[0, thread.rank]),
        site,
        clock,
        thread.state.known,
        write=effect.kind != "load",
        atomic=True,
        float_atomic=effect.is_float and effect.kind == "rmw",
        is_thread=True,
    )


def acquire(
    running: Any, thread: Thread, location: Location, stamp: Stamp | None, effect: fx.Atomic,
    site: int,
) -> None:  # fmt: skip
    """A load, or the load of a read-modify-write, meets what was released."""
    if effect.kind == "store" or stamp is None:
        return
    if effect.order not in _ACQUIRES:
        thread.state.seen.append((stamp, *location.last))
        return
    _check_scope(running, thread, stamp, location.last, effect.scope, site)
    thread.block.state.clocks.acquire(thread, stamp)


def _check_scope(
    running: Any, thread: Thread, stamp: Stamp, last: tuple[int, int], scope: str, site: int
) -> None:
    mine = thread.block.linear
    for narrow in stamp.narrow:
        if narrow.block != mine:
            running.reports.add(
                "SCOPE_TOO_NARROW",
                f"a release with scope {narrow.scope} is for threads of its own block",
                (narrow.site, narrow.agent, "releases"),
                (site, running.agent, "acquires"),
            )
    if not _WIDTH[scope] and any(block != mine for block in stamp.own.rows):
        running.reports.add(
            "SCOPE_TOO_NARROW",
            f"an acquire with scope {scope} sees threads of its own block only",
            (*last, "releases"),
            (site, running.agent, "acquires"),
        )


def release(
    running: Any, thread: Thread, location: Location, value: Any, effect: fx.Atomic, site: int
) -> None:
    """A store, or the store of a read-modify-write, hands over what the thread knows."""
    stamp = thread.state.fence
    if effect.order in _RELEASES:
        stamp = _release_stamp(running, thread, effect.scope, site)
    if stamp is not None:
        location.last = site, running.agent
    if effect.kind == "rmw":  # it continues the release sequence that it has read from
        stamp = Stamp.join(location.stamp, stamp)
    is_new = not location.history or value != location.history[-1][0]
    location.put(value, stamp)
    if is_new:
        running.changed()


def _release_stamp(running: Any, thread: Thread, scope: str, site: int) -> Stamp:
    narrow: tuple[Narrow, ...] = ()
    if not _WIDTH[scope]:
        narrow = (Narrow(thread.block.linear, running.agent, site, scope),)
    clocks = thread.block.state.clocks
    stamp: Stamp = clocks.snapshot(thread, narrow)
    clocks.bump(thread.rank)
    return stamp


def fence(effect: fx.Fence, running: Any, thread: Thread, site: int, args: Args) -> None:
    """A fence makes relaxed atomics before it acquire, and those after it release."""
    running.flush()
    fence_here(running, thread, effect.scope, site)


def fence_here(running: Any, thread: Thread, scope: str, site: int) -> None:
    """A fence of a scope at a site."""
    if scope == "cluster":
        fence_inits(thread)
        return
    state = thread.state
    for stamp, last_site, last_agent in state.seen:
        _check_scope(running, thread, stamp, (last_site, last_agent), scope, site)
        thread.block.state.clocks.acquire(thread, stamp)
    state.seen.clear()
    if state.fence is None or _WIDTH[scope] or state.fence.narrow:
        state.fence = _release_stamp(running, thread, scope, site)
