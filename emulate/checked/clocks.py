"""Vector clocks: what a thread knows that others have done.

A block has a matrix with a row for each of its threads and a column for each of its agents: the
threads, then async agents (a thread's ``cp.async`` copies, its copies to one mbarrier, a
warpgroup's products). An entry is the latest epoch of the column's agent that happened before. The
matrix has two planes: the second one is what the async proxy sees, and follows the first one at
proxy fences only.

Other blocks are known only through acquire and release, by `Knowledge`, which is shared between
threads and never changed.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from emulate.checked.touch import LOCAL_BITS, LOCAL_MASK
from emulate.interpreted.block import Block, Thread

_NO_INDEX = np.empty(0, np.int32)
_NO_ROWS = np.empty((0, 2, 0), np.int32)


class Knowledge:
    """What is known of other blocks: (2, width) clocks by the block's number."""

    def __init__(self, rows: dict[int, np.ndarray]) -> None:
        self.rows = rows
        self._packed: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def packed(self) -> tuple[np.ndarray, np.ndarray]:
        """The same as arrays: the row of a block or -1, and the rows."""
        if self._packed is None:
            index = np.full(max(self.rows) + 1, -1, np.int32)
            width = max(row.shape[1] for row in self.rows.values())
            table = np.zeros((len(self.rows), 2, width), np.int32)
            for number, (block, row) in enumerate(self.rows.items()):
                index[block] = number
                table[number, :, : row.shape[1]] = row
            self._packed = index, table
        return self._packed

    def past_proxy_fence(self) -> "Knowledge":
        """The same, also for the async proxy."""
        return Knowledge(
            {block: np.stack([row[0], row.max(axis=0)]) for block, row in self.rows.items()}
        )

    @staticmethod
    def merge(first: "Knowledge | None", second: "Knowledge | None") -> "Knowledge | None":
        """What one or the other knows."""
        if first is second or second is None:
            return first
        if first is None:
            return second
        rows = dict(first.rows)
        for block, row in second.rows.items():
            rows[block] = longest(rows[block], row) if block in rows else row
        return Knowledge(rows)


def longest(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The element-wise maximum of clocks whose widths may differ."""
    if first.shape[1] < second.shape[1]:
        first, second = second, first
    joined = first.copy()
    part = joined[:, : second.shape[1]]
    np.maximum(part, second, out=part)
    return joined


@dataclass(frozen=True)
class Narrow:
    """A release that only its own block sees.

    Attributes:
        block: the block.
        agent: who released.
        site: where.
        scope: for whom.
    """

    block: int
    agent: int
    site: int
    scope: str


@dataclass(frozen=True)
class Stamp:
    """A clock at one moment, to be joined by those that come after it.

    Attributes:
        own: clocks by block: the releasers' own rows.
        narrow: releases in it that not everybody sees.
    """

    own: Knowledge
    narrow: tuple[Narrow, ...] = ()

    @staticmethod
    def join(first: "Stamp | None", second: "Stamp | None") -> "Stamp | None":
        """What both carry."""
        if first is None or second is None or first is second:
            return second if first is None else first
        own = Knowledge.merge(first.own, second.own)
        assert own is not None
        return Stamp(own, (*first.narrow, *(n for n in second.narrow if n not in first.narrow)))


class Clocks:
    """The clocks of one block.

    Attributes:
        names: of async agents by local number: what messages call them.
    """

    def __init__(self, block: Block) -> None:
        self.block = block.linear
        self.threads = block.size
        self.width = block.size
        self.table = np.zeros((2, block.size, block.size + 8), np.int32)
        at = np.arange(block.size)
        self.table[0, at, at] = 1
        self.names: dict[int, tuple[str, int]] = {}

    def agent(self, rank: int) -> int:
        """The number of a thread, or of an async agent, in the launch."""
        return self.block << LOCAL_BITS | rank

    def new_agent(self, what: str, rank: int) -> int:
        """The local number of a new async agent on behalf of a thread."""
        local = self.width
        if local > LOCAL_MASK:
            raise MemoryError(f"a block has at most {LOCAL_MASK + 1} threads and async agents")
        self.width += 1
        if self.width > self.table.shape[2]:
            grown = np.zeros((2, self.threads, 2 * self.table.shape[2]), np.int32)
            grown[:, :, : self.table.shape[2]] = self.table
            self.table = grown
        self.names[local] = what, rank
        return local

    def bump(self, rank: int) -> None:
        """Begin the thread's next epoch: what it does now, those that joined do not know."""
        self.table[0, rank, rank] += 1

    def reach(self, rank: int, local: int, epoch: int) -> None:
        """A thread knows an async agent's work up to an epoch; so does its async proxy."""
        column = self.table[:, rank, local]
        np.maximum(column, epoch, out=column)

    def snapshot(self, thread: Thread, narrow: tuple[Narrow, ...] = ()) -> Stamp:
        """What the thread knows now."""
        row = self.table[:, thread.rank, : self.width].copy()
        known = thread.state.known
        rows = {self.block: row} if known is None else {**known.rows, self.block: row}
        return Stamp(Knowledge(rows), narrow)

    def acquire(self, thread: Thread, stamp: Stamp) -> None:
        """The thread knows from now on what the stamp does."""
        state: Any = thread.state
        mine = stamp.own.rows.get(self.block)
        if mine is not None:
            part = self.table[:, thread.rank, : mine.shape[1]]
            np.maximum(part, mine, out=part)
        if len(stamp.own.rows) > (mine is not None):
            others = {b: row for b, row in stamp.own.rows.items() if b != self.block}
            state.known = Knowledge.merge(state.known, Knowledge(others))

    def meet(self, threads: list[Thread], extra: list[Stamp]) -> None:
        """All threads know what any of them, or an extra stamp, knows; each begins an epoch."""
        ranks = [thread.rank for thread in threads]
        whole = len(ranks) == self.threads
        width = self.width
        joined = (self.table if whole else self.table[:, ranks])[:, :, :width].max(axis=1)
        known = None
        for thread in threads:
            known = Knowledge.merge(known, thread.state.known)
        for stamp in extra:
            mine = stamp.own.rows.get(self.block)
            if mine is not None:
                np.maximum(joined[:, : mine.shape[1]], mine, out=joined[:, : mine.shape[1]])
            others = {b: row for b, row in stamp.own.rows.items() if b != self.block}
            if others:
                known = Knowledge.merge(known, Knowledge(others))
        at = np.array(ranks)
        if whole:
            self.table[:, :, :width] = joined[:, None, :]
        else:
            self.table[:, at, :width] = joined[:, None, :]
        self.table[0, at, at] += 1
        for thread in threads:
            thread.state.known = known

    def least(self, threads: list[Thread]) -> np.ndarray:
        """What all of the threads know: (2, width)."""
        ranks = [thread.rank for thread in threads]
        return np.ascontiguousarray(self.table[:, ranks, : self.width].min(axis=1))

    def proxy_fence(self, thread: Thread) -> None:
        """The async proxy sees what the thread knows, of its own block and of others."""
        rank, known = thread.rank, thread.state.known
        np.maximum(self.table[1, rank], self.table[0, rank], out=self.table[1, rank])
        if known is not None:
            thread.state.known = known.past_proxy_fence()
        self.bump(rank)


def packed(known: Knowledge | None) -> tuple[np.ndarray, np.ndarray]:
    """Knowledge of other blocks as `emulate.checked.touch` takes it."""
    return (_NO_INDEX, _NO_ROWS) if known is None else known.packed
