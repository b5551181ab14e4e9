"""The hub, which runs a launch on the caller's stack, and the start and the end of threads."""

# Compiled functions and intrinsics are typed by Numba, not by annotations.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from emulate.fast import records as rec
from emulate.fast.copies import empty_queue, finish_copies, land_block, land_one
from emulate.fast.scheduler import (
    breathe,
    fail,
    inline,
    make_ready,
    progress,
    random,
    suspend,
    take_ready,
    to_hub,
    wait_in,
    wake_all,
)
from emulate.fast.switch import FRAME_ENTRY, FRAME_WORDS
from emulate.fast.words import current_fiber, fill, load, store, switch

IDLE_ROUNDS = 1000
"""Rounds in which every sleeping fiber was retried and nothing happened, before it is a deadlock.
More than one, because a plain store that lets another thread go on is no event that is seen."""


@inline
def retry_later(what, line):
    """Let the others run; come back when they wait too."""
    fiber = current_fiber()
    wait_in(fiber, load(fiber + rec.FIBER_RUN) + rec.RUN_PARKED, what, line)


@inline
def happened():
    """Something happened that may let a parked fiber go on."""
    fiber = current_fiber()
    progress(load(fiber + rec.FIBER_RUN))
    breathe(fiber)


@inline
def leave(raised):
    """The end of a thread; does not return."""
    fiber = current_fiber()
    run = load(fiber + rec.FIBER_RUN)
    block = load(fiber + rec.FIBER_BLOCK)
    if raised != 0:
        fail(fiber, rec.ERROR_RAISED, raised, 0)
    if load(fiber + rec.FIBER_CANARY) != rec.CANARY:
        fail(fiber, rec.ERROR_STACK, 0, 0)
    if load(block + rec.BLOCK_ARRIVED) != 0:
        fail(fiber, rec.ERROR_EXITED, 0, 0)
    finish_copies(fiber)
    store(fiber + rec.FIBER_DONE, 1)
    alive = load(block + rec.BLOCK_ALIVE) - 1
    store(block + rec.BLOCK_ALIVE, alive)
    store(run + rec.RUN_LIVE, load(run + rec.RUN_LIVE) - 1)
    progress(run)
    if alive == 0:
        land_block(run, block)
        # The next CTA of this slot reuses the stack that this code stands on: the hub starts it.
        store(block + rec.BLOCK_NEXT, load(run + rec.RUN_FREE))
        store(run + rec.RUN_FREE, block)
        to_hub(fiber)
    suspend(fiber)


@inline
def _start_unit(unit):
    store(unit + rec.UNIT_ARRIVED, 0)
    store(unit + rec.UNIT_GROUPS, 0)
    # What the last CTA never waited for is dropped: its tiles are gone.
    store(unit + rec.UNIT_ISSUED, 0)
    store(unit + rec.UNIT_DONE, 0)


