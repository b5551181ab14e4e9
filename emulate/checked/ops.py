"""Calls of device ops in the checked engine: what an op's effects say, then the op itself."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from emulate.checked import arrays, atomics, barriers
from emulate.checked.arrays import Local, Tracked
from emulate.checked.sites import site_here
from emulate.checked.touch import MAX_LOG_SIZE, SECOND_SHIFT, SITE_SHIFT, SIZE_SHIFT, WRITE_SHIFT
from emulate.interpreted import bindings
from emulate.interpreted.block import Thread
from emulate.interpreted.machine import machine
from nbmoe_kernels.device import effects as fx
from nbmoe_kernels.device.op import NUMPY_TYPES, Op, Scope, Timing

Call = Callable[..., Any]
_ITEMSIZE = {name: np.dtype(kind).itemsize for name, kind in NUMPY_TYPES.items()}
_footprints: dict[Any, np.ndarray] = {}


@functools.cache
def bind(op: Op) -> Call:
    """What kernels of the checked engine call for an op."""
    call = bindings.bind(op)
    tiles = [at for at, name in enumerate(op.arguments) if _kind(op, name) == "tile"]
    if op.is_pure and not tiles:
        return call
    before = _before(op)
    after = _after(op)
    asynchronous = op.timing is Timing.ASYNC
    scale = op.arguments.index("scale_d") if "scale_d" in op.arguments else -1

    def run(*args: Any) -> Any:
        running: Any = machine()
        thread = running.current
        site = site_here()
        thread.state.call = site, args
        for at in tiles:
            if isinstance(args[at], Local):
                is_read = scale < 0 or bool(args[scale])
                _check_tile(op, args[at], asynchronous, is_read)
        for step in before:
            step(running, thread, site, args)
        result = call(*args)
        for step in after:
            step(running, thread, site, args)
        for at in tiles:
            if isinstance(args[at], Local):
                _write_tile(args[at], asynchronous)
        return result

    return run


@functools.cache
def _arguments(op: Op) -> tuple[str, ...]:
    return op.arguments


def _kind(op: Op, name: str) -> str:
    return next((p.kind for p in op.params if p.name == name), "index")


def _check_tile(op: Op, tile: Local, asynchronous: bool, is_read: bool) -> None:
    if tile.state.product is not None and not asynchronous:
        arrays.hooks.pending(tile)
    if tile.is_whole or not is_read:
        return
    if not tile.written.all():
        first = int(np.argmin(tile.written))
        arrays.hooks.uninitialised(tile, first, op.name)
    tile.is_whole = True


def _write_tile(tile: Local, asynchronous: bool) -> None:
    if not tile.is_whole:
        tile.written[...] = True
        tile.is_whole = True
    if not asynchronous:
        tile.state.used = arrays.ticks[0]


def _before(op: Op) -> list[Call]:
    steps: list[Call] = []
    group = op.group or ""
    name, _, action = group.partition(".")
    if action == "commit":
        return [functools.partial(_commit, name)]
    if action:
        return []
    if op.timing is Timing.ASYNC:
        if op.scope is Scope.THREAD:
            if group != "cp":
                steps.append(_stop)
            make = _log_copy if group == "cp" else _async_copy
            steps.append(functools.partial(make, op))
        return steps
    for effect in op.effects or ():
        if isinstance(effect, fx.Access):
            if effect.footprint is None and effect.addresses is None:
                steps.append(functools.partial(_log_access, op, effect))
        elif isinstance(effect, fx.Atomic):
            steps.append(functools.partial(atomics.before, op, effect))
        elif isinstance(effect, fx.Fence):
            steps.append(functools.partial(atomics.fence, effect))
        elif isinstance(effect, fx.ProxyFence):
            steps.append(_proxy_fence)
        elif isinstance(effect, fx.GridWait):
            steps.append(_stop)
        elif isinstance(effect, fx.MbarInit | fx.MbarInval | fx.MbarArrive | fx.MbarWait):
            steps.append(functools.partial(barriers.before, op, effect))
    return steps


def _after(op: Op) -> list[Call]:
    steps: list[Call] = []
    name, _, action = (op.group or "").partition(".")
    if action.startswith("wait"):
        return [functools.partial(_wait, name, int(action[4:]))]
    for effect in op.effects or ():
        if op.timing is Timing.ASYNC:
            break
        if isinstance(effect, fx.Atomic):
            steps.append(functools.partial(atomics.after, op, effect))
        elif isinstance(effect, fx.MbarArrive | fx.MbarWait):
            steps.append(functools.partial(barriers.after, op, effect))
        elif isinstance(effect, fx.GridWait):
            steps.append(_grid_wait)
    return steps


def _stop(running: Any, thread: Thread, site: int, args: tuple[Any, ...]) -> None:
    running.flush()


def _grid_wait(running: Any, thread: Thread, site: int, args: tuple[Any, ...]) -> None:
    running.wait_for_previous(thread)


def _proxy_fence(running: Any, thread: Thread, site: int, args: tuple[Any, ...]) -> None:
    running.flush()
    thread.block.state.clocks.proxy_fence(thread)
    barriers.fence_inits(thread)


def _commit(name: str, running: Any, thread: Thread, site: int, args: tuple[Any, ...]) -> None:
    running.flush()
    group = thread.state.group(name)
    group.commit()
    if name == "cp":
        thread.state.epochs[1] = group.epoch


def _wait(
    name: str, pending: int, running: Any, thread: Thread, site: int, args: tuple[Any, ...]
) -> None:
    running.flush()
    group = thread.state.group(name)
    reached = group.complete(pending)
    if reached and group.local >= 0:
        thread.block.state.clocks.reach(thread.rank, group.local, reached)


class Span:
    """The bytes that an effect names in one call."""

    __slots__ = ("array", "nbytes", "offset")

    def __init__(self, array: Tracked, offset: int, nbytes: int) -> None:
        self.array = array
        self.offset = offset
        self.nbytes = nbytes


def span(op: Op, effect: Any, args: tuple[Any, ...], running: Any, site: int) -> Span | None:
    """The bytes of an access; None for none. Reports those out of bounds and misaligned."""
    names = _arguments(op)
    at = names.index(effect.param)
    array, index = args[at], int(args[at + 1])
    nbytes = effect.nbytes
    if isinstance(nbytes, str):
        nbytes = int(args[names.index(nbytes)])
    if not nbytes or not isinstance(array, Tracked):
        return None
    write = bool(getattr(effect, "write", getattr(effect, "kind", "load") != "load"))
    return _checked_span(running, op, effect, array, index, nbytes, write, site)


def _checked_span(
    running: Any, op: Op, effect: Any, array: Tracked, index: int, nbytes: int, write: bool,
    site: int,
) -> Span:  # fmt: skip
    item = array.itemsize
    offset = index * item
    deed = f"{'writes' if write else 'reads'} {nbytes} bytes with {op.name}"
    if index < 0 or offset + nbytes > array.nbytes:
        kind = "OOB_NEGATIVE" if index < 0 else "OOB_WRITE" if write else "OOB_READ"
        raise running.reports.halt(
            kind,
            f"{array.name}[{index}], {nbytes} bytes: the array has size {array.size}",
            (site, running.agent, deed),
            variable=array.name,
            index=index,
        )
    align = getattr(effect, "align", 0)
    place = array.address + offset
    # An allocation counts as aligned to anything, as a GPU's are, wherever NumPy has put it.
    if align and place % align and (place - array.region.origin) % align:
        running.reports.add(
            "MISALIGNED",
            f"{array.name}[{index}]: the address is no multiple of {align}",
            (site, running.agent, deed),
            variable=array.name,
            index=index,
        )
    return Span(array, offset, nbytes)


def _log_access(
    op: Op, effect: fx.Access, running: Any, thread: Thread, site: int, args: tuple[Any, ...]
) -> None:
    found = span(op, effect, args, running, site)
    if found is not None:
        _log(found, effect.write, site, 0)


def _log(found: Span, write: bool, site: int, second: int) -> None:
    address = found.array.shadow + found.offset
    rest = found.nbytes
    tail = write << WRITE_SHIFT | second << SECOND_SHIFT | site << SITE_SHIFT
    while rest > 0:
        size = min(rest, MAX_LOG_SIZE)
        arrays.log.append(address | (size - 1) << SIZE_SHIFT | tail)
        address += size
        rest -= size


def _log_copy(op: Op, running: Any, thread: Thread, site: int, args: tuple[Any, ...]) -> None:
    """A ``cp.async``: accesses of the thread's copy agent, at the epoch of the open group."""
    group = _own_group(thread, "cp", "a cp.async copy")
    thread.state.agents[1] = thread.block.state.clocks.agent(group.local)
    thread.state.epochs[1] = group.epoch
    group.work.append((site, None))
    for effect in op.effects or ():
        if isinstance(effect, fx.Access):
            found = span(op, effect, args, running, site)
            if found is not None:
                _log(found, effect.write, site, 1)


