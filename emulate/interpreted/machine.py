"""The machine of the interpreted engine: threads, warps, CTAs and who runs next.

A CUDA thread is a greenlet. It runs until it waits; then the next runnable one continues. Greenlets
are started by the hub only: one that another starts would inherit its recursion depth.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet

from emulate.errors import EarlyExit
from emulate.options import Options, Shape, resident_blocks

WARP_LANES = 32
IDLE_ROUNDS = 1000
"""Rounds in which every sleeping thread was retried and nothing happened: a deadlock."""

Index = tuple[int, int, int]

_running: list["Machine"] = []


def machine() -> "Machine":
    """The machine of the launch that is running."""
    return _running[-1]


class Dim3:
    """Three int32, as `numba.cuda` types its indices."""

    __slots__ = ("index", "x", "y", "z")

    def __init__(self, index: Index) -> None:
        self.index = index
        self.x, self.y, self.z = (np.int32(i) for i in index)


class Warp:
    """32 lanes; ``meeting`` is the collective that some of them are in."""

    __slots__ = ("lanes", "meeting")

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.meeting: Any = None


class Block:
    """A CTA."""

    def __init__(self, index: Index, threads: int, shared_bytes: int) -> None:
        self.index = index
        self.block_idx = Dim3(index)
        self.size = threads
        self.alive = threads
        self.arrived: list[Thread] = []
        self.votes = 0
        self.result = 0
        self.static_arrays: dict[Any, np.ndarray] = {}
        self.dynamic = shared_memory(shared_bytes)


def shared_memory(nbytes: int) -> np.ndarray:
    """Shared memory of a CTA, aligned to 1024, filled with 0xFF so that unwritten bytes show."""
    memory = np.full(nbytes + 1024, 0xFF, np.uint8)
    skip = -memory.ctypes.data % 1024
    return memory[skip : skip + nbytes]


class Thread:
    """A CUDA thread."""

    __slots__ = (
        "block",
        "copies",
        "groups",
        "lane",
        "rank",
        "run",
        "thread_idx",
        "waits_in",
        "warp",
    )

    def __init__(self, block: Block, thread_idx: Dim3, rank: int, warp: Warp) -> None:
        self.block = block
        self.thread_idx = thread_idx
        self.rank = rank
        self.lane = rank % WARP_LANES
        self.warp = warp
        self.waits_in = ""
        self.copies: list[Callable[[], object]] = []
        self.groups: list[list[Callable[[], object]]] = []
        self.run: greenlet


class Machine:
    """One launch."""

    def __init__(self, shape: Shape, options: Options) -> None:
        self.shape = shape
        self.options = options
        self.block_dim = Dim3(shape.block)
        self.grid_dim = Dim3(shape.grid)
        size_x, size_y, _ = shape.block
        self._thread_idx = [
            Dim3((rank % size_x, rank // size_x % size_y, rank // (size_x * size_y)))
            for rank in range(shape.threads)
        ]
        self.current: Thread
        self.failure: tuple[Thread, BaseException] | None = None
        self.most_alive = 0
        self.threads: dict[int, Thread] = {}
        self._live = 0
        self._most, self._window = resident_blocks(options, shape)
        self._next_block = 0
        self._blocks = shape.blocks
        self._ready: deque[Thread] = deque()
        self._sleeping: list[Thread] = []
        self._progress = False
        self._random = None if options.seed is None else random.Random(options.seed)
        self._hub = getcurrent()

    def run(self, body: Callable[[], None]) -> bool:
        """Run the launch; False is a deadlock, and ``failure`` tells of an exception."""
        _running.append(self)
        try:
            return self._run(body)
        finally:
            _running.pop()

    def _run(self, body: Callable[[], None]) -> bool:
        idle = 0
        while self.failure is None:
            if self._may_start_block():
                self._start_block(body)
                continue
            thread = self._take()
            if thread is not None:
                self.current = thread
                thread.run.switch()
                continue
            if not self.threads:
                return True
            if not self._sleeping:
                return False
            idle = 0 if self._progress else idle + 1
            self._progress = False
            if idle > IDLE_ROUNDS:
                return False
            self._ready.extend(self._sleeping)
            self._sleeping.clear()
        return True

    def close(self) -> None:
        """End the greenlets of threads that did not finish."""
        for thread in self.threads.values():
            if thread.run:
                thread.run.throw(GreenletExit)
        self.threads.clear()

    def wait(self, what: str) -> None:
        """Let others run until somebody wakes this thread."""
        thread = self.current
        thread.waits_in = what
        ready = self._ready
        # A greenlet is true once it has started.
        if ready and ready[0].run and self._random is None:
            self.current = ready.popleft()
            self.current.run.switch()
        else:
            self._hub.switch()
        thread.waits_in = ""

    def wake(self, threads: list[Thread]) -> None:
        """Make threads runnable."""
        self._ready.extend(threads)
        self._progress = True

    def sleep(self) -> None:
        """Let others run; come back when they wait too."""
        self._sleeping.append(self.current)
        self.wait("nanosleep")

    def barrier(self, vote: int) -> int:
        """Wait for all threads of the block; the sum of their votes."""
        block = self.current.block
        if block.alive != block.size:
            raise EarlyExit("syncthreads in a block of which a thread has exited")
        block.votes += vote
        if len(block.arrived) + 1 == block.size:
            waiting, block.arrived = block.arrived, []
            block.result, block.votes = block.votes, 0
            self.wake(waiting)
        else:
            block.arrived.append(self.current)
            self.wait("syncthreads")
        return block.result

    def _may_start_block(self) -> bool:
        if self._next_block == self._blocks or self._live >= self._most:
            return False
        return self._live < self._window or not self._ready

    def _start_block(self, body: Callable[[], None]) -> None:
        grid_x, grid_y, _ = self.shape.grid
        linear = self._next_block
        self._next_block += 1
        self._live += 1
        self.most_alive = max(self.most_alive, self._live)
        index = (linear % grid_x, linear // grid_x % grid_y, linear // (grid_x * grid_y))
        count = self.shape.threads
        block = Block(index, count, self.shape.shared_bytes)
        warps = [Warp(min(count - first, WARP_LANES)) for first in range(0, count, WARP_LANES)]
        for rank in range(count):
            thread = Thread(block, self._thread_idx[rank], rank, warps[rank // WARP_LANES])
            thread.run = greenlet(lambda thread=thread: self._live_thread(thread, body))
            self.threads[id(thread)] = thread
            self._ready.append(thread)

    def _live_thread(self, thread: Thread, body: Callable[[], None]) -> None:
        try:
            # Arithmetic wraps and makes infinities and NaN silently, as on the GPU. The setting is
            # a context variable, and every greenlet has its own context.
            with np.errstate(all="ignore"):
                body()
                for copy in [*(c for group in thread.groups for c in group), *thread.copies]:
                    copy()
                self._leave(thread)
        except GreenletExit:
            return
        except BaseException as error:
            self.failure = (thread, error)

    def _leave(self, thread: Thread) -> None:
        block = thread.block
        if block.arrived:
            raise EarlyExit("a thread exits while others of its block wait in syncthreads")
        del self.threads[id(thread)]
        block.alive -= 1
        self._progress = True
        if block.alive == 0:
            self._live -= 1

    def _take(self) -> Thread | None:
        if not self._ready:
            return None
        if self._random is not None:
            chosen = self._random.randrange(len(self._ready))
            self._ready[0], self._ready[chosen] = self._ready[chosen], self._ready[0]
        return self._ready.popleft()
