"""The scheduler: compiled functions that queue, suspend, wake and finish fibers.

Runnable fibers stand in one ring. A fiber runs until it waits: then it leaves the ring for the list
of what it waits for and jumps to the next runnable fiber, without going through the host. The *hub*
runs on the caller's stack; it starts CTAs and notices when nobody can run.
"""

# Compiled functions and intrinsics are typed by Numba, not by annotations.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from numba import njit

from emulate.fast import records as rec
from emulate.fast.switch import FRAME_ENTRY, FRAME_WORDS
from emulate.fast.words import call_address, current_fiber, fill, load, store, switch

inline = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


@inline
def random(run):
    """The next number of the launch's generator (xorshift64), below 2**62."""
    x = load(run + rec.RUN_SEED)
    x ^= x << 13
    x ^= (x >> 7) & 0x1FFFFFFFFFFFFFF
    x ^= x << 17
    store(run + rec.RUN_SEED, x)
    return x & 0x3FFFFFFFFFFFFFFF


@inline
def make_ready(run, fiber):
    """Put a fiber at the end of the ring."""
    count = load(run + rec.RUN_COUNT)
    at = (load(run + rec.RUN_HEAD) + count) & load(run + rec.RUN_MASK)
    store(load(run + rec.RUN_QUEUE) + 8 * at, fiber)
    store(run + rec.RUN_COUNT, count + 1)


@inline
def take_ready(run):
    """Take the first fiber of the ring, a random one if the launch has a seed; 0 if none."""
    count = load(run + rec.RUN_COUNT)
    if count == 0:
        return 0
    queue = load(run + rec.RUN_QUEUE)
    head = load(run + rec.RUN_HEAD)
    mask = load(run + rec.RUN_MASK)
    first = queue + 8 * head
    if load(run + rec.RUN_SEED) != 0:
        other = queue + 8 * ((head + random(run) % count) & mask)
        kept = load(first)
        store(first, load(other))
        store(other, kept)
    store(run + rec.RUN_HEAD, (head + 1) & mask)
    store(run + rec.RUN_COUNT, count - 1)
    return load(first)


@inline
def suspend(fiber):
    """Leave for the next runnable fiber, or for the hub."""
    run = load(fiber + rec.FIBER_RUN)
    following = take_ready(run)
    if following != 0:
        switch(fiber + rec.FIBER_SP, load(following + rec.FIBER_SP))
    else:
        switch(fiber + rec.FIBER_SP, load(run + rec.RUN_HUB_SP))


@inline
def to_hub(fiber):
    """Leave for the hub."""
    run = load(fiber + rec.FIBER_RUN)
    switch(fiber + rec.FIBER_SP, load(run + rec.RUN_HUB_SP))


@inline
def wait_in(fiber, waiters, what, line):
    """Wait in a list until somebody wakes it."""
    store(fiber + rec.FIBER_WAITS_IN, what)
    store(fiber + rec.FIBER_LINE, line)
    store(fiber + rec.FIBER_NEXT, load(waiters))
    store(waiters, fiber)
    suspend(fiber)
    store(fiber + rec.FIBER_WAITS_IN, 0)


@inline
def wake_all(run, waiters):
    """Make every fiber of a list runnable, the last to have come first."""
    fiber = load(waiters)
    store(waiters, 0)
    while fiber != 0:
        following = load(fiber + rec.FIBER_NEXT)
        make_ready(run, fiber)
        fiber = following


@inline
def progress(run):
    """Note that something happened that may let a parked fiber go on."""
    store(run + rec.RUN_PROGRESS, load(run + rec.RUN_PROGRESS) + 1)


@inline
def fail(fiber, error, detail, line):
    """End the launch with an error; does not return."""
    run = load(fiber + rec.FIBER_RUN)
    store(run + rec.RUN_ERROR, error)
    store(run + rec.RUN_ERROR_FIBER, fiber)
    store(run + rec.RUN_ERROR_DETAIL, detail)
    store(fiber + rec.FIBER_LINE, line)
    to_hub(fiber)