def _own_group(thread: Thread, name: str, what: str) -> Any:
    group = thread.state.group(name)
    if group.local < 0:
        group.local = thread.block.state.clocks.new_agent(what, thread.rank)
    return group


def _async_copy(op: Op, running: Any, thread: Thread, site: int, args: tuple[Any, ...]) -> None:
    """A bulk copy: of the thread's open group, or one that an mbarrier counts."""
    complete = next((e for e in op.effects or () if isinstance(e, fx.MbarComplete)), None)
    clocks = thread.block.state.clocks
    if complete is None:
        group = _own_group(thread, op.group or "async", f"{op.name}")
        group.work.append((site, None))
        local, epoch = group.local, group.epoch
    else:
        local, epoch = barriers.issue(op, complete, running, thread, site, args)
    clock = clocks.table[:, thread.rank, : clocks.width].copy()
    for effect in op.effects or ():
        if isinstance(effect, fx.Access):
            touch_access(running, op, effect, args, thread, clocks.agent(local), epoch, site, clock)
    if complete is not None:
        barriers.fork(thread)


def touch_access(
    running: Any, op: Op, effect: fx.Access, args: tuple[Any, ...], thread: Thread, agent: int,
    epoch: int, site: int, clock: np.ndarray, part: slice | None = None,
) -> None:  # fmt: skip
    """Check an async access at once."""
    options = {"write": effect.write, "proxy": effect.proxy == "async"}
    known = thread.state.known
    if effect.addresses is not None:
        operands = _operands(op, args)
        addresses = np.asarray(effect.addresses(operands)).astype(np.int64)
        for region, offsets in running.by_address(addresses):
            running.touch(region, offsets, 0, agent, epoch, site, clock, known, **options)
        return
    array = args[_arguments(op).index(effect.param)]
    if not isinstance(array, Tracked):
        return
    start = array.shadow - array.region.base
    if effect.footprint is not None:
        offsets, granule = _footprint(op, effect, args)
        if len(offsets) and not (0 <= offsets[0] and offsets.max() < array.nbytes):
            raise running.reports.halt(
                "OOB_WRITE" if effect.write else "OOB_READ",
                f"{array.name}: {op.name} reaches byte {int(offsets.max())} of {array.nbytes}",
                (site, running.agent, "uses"),
                variable=array.name,
                index=int(offsets.max()),
            )
        offsets = offsets if part is None else offsets[part]
    else:
        found = span(op, effect, args, running, site)
        if found is None:
            return
        bits = found.nbytes | found.offset | 16
        granule = (bits & -bits).bit_length() - 1
        offsets = np.arange(found.offset, found.offset + found.nbytes)
    bits = start | 16
    granule = min(granule, (bits & -bits).bit_length() - 1)
    running.shadow.refine(array.region, granule)
    offsets = offsets[:: 1 << array.region.shift] + start  # one byte of each granule
    running.touch(array.region, offsets, granule, agent, epoch, site, clock, known, **options)


