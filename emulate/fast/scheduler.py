"""The scheduler: compiled functions that queue, suspend and wake fibers.

Runnable fibers stand in one ring. A fiber runs until it waits: then it leaves the ring for the list
of what it waits for and jumps to the next runnable fiber, without going through the host.
"""

# Compiled functions and intrinsics are typed by Numba, not by annotations.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from numba import njit

from emulate.fast import records as rec
from emulate.fast.words import load, store, switch

inline = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


@inline
def random(state):
    """The next number of the generator (xorshift64) whose state is at an address, below 2**62."""
    x = load(state)
    x ^= x << 13
    x ^= (x >> 7) & 0x1FFFFFFFFFFFFFF
    x ^= x << 17
    store(state, x)
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
        other = queue + 8 * ((head + random(run + rec.RUN_SEED) % count) & mask)
        kept = load(first)
        store(first, load(other))
        store(other, kept)
    store(run + rec.RUN_HEAD, (head + 1) & mask)
    store(run + rec.RUN_COUNT, count - 1)
    return load(first)


@inline
def _wants_hub(run):
    """With random copies the hub gets its turn now and then, to complete one."""
    if load(run + rec.RUN_COPIES) != rec.COPIES_RANDOM or load(run + rec.RUN_FLIGHT_COUNT) == 0:
        return False
    return random(run + rec.RUN_COPY_SEED) & 15 == 0


@inline
def suspend(fiber):
    """Leave for the next runnable fiber, or for the hub."""
    run = load(fiber + rec.FIBER_RUN)
    budget = load(run + rec.RUN_BUDGET) - 1
    store(run + rec.RUN_BUDGET, budget)
    store(run + rec.RUN_EVENTS, 0)
    following = 0
    if budget > 0 and not _wants_hub(run):
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


MAX_EVENTS = 1000
"""Atomics and full barriers of one fiber in a row before others get their turn."""


@inline
def breathe(fiber):
    """Let others run after many events: a fiber that spins on an atomic waits for one of them, and
    without a switch the host never gets to see a Ctrl-C."""
    run = load(fiber + rec.FIBER_RUN)
    events = load(run + rec.RUN_EVENTS) + 1
    store(run + rec.RUN_EVENTS, events)
    if events > MAX_EVENTS:
        store(run + rec.RUN_EVENTS, 0)
        store(run + rec.RUN_BUDGET, load(run + rec.RUN_BUDGET) - 1)
        wake_all(run, run + rec.RUN_PARKED)  # one that sleeps may be the one
        make_ready(run, fiber)
        # Not to the next fiber: that may be this one, whose stack pointer is not saved yet.
        to_hub(fiber)


@inline
def progress(run):
    """Note that something happened that may let a parked fiber go on."""
    store(run + rec.RUN_PROGRESS, load(run + rec.RUN_PROGRESS) + 1)


@inline
def note_error(fiber, error, detail, line):
    """Keep the first error of the launch; the hub ends it."""
    run = load(fiber + rec.FIBER_RUN)
    if load(run + rec.RUN_ERROR) == 0:
        store(run + rec.RUN_ERROR, error)
        store(run + rec.RUN_ERROR_FIBER, fiber)
        store(run + rec.RUN_ERROR_DETAIL, detail)
        store(fiber + rec.FIBER_LINE, line)


@inline
def fail(fiber, error, detail, line):
    """End the launch with an error; does not return."""
    note_error(fiber, error, detail, line)
    to_hub(fiber)
