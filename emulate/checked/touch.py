"""Compiled checks of accesses against shadow memory.

A shadow row describes one granule of memory:

    0  agent of the last write, -1 for none       1  its epoch       2  its site
    3  flags: INIT, ASYNC (last write by the async proxy), ATOMIC (last write atomic)
    4+ readers since that write, (agent, epoch, site | ATOMIC_READ) each; agent -1 is a free slot

An agent is ``block << LOCAL_BITS | local``: local numbers below the block's size are its threads,
the others its async agents. An access happens after another one if the accessing thread's clock has
reached the other's epoch: in its own block's row, or in what it knows of the other block.

Rows have room for a few readers only. When all slots hold readers that the newest one is not
ordered after, the last slot is replaced: a race with one of many readers may then be seen against
another one of them, or in another schedule.
"""

# Compiled functions are typed by Numba, not by annotations.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import numpy as np
from numba import njit

LOCAL_BITS = 12
LOCAL_MASK = (1 << LOCAL_BITS) - 1
INIT, ASYNC, ATOMIC = 1, 2, 4
ATOMIC_READ = 1 << 30
SITE_MASK = ATOMIC_READ - 1

RAW, WAR, WAW, PROXY, UNINIT, CONCURRENT = 1, 2, 3, 4, 5, 6
"""Kinds of what `flush` and `touch` report; CONCURRENT is of two unordered atomics."""

PAGE_BITS = 12
# A log entry, from bit 0 on: address, size - 1, is a write, belongs to the second agent, site.
ADDRESS_BITS = 38
SIZE_SHIFT = ADDRESS_BITS
WRITE_SHIFT = SIZE_SHIFT + 5
SECOND_SHIFT = WRITE_SHIFT + 1
SITE_SHIFT = SECOND_SHIFT + 1
MAX_LOG_SIZE = 32

REGION_BASE, REGION_ROW, REGION_SHIFT = 0, 1, 2
OUT_COLUMNS = 5
"""Columns of a report: kind, address, other agent, other site, site."""


@njit(inline="always", cache=True)
def _knows(agent, epoch, plane, block, clock, index, known):
    """Whether the clock has reached the epoch of an agent."""
    other = agent >> LOCAL_BITS
    local = agent & LOCAL_MASK
    if other == block:
        return clock[plane, local] >= epoch
    if other >= index.shape[0]:
        return False
    row = index[other]
    if row < 0 or local >= known.shape[2]:
        return False
    return known[row, plane, local] >= epoch


@njit(inline="always", cache=True)
def _report(out, count, kind, address, agent, other_site, site):
    if count < out.shape[0]:
        out[count, 0] = kind
        out[count, 1] = address
        out[count, 2] = agent
        out[count, 3] = other_site & SITE_MASK
        out[count, 4] = site
        return count + 1
    return count


@njit(cache=True)
def _visit(
    row, address, write, atomic, proxy, agent, epoch, is_thread, site, block, clock, index, known,
    out, count,
):  # fmt: skip
    """Check one granule and record the access; the new number of reports."""
    writer, flags = row[0], row[3]
    if not write and not flags & INIT:
        # Nobody can be late with a write that there is not: the reader is not kept.
        return _report(out, count, UNINIT, address, writer, row[2], site)
    if writer >= 0 and not (is_thread and writer == agent):
        if not _knows(writer, row[1], 0, block, clock, index, known):
            if not (atomic and flags & ATOMIC):
                kind = WAW if write else RAW
                count = _report(out, count, kind, address, writer, row[2], site)
            elif write:
                count = _report(out, count, CONCURRENT, address, writer, row[2], site)
    if proxy and writer >= 0 and not flags & ASYNC:
        if not _knows(writer, row[1], 1, block, clock, index, known):
            if _knows(writer, row[1], 0, block, clock, index, known) or writer == agent:
                count = _report(out, count, PROXY, address, writer, row[2], site)
    if write:
        for k in range(4, row.shape[0], 3):
            reader = row[k]
            if reader < 0:
                continue
            if not (is_thread and reader == agent) and not (atomic and row[k + 2] & ATOMIC_READ):
                if not _knows(reader, row[k + 1], 0, block, clock, index, known):
                    count = _report(out, count, WAR, address, reader, row[k + 2], site)
            row[k] = -1
        row[0] = agent
        row[1] = epoch
        row[2] = site
        row[3] = INIT | (ASYNC if proxy else 0) | (ATOMIC if atomic else 0)
        return count
    slot = row.shape[0] - 3
    for k in range(4, row.shape[0], 3):
        reader = row[k]
        if reader < 0 or reader == agent:
            slot = k
            break
        if _knows(reader, row[k + 1], 0, block, clock, index, known):
            slot = k
            break
    row[slot] = agent
    row[slot + 1] = epoch
    row[slot + 2] = site | (ATOMIC_READ if atomic else 0)
    return count


@njit(cache=True)
def flush(
    log, start, rows, pages, regions, agents, epochs, clock, index, known, out
):  # fmt: skip
    """Check the accesses of a thread since it last did something that orders.

    Args:
        log: entries, see above.
        start: the first one to look at.
        rows, pages, regions: shadow memory.
        agents, epochs: of the thread itself, and of its ``cp.async`` copies.
        clock: (2, width) what the thread knows of its own block; plane 1 is the async proxy's view.
        index, known: what it knows of other blocks: row of a block or -1, (rows, 2, width).
        out: reports.

    Returns:
        The number of reports, and the entry whose region needs finer granules or -1.
    """
    count = 0
    block = agents[0] >> LOCAL_BITS
    for at in range(start, log.shape[0]):
        entry = log[at]
        address = entry & ((1 << ADDRESS_BITS) - 1)
        size = ((entry >> SIZE_SHIFT) & 31) + 1
        write = (entry >> WRITE_SHIFT) & 1 == 1
        second = (entry >> SECOND_SHIFT) & 1
        site = np.int32(entry >> SITE_SHIFT)
        region = regions[pages[address >> PAGE_BITS]]
        offset = address - region[REGION_BASE]
        shift = region[REGION_SHIFT]
        if (offset | size) & ((1 << shift) - 1):
            return count, at
        first = region[REGION_ROW] + (offset >> shift)
        for row in range(first, first + (size >> shift)):
            count = _visit(
                rows[row], address + ((row - first) << shift), write, False, False,
                agents[second], epochs[second], second == 0, site, block, clock, index, known,
                out, count,
            )  # fmt: skip
    return count, -1


@njit(cache=True)
def touch(
    granules, address, shift, rows, write, atomic, proxy, agent, epoch, is_thread, site, clock,
    index, known, out,
):  # fmt: skip
    """Check one access to the granules of given rows; the number of reports.

    Args:
        granules: rows of shadow memory.
        address: what row 0 stands for.
    """
    count = 0
    block = agent >> LOCAL_BITS
    for row in granules:
        count = _visit(
            rows[row], address + (row << shift), write, atomic, proxy, agent, epoch, is_thread,
            site, block, clock, index, known, out, count,
        )  # fmt: skip
    return count