def _operands(op: Op, args: tuple[Any, ...]) -> dict[str, Any]:
    return {
        name: getattr(value, "data", value) if isinstance(value, Tracked | Local) else value
        for name, value in zip(_arguments(op), args, strict=True)
    }


def _footprint(op: Op, effect: fx.Access, args: tuple[Any, ...]) -> tuple[np.ndarray, int]:
    """Byte offsets from the array's start, and log2 of how long their runs are."""
    numbers = tuple(
        int(np.ravel(value)[0])
        for value in args
        if not isinstance(value, Tracked | Local) and np.size(value) and _is_same(value)
    )
    key = op.name, id(effect), numbers
    offsets = _footprints.get(key) if op.scope is not Scope.WARP else None
    if offsets is None:
        assert effect.footprint is not None
        offsets = np.asarray(effect.footprint(_operands(op, args))).astype(np.int64)
        if len(_footprints) > 4096:
            _footprints.clear()
        _footprints[key] = offsets
    return offsets, _run_bits(offsets)


def _is_same(value: Any) -> bool:
    values = np.ravel(value)
    return bool((values == values[0]).all())


def _run_bits(offsets: np.ndarray) -> int:
    """log2 of the longest aligned runs, up to 16, that the offsets consist of."""
    for bits in (4, 3, 2, 1):
        length = 1 << bits
        if len(offsets) % length == 0:
            runs = offsets.reshape(-1, length)
            if not (runs[:, 0] % length).any() and (runs[:, -1] - runs[:, 0] == length - 1).all():
                return bits
    return 0