@inline
def _start_block(run, block):
    """Start the next CTA of the grid in a slot."""
    index = load(run + rec.RUN_NEXT_BLOCK)
    store(run + rec.RUN_NEXT_BLOCK, index + 1)
    threads = load(run + rec.RUN_THREADS)
    store(run + rec.RUN_LIVE, load(run + rec.RUN_LIVE) + threads)
    grid_x = load(run + rec.RUN_GRID)
    grid_y = load(run + rec.RUN_GRID + 8)
    store(block + rec.BLOCK_INDEX, index % grid_x)
    store(block + rec.BLOCK_INDEX + 8, index // grid_x % grid_y)
    store(block + rec.BLOCK_INDEX + 16, index // (grid_x * grid_y))
    store(block + rec.BLOCK_ALIVE, threads)
    fill(block + rec.BLOCK_NAMED, 0, rec.NAMED_BYTES * rec.NAMED_BARRIERS)
    # Shared memory starts as 0xFF (NaN, -1): a read of what nobody wrote shows in the result.
    fill(load(block + rec.BLOCK_SHARED), 0xFF, load(run + rec.RUN_SHARED_BYTES))
    size_x = load(run + rec.RUN_BLOCK)
    size_y = load(run + rec.RUN_BLOCK + 8)
    entry = load(run + rec.RUN_ENTRY)
    stacks = load(block + rec.BLOCK_STACKS)
    warps = load(block + rec.BLOCK_WARPS)
    warpgroups = load(block + rec.BLOCK_WARPGROUPS)
    for rank in range(threads):
        fiber = stacks + rank * rec.STACK_BYTES
        frame = fiber + rec.STACK_BYTES - 64 - 8 * FRAME_WORDS
        for i in range(FRAME_WORDS):
            store(frame + 8 * i, 0)
        store(frame + 8 * FRAME_ENTRY, entry)
        warp = warps + rank // rec.WARP_LANES * rec.UNIT_BYTES
        warpgroup = warpgroups + rank // rec.WARPGROUP_LANES * rec.UNIT_BYTES
        if rank % rec.WARP_LANES == 0:
            _start_unit(warp)
        if rank % rec.WARPGROUP_LANES == 0:
            _start_unit(warpgroup)
        store(fiber + rec.FIBER_SP, frame)
        store(fiber + rec.FIBER_RUN, run)
        store(fiber + rec.FIBER_BLOCK, block)
        store(fiber + rec.FIBER_WARP, warp)
        store(fiber + rec.FIBER_WARPGROUP, warpgroup)
        store(fiber + rec.FIBER_TID, rank % size_x)
        store(fiber + rec.FIBER_TID + 8, rank // size_x % size_y)
        store(fiber + rec.FIBER_TID + 16, rank // (size_x * size_y))
        store(fiber + rec.FIBER_RANK, rank)
        store(fiber + rec.FIBER_DONE, 0)
        store(fiber + rec.FIBER_WAITS_IN, 0)
        empty_queue(fiber + rec.QUEUE_CP, rec.CP_RING)
        empty_queue(fiber + rec.QUEUE_BULK, rec.BULK_RING)
        store(fiber + rec.FIBER_CANARY, rec.CANARY)
        make_ready(run, fiber)


@inline
def _idle_limit(run):
    """Rounds without an event that are no deadlock yet."""
    fiber = load(run + rec.RUN_PARKED)
    while fiber != 0:
        if load(fiber + rec.FIBER_WAITS_IN) == rec.WAIT_RETRY:
            return IDLE_ROUNDS
        fiber = load(fiber + rec.FIBER_NEXT)
    # A wait op only looks: a round in which none could go on will be followed by the same.
    return 2


@inline
def _start_more(run):
    """Start a CTA for want of anything else to run, if there is one and room for it."""
    if load(run + rec.RUN_NEXT_BLOCK) >= load(run + rec.RUN_BLOCKS):
        return False
    used = load(run + rec.RUN_USED)
    if used >= load(run + rec.RUN_SLOTS):
        return False
    store(run + rec.RUN_USED, used + 1)
    _start_block(run, load(run + rec.RUN_SLOT) + used * rec.BLOCK_BYTES)
    return True


def hub(run):
    """Run the launch on the caller's stack; returns HUB_*. After HUB_PAUSED, call it again."""
    while True:
        if load(run + rec.RUN_ERROR) != 0:
            return rec.HUB_ERROR
        if load(run + rec.RUN_BUDGET) <= 0:
            return rec.HUB_PAUSED
        if load(run + rec.RUN_NEXT_BLOCK) < load(run + rec.RUN_BLOCKS):
            free = load(run + rec.RUN_FREE)
            if free != 0:
                store(run + rec.RUN_FREE, load(free + rec.BLOCK_NEXT))
                _start_block(run, free)
                continue
        if load(run + rec.RUN_USED) < load(run + rec.RUN_WINDOW):
            if _start_more(run):
                continue
        if load(run + rec.RUN_COPIES) == rec.COPIES_RANDOM:
            if load(run + rec.RUN_FLIGHT_COUNT) != 0 and random(run + rec.RUN_COPY_SEED) & 1 == 0:
                land_one(run)
                continue
        fiber = take_ready(run)
        if fiber != 0:
            switch(run + rec.RUN_HUB_SP, load(fiber + rec.FIBER_SP))
            continue
        if load(run + rec.RUN_PARKED) != 0 and load(run + rec.RUN_PROGRESS) != 0:
            store(run + rec.RUN_PROGRESS, 0)
            store(run + rec.RUN_IDLE, 0)
            wake_all(run, run + rec.RUN_PARKED)
            continue
        # Nobody can go on: what is in flight lands, then CTAs outside the window start, so that
        # whoever waits for one is served and otherwise few of them fill the caches.
        if load(run + rec.RUN_FLIGHT_COUNT) != 0:
            land_one(run)
            continue
        if _start_more(run):
            continue
        if load(run + rec.RUN_LIVE) == 0:
            return rec.HUB_DONE
        if load(run + rec.RUN_PARKED) == 0:
            return rec.HUB_DEADLOCK
        idle = load(run + rec.RUN_IDLE) + 1
        store(run + rec.RUN_IDLE, idle)
        if idle > _idle_limit(run):
            return rec.HUB_DEADLOCK
        wake_all(run, run + rec.RUN_PARKED)
