"""The machine of the checked engine: clocks follow what orders threads, accesses are checked."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from emulate.checked import arrays
from emulate.checked.clocks import Clocks, Knowledge, Stamp, packed
from emulate.checked.reports import Reports
from emulate.checked.shadow import READERS, STRICT_READERS, Region, Shadow
from emulate.checked.sites import find_site, site_here, site_of_function
from emulate.checked.state import BlockState, ThreadState
from emulate.checked.touch import LOCAL_BITS, OUT_COLUMNS, flush, touch
from emulate.interpreted.block import Barrier, Block, Thread, Unit
from emulate.interpreted.machine import Machine, StepsExhausted
from emulate.interpreted.ready import Flight
from emulate.options import Options, Shape
from emulate.schedule.choice import Scheduler
from nbmoe_kernels.device.op import Op

MAX_REPORTS = 32
"""Reports of one check that are kept; the others would be of the same lines."""
SPIN_LIMIT = 64
"""Full logs after which a thread that has not waited in between is taken to spin for ever."""


class CheckedMachine(Machine, arrays.Hooks):
    """One checked launch.

    Attributes:
        shadow: shadow memory.
        reports: what was found.
        strict_wgmma: each warp of a warpgroup waits for its own part of a product.
        accesses: checked so far.
    """

    def __init__(
        self,
        shape: Shape,
        options: Options,
        scheduler: Scheduler,
        max_steps: int,
        *,
        strict_wgmma: bool = False,
        ignore: frozenset[str] = frozenset(),
        unit_effects: Callable[[Any, Op, list[Thread]], None],
    ) -> None:
        super().__init__(shape, options, scheduler, max_steps)
        self.shadow = Shadow(STRICT_READERS if strict_wgmma else READERS)
        self.reports = Reports(self.shadow, ignore)
        self.strict_wgmma = strict_wgmma
        self.accesses = 0
        self.atomics: dict[int, Any] = {}
        self.unit_effects = unit_effects
        self.real: list[Region] = []
        self.previous: Stamp | None = None
        self._out = np.zeros((MAX_REPORTS, OUT_COLUMNS), np.int64)

    # The previous kernel.

    def occupy(self, region: Region, function: Any) -> None:
        """The previous kernel may still use a region; only who waits for its end knows more."""
        number = self.shape.blocks
        if self.previous is None:
            self.reports.previous = number
            self.previous = Stamp(Knowledge({number: np.ones((2, 1), np.int32)}))
        self.shadow.occupy(region, number << LOCAL_BITS, 1, site_of_function(function.__code__))

    def wait_for_previous(self, thread: Thread) -> None:
        """The thread knows that the previous kernel has ended."""
        if self.previous is not None:
            thread.block.state.clocks.acquire(thread, self.previous)

    # Checks of accesses.

    def flush(self) -> None:
        """Check what the current thread has accessed since the last time."""
        log = arrays.log
        if not log:
            return
        entries = np.array(log, np.int64)
        log.clear()
        self.accesses += len(entries)
        thread = self.current
        state: ThreadState = thread.state
        clocks = thread.block.state.clocks
        clock = clocks.table[:, thread.rank, : clocks.width].copy()
        state.epochs[0] = clock[0, thread.rank]
        index, known = packed(state.known)
        shadow, start = self.shadow, 0
        while start >= 0:
            count, start = flush(
                entries, start, shadow.rows, shadow.pages, shadow.regions, state.agents,
                state.epochs, clock, index, known, self._out,
            )  # fmt: skip
            if count:
                self._report_log(count, state, entries)
            if start >= 0:
                self._refine(int(entries[start]))

    def _report_log(self, count: int, state: ThreadState, entries: np.ndarray) -> None:
        agent, copies = (int(a) for a in state.agents)
        local = copies if copies >= 0 else agent
        sites = {site for site, _ in state.groups["cp"].work} if "cp" in state.groups else set()
        self.reports.races(
            self._out,
            count,
            lambda row: local if int(row[4]) in sites else agent,
            float_atomic=False,
        )

    def _refine(self, entry: int) -> None:
        address = entry & ((1 << 38) - 1)
        size = ((entry >> 38) & 31) + 1
        region = self.shadow.find(address)
        bits = (address - region.base) | size
        self.shadow.refine(region, (bits & -bits).bit_length() - 1)

    def touch(
        self,
        region: Region,
        offsets: np.ndarray,
        granule: int,
        agent: int,
        epoch: int,
        site: int,
        clock: np.ndarray,
        known: Any,
        *,
        write: bool,
        proxy: bool = False,
        atomic: bool = False,
        float_atomic: bool = False,
        is_thread: bool = False,
    ) -> None:
        """Check an access of an agent to granules of a region, named by their byte offsets."""
        self.shadow.refine(region, granule)
        index, rows = packed(known)
        self.accesses += len(offsets)
        count = touch(
            (offsets >> region.shift) + region.row,
            region.base - (region.row << region.shift),
            region.shift,
            self.shadow.rows,
            write,
            atomic,
            proxy,
            agent,
            epoch,
            is_thread,
            site,
            clock,
            index,
            rows,
            self._out,
        )
        if count:
            self.reports.races(self._out, count, lambda row: agent, float_atomic=float_atomic)

    def by_address(self, addresses: np.ndarray) -> Iterator[tuple[Region, np.ndarray]]:
        """Real addresses in global memory as offsets in regions; unknown memory is left out."""
        for region in self.real:
            offsets = addresses - region.memory
            inside = offsets[(offsets >= 0) & (offsets < region.nbytes)]
            if len(inside):
                yield region, inside

    # What arrays ask for.

    @property
    def agent(self) -> int:
        """The current thread's."""
        thread = self.current
        return thread.block.linear << LOCAL_BITS | thread.rank

    def out_of_bounds(self, array: Any, index: Any, write: bool) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        what = "OOB_WRITE" if write else "OOB_READ"
        if any(part < 0 for part in parts):
            what = "OOB_NEGATIVE"
        name = getattr(array, "name", None) or array.state.name
        shown = ", ".join(str(part) for part in parts)
        shape = array.shape if array.ndim != 1 else array.size
        deed = "writes" if write else "reads"
        raise self.reports.halt(
            what,
            f"{name}[{shown}]: the array has {'shape' if array.ndim != 1 else 'size'} {shape}",
            (site_here(), self.agent, deed),
            variable=name,
            index=index,
        )

    def uninitialised(self, array: Any, index: Any, where: str) -> None:
        parts = index if isinstance(index, tuple) else (index,)
        name = array.state.name
        self.reports.add(
            "UNINIT_READ",
            f"{name}[{', '.join(str(part) for part in parts)}]: nobody has written it",
            (site_here(), self.agent, "reads"),
            variable=name,
            index=index,
        )

    def pending(self, array: Any) -> None:
        state = array.state
        self.reports.add(
            "ASYNC_UNWAITED",
            f"{state.name}: an async product still works on it",
            (state.product, self.agent, "starts a product on"),
            (site_here(), self.agent, "uses"),
            variable=state.name,
        )
        state.product = None

    def log_is_full(self) -> None:
        self.flush()
        state: ThreadState = self.current.state
        state.spins += 1
        if state.spins > SPIN_LIMIT:
            raise StepsExhausted
        self.pause()

    def _rest(self, what: str, *wait: Any) -> None:
        self.current.state.spins = 0
        super()._rest(what, *wait)

    # What orders threads.

    def fly(self, land: Callable[[], None]) -> Flight:
        state: ThreadState = self.current.state
        landing, state.landing = state.landing, None

        def land_and_count() -> None:
            self.flush()
            land()
            if landing is not None:
                landing()

        return super().fly(land_and_count)

    def block_starts(self, block: Block) -> None:
        clocks = Clocks(block)
        block.state = BlockState(clocks)
        self.reports.clocks[block.linear] = clocks
        if block.dynamic.size:
            self.add_shared(block, "dynamic shared memory", block.dynamic)

    def add_shared(self, block: Block, name: str, memory: np.ndarray) -> Region:
        """Shadow memory of a part of a block's shared memory."""
        region = self.shadow.add(
            name, memory.ctypes.data, memory.nbytes, 16, init=False, shared=True
        )
        block.state.regions.append(region)
        return region

    def block_ends(self, block: Block) -> None:
        for mbar in block.state.mbars.values():
            for _, site, agent in mbar.unseen:
                self.reports.add(
                    "ASYNC_UNWAITED",
                    "the block ends before anybody has waited for this copy",
                    (site, agent, "copies"),
                )
        for region in block.state.regions:
            self.shadow.release(region)
        block.state.clocks.table = np.empty((2, 0, 0), np.int32)

    def thread_ends(self, thread: Thread) -> None:
        self.flush()
        for name, group in thread.state.groups.items():
            for site in group.unwaited:
                self.reports.add(
                    "ASYNC_UNWAITED",
                    f"the thread exits before it has waited for this ({name})",
                    (site, self.agent, "starts async work"),
                )
        super().thread_ends(thread)
        for unit in (thread.warp, thread.group):
            if unit.meeting is not None:
                raise self._half_collective(unit, "has exited")

    def _half_collective(self, unit: Unit, why: str) -> Exception:
        meeting = unit.meeting
        first = meeting.threads[0]
        return self.reports.halt(
            "COLLECTIVE_DIVERGENT",
            f"{meeting.op.name} needs {unit.lanes} lanes, and one {why}",
            (first.state.call[0], first.state.agents[0], f"waits in {meeting.op.name}"),
        )

    def _pass_on(self) -> None:
        self.flush()
        super()._pass_on()

    def joins(self, op: Op, unit: Unit) -> None:
        meeting, thread = unit.meeting, self.current
        site = thread.state.call[0]
        if unit.alive < unit.lanes:
            raise self.reports.halt(
                "COLLECTIVE_DIVERGENT",
                f"{op.name} needs {unit.lanes} lanes, and one has exited",
                (site, self.agent, f"calls {op.name}"),
            )
        if meeting is None or not meeting.threads:
            return
        first = meeting.threads[0]
        other = first.state.call[0]
        if meeting.op is op and (other == site or not _is_elsewhere(op, other, site)):
            return
        raise self.reports.halt(
            "COLLECTIVE_DIVERGENT",
            f"lanes of a warp are in {meeting.op.name} and in {op.name}",
            (other, int(first.state.agents[0]), f"waits in {meeting.op.name}"),
            (site, self.agent, f"calls {op.name}"),
        )

    def collective(self, op: Op, threads: list[Thread]) -> None:
        self.flush()
        clocks = threads[0].block.state.clocks
        if "bar.warp.sync" in op.ptx:
            clocks.meet(threads, [])
        elif "wgmma.fence" in op.ptx:
            for thread in threads:
                thread.state.fenced = arrays.ticks[0]
            arrays.ticks[0] += 1
        self.unit_effects(self, op, threads)

    def arrive(self, barrier: Barrier, thread: Thread, count: int, waits: bool) -> None:
        self.flush()
        site = thread.state.call[0]
        agent = int(thread.state.agents[0])
        if barrier.record:
            other, other_site, other_count, _ = barrier.record[0]
            block_wide = (
                barrier.number == 0
                and site != other_site
                and find_site(site) != find_site(other_site)
            )
            if block_wide or other_count != count:
                what = "threads of a block are in different barriers"
                if other_count != count:
                    what = f"barrier {barrier.number}: of {other_count} threads and of {count}"
                raise self.reports.halt(
                    "BARRIER_DIVERGENT",
                    what,
                    (other_site, int(other.state.agents[0]), "arrives"),
                    (site, agent, "arrives"),
                )
        stamp: Stamp | None = None
        if not waits:
            clocks = thread.block.state.clocks
            stamp = clocks.snapshot(thread)
            clocks.bump(thread.rank)
        barrier.record.append((thread, site, count, stamp))

    def complete(self, barrier: Barrier) -> None:
        waiting = [thread for thread, _, _, stamp in barrier.record if stamp is None]
        stamps = [stamp for _, _, _, stamp in barrier.record if stamp is not None]
        if waiting:
            waiting[0].block.state.clocks.meet(waiting, stamps)

    def exited(self, block: Block, what: str) -> Exception:
        return self.reports.halt(
            "BARRIER_EXITED",
            f"{block.size - block.alive} threads of block {block.linear} have exited before it",
            (self.current.state.call[0], self.agent, "arrives at a barrier"),
        )

    def left(self, thread: Thread) -> Exception:
        waiting, site, _, _ = thread.block.barrier.record[0]
        return self.reports.halt(
            "BARRIER_EXITED",
            f"block {thread.block.linear} thread {thread.rank} exits while others wait for it",
            (site, int(waiting.state.agents[0]), "waits in a barrier"),
        )

    def prepare(self, thread: Thread) -> None:
        """Give a thread its state."""
        agent = thread.block.linear << LOCAL_BITS | thread.rank
        thread.state = ThreadState(agent)


def _is_elsewhere(op: Op, first: int, second: int) -> bool:
    """Whether an op that a warp must execute as one instruction is called from two lines."""
    return ".aligned" in op.ptx and find_site(first) != find_site(second)