def unit_effects(running: Any, op: Op, threads: list[Thread]) -> None:
    """What an op of a warp or warpgroup does as a whole, when all its lanes have come."""
    wanted = [
        e
        for e in op.effects or ()
        if isinstance(e, fx.Access) and (e.footprint is not None or op.timing is Timing.ASYNC)
    ]
    if not wanted and op.timing is not Timing.ASYNC:
        return
    threads = sorted(threads, key=lambda thread: thread.rank)
    calls = [thread.state.call for thread in threads]
    site, first = calls[0]
    args = tuple(
        first[at] if isinstance(first[at], Tracked | Local) else np.array([c[1][at] for c in calls])
        for at in range(len(first))
    )
    clocks = threads[0].block.state.clocks
    least = clocks.least(threads)
    if op.timing is not Timing.ASYNC:
        leader = threads[0]
        agent, epoch = int(leader.state.agents[0]), int(clocks.table[0, leader.rank, leader.rank])
        for effect in wanted:
            touch_access(running, op, effect, args, leader, agent, epoch, site, least)
        return
    _product(running, op, threads, wanted, args, least, site)


def _product(
    running: Any, op: Op, threads: list[Thread], wanted: list[Any], args: tuple[Any, ...],
    least: np.ndarray, site: int,
) -> None:  # fmt: skip
    """An async product of a warpgroup: an agent of its own, or in strict mode one a warp."""
    name = op.group or "async"
    parts = 4 if running.strict_wgmma and len(threads) == 128 else 1
    state = threads[0].block.state
    clocks = state.clocks
    for part in range(parts):
        members = threads[len(threads) // parts * part : len(threads) // parts * (part + 1)]
        leader = members[0]
        key = name, leader.rank
        if key not in state.units:
            state.units[key] = clocks.new_agent(op.name, leader.rank)
        local = state.units[key]
        epoch = leader.state.group(name).epoch
        grown = np.zeros((2, clocks.width), np.int32)
        grown[:, : least.shape[1]] = least
        for number, effect in enumerate(wanted):
            size = None
            if parts > 1 and number == 0 and len(wanted) > 1:
                quarter = len(_footprint(op, effect, args)[0]) // parts
                size = slice(quarter * part, quarter * (part + 1))
            touch_access(
                running, op, effect, args, leader, clocks.agent(local), epoch, site, grown, size
            )
        for thread in members:
            _start_product(running, op, thread, name, local, epoch, site)


def _start_product(
    running: Any, op: Op, thread: Thread, name: str, local: int, epoch: int, site: int
) -> None:
    group = thread.state.group(name)
    group.local = local
    own_site, args = thread.state.call
    tiles = [value for value in args if isinstance(value, Local)]
    for tile in tiles:
        if tile.state.used > thread.state.fenced:
            running.reports.add(
                "WGMMA_FENCE",
                f"{tile.state.name} was used after the last wgmma.fence",
                (own_site, int(thread.state.agents[0]), f"starts {op.name}"),
                variable=tile.state.name,
            )
            tile.state.used = thread.state.fenced
        tile.state.product, tile.state.group = own_site, (local, epoch)
        group.work.append((own_site, tile.state))
    if not tiles:
        group.work.append((own_site, None))
    thread.block.state.clocks.bump(thread.rank)