@inline
def barrier(vote, line):
    """``__syncthreads``: waits for all threads of the block and returns the sum of their votes."""
    fiber = current_fiber()
    block = load(fiber + rec.FIBER_BLOCK)
    run = load(fiber + rec.FIBER_RUN)
    if load(block + rec.BLOCK_ALIVE) != load(run + rec.RUN_THREADS):
        fail(fiber, rec.ERROR_EXITED, 0, line)
    arrived = load(block + rec.BLOCK_ARRIVED) + 1
    votes = load(block + rec.BLOCK_VOTES) + vote
    if arrived == load(run + rec.RUN_THREADS):
        store(block + rec.BLOCK_ARRIVED, 0)
        store(block + rec.BLOCK_VOTES, 0)
        # No thread can overwrite this before all have read it: the next barrier needs all of them.
        store(block + rec.BLOCK_RESULT, votes)
        progress(run)
        wake_all(run, block + rec.BLOCK_WAITERS)
    else:
        store(block + rec.BLOCK_ARRIVED, arrived)
        store(block + rec.BLOCK_VOTES, votes)
        wait_in(fiber, block + rec.BLOCK_WAITERS, rec.WAIT_BARRIER, line)
    return load(block + rec.BLOCK_RESULT)


@inline
def meet(op, twin, line):
    """A warp collective: the last lane to arrive runs the twin, at address ``twin``, for all.

    Each lane has written its operands to its row of the exchange area. The area has two halves that
    collectives use in turn: a fast lane may be in the next one before a slow lane has read the
    result of this one.
    """
    fiber = current_fiber()
    warp = load(fiber + rec.FIBER_WARP)
    run = load(fiber + rec.FIBER_RUN)
    arrived = load(warp + rec.WARP_ARRIVED) + 1
    if load(warp + rec.WARP_SIZE) != rec.WARP_LANES:
        fail(fiber, rec.ERROR_PARTIAL_WARP, op, line)
    if arrived == 1:
        store(warp + rec.WARP_OP, op)
    elif load(warp + rec.WARP_OP) != op:
        fail(fiber, rec.ERROR_DIVERGENT, op, line)
    if arrived == rec.WARP_LANES:
        generation = load(warp + rec.WARP_GENERATION)
        half = load(warp + rec.WARP_EXCHANGE) + (generation & 1) * load(warp + rec.WARP_HALF)
        store(warp + rec.WARP_ARRIVED, 0)
        store(warp + rec.WARP_GENERATION, generation + 1)
        raised = call_address(twin, half)
        if raised != 0:
            fail(fiber, rec.ERROR_RAISED, raised, line)
        progress(run)
        wake_all(run, warp + rec.WARP_WAITERS)
    else:
        store(warp + rec.WARP_ARRIVED, arrived)
        wait_in(fiber, warp + rec.WARP_WAITERS, op, line)


@inline
def retry_later(line):
    """Let the others run; come back when they wait too."""
    fiber = current_fiber()
    wait_in(fiber, load(fiber + rec.FIBER_RUN) + rec.RUN_PARKED, rec.WAIT_RETRY, line)


@inline
def copies_until(fiber, until, line):
    """Complete the thread's async copies up to number ``until``."""
    done = load(fiber + rec.FIBER_COPIES_DONE)
    while done < until:
        record = fiber + rec.FIBER_COPIES + rec.COPY_BYTES * (done % rec.COPY_RING)
        raised = call_address(load(record), record)
        if raised != 0:
            fail(fiber, rec.ERROR_RAISED, raised, line)
        done += 1
    store(fiber + rec.FIBER_COPIES_DONE, done)


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
    copies_until(fiber, load(fiber + rec.FIBER_COPIES_ISSUED), 0)
    store(fiber + rec.FIBER_DONE, 1)
    alive = load(block + rec.BLOCK_ALIVE) - 1
    store(block + rec.BLOCK_ALIVE, alive)
    store(run + rec.RUN_LIVE, load(run + rec.RUN_LIVE) - 1)
    progress(run)
    if alive == 0:
        # The next CTA of this slot reuses the stack that this code stands on: the hub starts it.
        store(block + rec.BLOCK_NEXT, load(run + rec.RUN_FREE))
        store(run + rec.RUN_FREE, block)
        to_hub(fiber)
    suspend(fiber)


