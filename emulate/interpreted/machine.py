"""The machine of the interpreted engine: threads, warps, CTAs and who runs next.

A CUDA thread is a greenlet. It runs until it waits; then the next runnable one continues. Greenlets
are started by the hub only: one that another starts would inherit its recursion depth.

Without a scheduler threads run first in, first out, and go on until they wait. With one, a thread
also stops at every op that has an effect on order, and the scheduler picks among the threads that
can run and the async copies in flight.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet

from emulate.errors import CollectiveDivergence, EarlyExit, ResourceError
from emulate.interpreted.block import Barrier, Block, Dim3, Thread, Unit, make_threads
from emulate.interpreted.ready import Flight, ReadyList
from emulate.options import Options, Shape, resident_blocks
from emulate.schedule.choice import Scheduler
from emulate.trace import active
from nbmoe_kernels.device.op import Op

IDLE_ROUNDS = 1000
"""Rounds in which every sleeping thread was retried and nothing happened: a deadlock."""

GRID_BARRIER = -1
"""The number of the barrier of all blocks."""

_running: list["Machine"] = []


def machine() -> "Machine":
    """The machine of the launch that is running."""
    return _running[-1]


@contextlib.contextmanager
def running(launched: "Machine") -> Iterator[None]:
    """Inside the block, `machine` is the machine of this launch."""
    _running.append(launched)
    try:
        yield
    finally:
        _running.pop()


class StepsExhausted(Exception):
    """The launch took more steps than it may: a livelock."""


class Machine:
    """One launch.

    Attributes:
        current: the thread that runs.
        failure: the thread that raised, and what.
        names: of arrays among the launch's arguments, by id; for the timeline.
        threads: those that are alive, by id.
        steps: how often a thread was made to go on.
        timeline: is told who waits in what, and of copies, if a run is recorded.
    """

    def __init__(
        self,
        shape: Shape,
        options: Options,
        scheduler: Scheduler | None = None,
        max_steps: int | None = None,
    ) -> None:
        self.shape = shape
        self.options = options
        self.block_dim = Dim3(shape.block)
        self.grid_dim = Dim3(shape.grid)
        self.current: Thread
        self.failure: tuple[Thread, BaseException] | None = None
        self.most_alive = 0
        self.names: dict[int, str] = {}
        self.threads: dict[int, Thread] = {}
        self.steps = 0
        self.scheduled = scheduler is not None
        size_x, size_y, _ = shape.block
        self._thread_idx = [
            Dim3((rank % size_x, rank // size_x % size_y, rank // (size_x * size_y)))
            for rank in range(shape.threads)
        ]
        self._max_steps = max_steps
        self._live = 0
        self._most, self._window = resident_blocks(options, shape)
        self._next_block = 0
        self._blocks = shape.blocks
        self._ready = ReadyList(scheduler)
        self._grid_barrier = Barrier(GRID_BARRIER)
        self._chosen: Thread | None = None
        self._sleeping: list[Thread] = []
        self._polling: list[Thread] = []
        self._progress = False
        self._idle = 0
        self.timeline = active()
        self._hub = getcurrent()

    def run(self, body: Callable[[], None]) -> bool:
        """Run the launch; False is a deadlock, and ``failure`` tells of an exception."""
        with running(self):
            return self._run(body)

    def _run(self, body: Callable[[], None]) -> bool:
        while self.failure is None:
            try:
                if self._chosen is None and self._may_start_block():
                    self._start_block(body)
                    continue
                thread, self._chosen = self._chosen or self._take(), None
                if thread is None:
                    if self._retry() or self._land_next():
                        continue
                    return not self.threads
                self._count_step()
            except Exception as error:
                self.failure = (self.current, error)
                break
            self.current = thread
            thread.run.switch()
        return True

    def _take(self) -> Thread | None:
        """The thread that goes on; copies that are picked before it land."""
        while True:
            picked = self._ready.take()
            if not isinstance(picked, Flight):
                return picked
            self._land(picked)

    def _retry(self) -> bool:
        """Make threads that ask again and again runnable, if there is a point in it."""
        if not self._polling and not self._sleeping:
            return False
        if self._progress:
            self._idle = 0
        elif self._sleeping and not self._ready.has_flights:
            self._idle += 1
            if self._idle > IDLE_ROUNDS:
                return False
        else:
            return False
        self._progress = False
        self._ready.extend(self._polling)
        self._ready.extend(self._sleeping)
        self._polling, self._sleeping = [], []
        return True

    def _land_next(self) -> bool:
        flight = self._ready.take_flight()
        if flight is None:
            return False
        self.current = flight.thread
        self._land(flight)
        return True

    def _land(self, flight: Flight) -> None:
        flight.land()
        self._progress = True

    def close(self) -> None:
        """End the greenlets of threads that did not finish."""
        for thread in self.threads.values():
            if thread.run:
                thread.run.throw(GreenletExit)
        self.threads.clear()

    def wait(self, what: str) -> None:
        """Let others run until somebody wakes this thread."""
        self._progress = True  # what it did before may be what others wait for
        self._rest(what)

    def _rest(
        self,
        what: str,
        is_ready: Callable[[], Any] | None = None,
        about: dict[str, str] | None = None,
    ) -> None:
        thread = self.current
        thread.waits_in = what
        if self.timeline is not None:
            self.timeline.waits(thread, what, about or {})
        self._pass_on()
        while is_ready is not None and not is_ready():
            self._polling.append(thread)
            self._pass_on()
        thread.waits_in = ""
        if self.timeline is not None:
            self.timeline.goes_on(thread)

    def _pass_on(self) -> None:
        thread = self.current
        following = self._take()
        if following is thread:
            self._count_step()
            return
        # A greenlet is true once it has started.
        if following is not None and following.run:
            self._count_step()
            self.current = following
            following.run.switch()
        else:
            self._chosen = following
            self._hub.switch()

    def _count_step(self) -> None:
        self.steps += 1
        if self._max_steps is not None and self.steps > self._max_steps:
            raise StepsExhausted

    def pause(self) -> None:
        """A point at which a scheduler may let others go first.

        A rendezvous needs none: nobody sees an arrival but by what its last one sets free.
        """
        if self.scheduled and self._ready:
            self._ready.append(self.current)
            self._pass_on()

    def wake(self, threads: list[Thread]) -> None:
        """Make threads runnable."""
        if self.timeline is not None:
            self.timeline.wakes(threads)
        self._ready.extend(threads)
        self._progress = True

    def changed(self) -> None:
        """Something happened that a waiting thread may wait for."""
        self._progress = True

    def sleep(self) -> None:
        """Let others run; come back when they wait too."""
        self._sleeping.append(self.current)
        self._rest("nanosleep")

    def poll(self, is_ready: Callable[[], Any], what: str, about: dict[str, str]) -> None:
        """Wait until ``is_ready``, which is asked again when something has changed."""
        self.pause()
        if not is_ready():
            self._progress = True  # what it did before may be what others wait for
            self._polling.append(self.current)
            self._rest(what, is_ready, about)
        self._progress = True

    def fly(self, land: Callable[[], None]) -> Flight:
        """Start an async copy of the current thread, which lands when the scheduler says so."""
        thread = self.current
        flight = Flight(thread, land, thread.block.linear, thread.rank, thread.flights)
        thread.flights += 1
        if not self.scheduled and self.options.copies == "eager":
            self._land(flight)
        else:
            self._ready.launch(flight)
        return flight

    def force(self, flight: Flight) -> None:
        """Land a copy now if it has not."""
        if self._ready.withdraw(flight):
            self._land(flight)

    def barrier(self, vote: int, what: str = "syncthreads") -> int:
        """Wait for all threads of the block; the sum of their votes."""
        block = self.current.block
        if block.alive != block.size:
            raise self.exited(block, what)
        return self.meet(block.barrier, block.size, vote, what)

    def exited(self, block: Block, what: str) -> Exception:
        """What is wrong with a block barrier of a block that is no longer whole."""
        return EarlyExit(f"{what} in a block of which a thread has exited")

    def named_barrier(self, number: int, count: int, waits: bool, what: str) -> None:
        """Arrive at a named barrier of ``count`` threads, and wait for the others if ``waits``."""
        barrier = self.current.block.named_barrier(number)
        self.meet(barrier, count, 0, what, waits=waits)

    def grid_barrier(self) -> None:
        """Wait for all threads of the grid."""
        if self._most < self._blocks:
            raise ResourceError(
                f"a grid barrier needs all {self._blocks} blocks alive at one time, and only "
                f"{self._most} can be"
            )
        self.meet(self._grid_barrier, self._blocks * self.shape.threads, 0, "grid barrier")

    def meet(
        self, barrier: Barrier, count: int, vote: int, what: str, *, waits: bool = True
    ) -> int:
        """Arrive at a barrier that ``count`` threads complete; the sum of the votes."""
        thread = self.current
        self.arrive(barrier, thread, count, waits)
        barrier.votes += vote
        barrier.arrived += 1
        if barrier.arrived < count:
            if waits:
                barrier.waiting.append(thread)
                self.wait(what)
                return thread.result
            return 0
        self.complete(barrier)
        waiting, result = barrier.reset()
        for other in waiting:
            other.result = result
        self.wake(waiting)
        return result

    def arrive(self, barrier: Barrier, thread: Thread, count: int, waits: bool) -> None:
        """Called for every arrival; for engines that check."""

    def complete(self, barrier: Barrier) -> None:
        """Called when the last thread has arrived; for engines that check."""

    def joins(self, op: Op, unit: Unit) -> None:
        """The current thread is about to join an op of its warp or warpgroup."""
        meeting = unit.meeting
        if meeting is not None and meeting.op is not op:
            raise CollectiveDivergence(
                f"{op.name} is called while other lanes of the warp wait in {meeting.op.name}"
            )

    def collective(self, op: Op, threads: list[Thread]) -> None:
        """Called when all lanes of a unit are in an op; for engines that check."""

    def _may_start_block(self) -> bool:
        if self._next_block == self._blocks or self._live >= self._most:
            return False
        return self._live < self._window or not self._ready.has_threads

    def _start_block(self, body: Callable[[], None]) -> None:
        grid_x, grid_y, _ = self.shape.grid
        linear = self._next_block
        self._next_block += 1
        self._live += 1
        self.most_alive = max(self.most_alive, self._live)
        index = (linear % grid_x, linear // grid_x % grid_y, linear // (grid_x * grid_y))
        block = Block(index, linear, self.shape.threads, self.shape.shared_bytes)
        self.block_starts(block)
        for thread in make_threads(block, self._thread_idx):
            self.prepare(thread)
            thread.run = greenlet(lambda thread=thread: self._live_thread(thread, body))
            self.threads[id(thread)] = thread
            self._ready.append(thread)

    def block_starts(self, block: Block) -> None:
        """Called before a CTA's first thread runs; for engines that check."""

    def prepare(self, thread: Thread) -> None:
        """Called for each thread before it runs; for engines that check."""

    def block_ends(self, block: Block) -> None:
        """Called after a CTA's last thread; for engines that check."""

    def thread_ends(self, thread: Thread) -> None:
        """Called when a thread's body has returned."""
        for copies in (*thread.open_groups.values(), *thread.waiting_groups()):
            for copy in copies:
                copy()

    def _live_thread(self, thread: Thread, body: Callable[[], None]) -> None:
        try:
            # Arithmetic wraps and makes infinities and NaN silently, as on the GPU. The setting is
            # a context variable, and every greenlet has its own context.
            with np.errstate(all="ignore"):
                body()
                self.thread_ends(thread)
                self._leave(thread)
        except GreenletExit:
            return
        except BaseException as error:
            self.failure = (self.current, error)

    def _leave(self, thread: Thread) -> None:
        block = thread.block
        if block.barrier.waiting:
            raise self.left(thread)
        del self.threads[id(thread)]
        block.alive -= 1
        thread.warp.alive -= 1
        thread.group.alive -= 1
        self._progress = True
        if block.alive == 0:
            self._live -= 1
            self.block_ends(block)

    def left(self, thread: Thread) -> Exception:
        """What is wrong when a thread exits while others of its block wait in syncthreads."""
        return EarlyExit("a thread exits while others of its block wait in syncthreads")