@inline
def start_block(run, block):
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
    # Shared memory starts as 0xFF (NaN, -1): a read of what nobody wrote shows in the result.
    fill(load(block + rec.BLOCK_SHARED), 0xFF, load(run + rec.RUN_SHARED_BYTES))
    size_x = load(run + rec.RUN_BLOCK)
    size_y = load(run + rec.RUN_BLOCK + 8)
    entry = load(run + rec.RUN_ENTRY)
    stacks = load(block + rec.BLOCK_STACKS)
    warps = load(block + rec.BLOCK_WARPS)
    for rank in range(threads):
        fiber = stacks + rank * rec.STACK_BYTES
        frame = fiber + rec.STACK_BYTES - 64 - 8 * FRAME_WORDS
        for i in range(FRAME_WORDS):
            store(frame + 8 * i, 0)
        store(frame + 8 * FRAME_ENTRY, entry)
        store(fiber + rec.FIBER_SP, frame)
        store(fiber + rec.FIBER_RUN, run)
        store(fiber + rec.FIBER_BLOCK, block)
        store(fiber + rec.FIBER_WARP, warps + rank // rec.WARP_LANES * rec.WARP_BYTES)
        store(fiber + rec.FIBER_TID, rank % size_x)
        store(fiber + rec.FIBER_TID + 8, rank // size_x % size_y)
        store(fiber + rec.FIBER_TID + 16, rank // (size_x * size_y))
        store(fiber + rec.FIBER_RANK, rank)
        store(fiber + rec.FIBER_DONE, 0)
        store(fiber + rec.FIBER_WAITS_IN, 0)
        store(fiber + rec.FIBER_COPIES_ISSUED, 0)
        store(fiber + rec.FIBER_COPIES_DONE, 0)
        store(fiber + rec.FIBER_GROUPS, 0)
        store(fiber + rec.FIBER_CANARY, rec.CANARY)
        make_ready(run, fiber)


IDLE_ROUNDS = 1000
"""Rounds in which every parked fiber was retried and nothing happened, before it is a deadlock.
More than one, because a plain store that lets another thread go on is no event that is seen."""


def hub(run):
    """Run the launch on the caller's stack; returns HUB_*."""
    while True:
        if load(run + rec.RUN_ERROR) != 0:
            return rec.HUB_ERROR
        waiting = load(run + rec.RUN_NEXT_BLOCK) < load(run + rec.RUN_BLOCKS)
        if waiting:
            used = load(run + rec.RUN_USED)
            free = load(run + rec.RUN_FREE)
            if free != 0:
                store(run + rec.RUN_FREE, load(free + rec.BLOCK_NEXT))
                start_block(run, free)
                continue
            # Outside the window a CTA is started only for want of anything else to run: whoever
            # waits for it will be served, and the others keep the caches small.
            wanted = used < load(run + rec.RUN_WINDOW) or load(run + rec.RUN_COUNT) == 0
            if wanted and used < load(run + rec.RUN_SLOTS):
                store(run + rec.RUN_USED, used + 1)
                start_block(run, load(run + rec.RUN_SLOT) + used * rec.BLOCK_BYTES)
                continue
        fiber = take_ready(run)
        if fiber != 0:
            switch(run + rec.RUN_HUB_SP, load(fiber + rec.FIBER_SP))
            continue
        if load(run + rec.RUN_LIVE) == 0:
            return rec.HUB_DONE
        if load(run + rec.RUN_PARKED) == 0:
            return rec.HUB_DEADLOCK
        if load(run + rec.RUN_PROGRESS) != 0:
            store(run + rec.RUN_PROGRESS, 0)
            store(run + rec.RUN_IDLE, 0)
        else:
            store(run + rec.RUN_IDLE, load(run + rec.RUN_IDLE) + 1)
            if load(run + rec.RUN_IDLE) > IDLE_ROUNDS:
                return rec.HUB_DEADLOCK
        wake_all(run, run + rec.RUN_PARKED)


@inline
def copy_record(line):
    """The record for the operands of the copy that the thread is about to issue."""
    fiber = current_fiber()
    issued = load(fiber + rec.FIBER_COPIES_ISSUED)
    # A full ring: the oldest copy lands early, which the GPU may do as well.
    copies_until(fiber, issued + 1 - rec.COPY_RING, line)
    return fiber + rec.FIBER_COPIES + rec.COPY_BYTES * (issued % rec.COPY_RING)


@inline
def copy_issue(line):
    """Issue the copy whose record was just written."""
    fiber = current_fiber()
    issued = load(fiber + rec.FIBER_COPIES_ISSUED) + 1
    store(fiber + rec.FIBER_COPIES_ISSUED, issued)
    if load(load(fiber + rec.FIBER_RUN) + rec.RUN_LAZY) == 0:
        copies_until(fiber, issued, line)


@inline
def copy_commit():
    """Close the group of the copies issued since the last commit."""
    fiber = current_fiber()
    groups = load(fiber + rec.FIBER_GROUPS)
    at = fiber + rec.FIBER_GROUP_ENDS + 8 * (groups % rec.GROUP_RING)
    store(at, load(fiber + rec.FIBER_COPIES_ISSUED))
    store(fiber + rec.FIBER_GROUPS, groups + 1)


@inline
def copy_wait(pending, line):
    """Complete all committed groups but the last ``pending``."""
    fiber = current_fiber()
    last = load(fiber + rec.FIBER_GROUPS) - pending - 1
    if last >= 0:
        at = fiber + rec.FIBER_GROUP_ENDS + 8 * (last % rec.GROUP_RING)
        copies_until(fiber, load(at), line)
