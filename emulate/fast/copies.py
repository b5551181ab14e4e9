"""Async copies of single threads: compiled functions that keep their operands and complete them.

Two kinds. A *queue* belongs to a thread and a group name (``cp``, ``bulk``): its copies complete in
order, at the latest in the wait that covers them. A *flight* is a copy that an mbarrier counts: it
may complete at any time, in any order, at the latest when nobody else can do anything.
"""

# Compiled functions and intrinsics are typed by Numba, not by annotations.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from emulate.fast import records as rec
from emulate.fast.scheduler import fail, inline, note_error, progress, random, to_hub
from emulate.fast.words import call_address, current_fiber, load, move, store


@inline
def copies_until(fiber, queue, until, line):
    """Complete the copies of a queue up to number ``until``."""
    done = load(queue + rec.QUEUE_DONE)
    size = load(queue + rec.QUEUE_SIZE)
    while done < until:
        record = queue + rec.QUEUE_COPIES + rec.COPY_BYTES * (done & (size - 1))
        raised = call_address(load(record), record)
        if raised != 0:
            fail(fiber, rec.ERROR_RAISED, raised, line)
        done += 1
        progress(load(fiber + rec.FIBER_RUN))
    store(queue + rec.QUEUE_DONE, done)


@inline
def copy_record(place, line):
    """The record for the operands of the copy that the thread is about to issue."""
    fiber = current_fiber()
    queue = fiber + place
    issued = load(queue + rec.QUEUE_ISSUED)
    size = load(queue + rec.QUEUE_SIZE)
    # A full ring: the oldest copy lands early, which the GPU may do as well.
    copies_until(fiber, queue, issued + 1 - size, line)
    return queue + rec.QUEUE_COPIES + rec.COPY_BYTES * (issued & (size - 1))


@inline
def copy_issue(place, line):
    """Issue the copy whose record was just written."""
    fiber = current_fiber()
    run = load(fiber + rec.FIBER_RUN)
    queue = fiber + place
    issued = load(queue + rec.QUEUE_ISSUED) + 1
    store(queue + rec.QUEUE_ISSUED, issued)
    mode = load(run + rec.RUN_COPIES)
    if mode == rec.COPIES_EAGER:
        copies_until(fiber, queue, issued, line)
    elif mode == rec.COPIES_RANDOM:
        open_copies = issued - load(queue + rec.QUEUE_DONE)
        some = random(run + rec.RUN_COPY_SEED) % (open_copies + 1)
        copies_until(fiber, queue, issued - open_copies + some, line)


@inline
def copy_commit(place):
    """Close the group of the copies issued since the last commit."""
    queue = current_fiber() + place
    groups = load(queue + rec.QUEUE_GROUPS)
    at = queue + rec.QUEUE_ENDS + 8 * (groups % rec.GROUP_RING)
    store(at, load(queue + rec.QUEUE_ISSUED))
    store(queue + rec.QUEUE_GROUPS, groups + 1)


@inline
def copy_wait(place, pending, line):
    """Complete all committed groups but the last ``pending``."""
    fiber = current_fiber()
    queue = fiber + place
    last = load(queue + rec.QUEUE_GROUPS) - pending - 1
    if last >= 0:
        at = queue + rec.QUEUE_ENDS + 8 * (last % rec.GROUP_RING)
        copies_until(fiber, queue, load(at), line)


@inline
def finish_copies(fiber):
    """Complete what the thread never waited for, at its end."""
    cp = fiber + rec.QUEUE_CP
    copies_until(fiber, cp, load(cp + rec.QUEUE_ISSUED), 0)
    bulk = fiber + rec.QUEUE_BULK
    copies_until(fiber, bulk, load(bulk + rec.QUEUE_ISSUED), 0)


@inline
def empty_queue(queue, size):
    """A queue without copies."""
    store(queue + rec.QUEUE_ISSUED, 0)
    store(queue + rec.QUEUE_DONE, 0)
    store(queue + rec.QUEUE_GROUPS, 0)
    store(queue + rec.QUEUE_SIZE, size)


@inline
def _flight(run, number):
    """The address of the ``number``-th flight, counted from the oldest."""
    at = (load(run + rec.RUN_FLIGHT_HEAD) + number) & (rec.FLIGHT_RING - 1)
    return load(run + rec.RUN_FLIGHTS) + rec.FLIGHT_BYTES * at


@inline
def land(run, number):
    """Complete a flight; the oldest one takes its place in the ring. Notes what it raises."""
    record = _flight(run, number)
    raised = call_address(load(record), record)
    if raised != 0:
        line = load(record + rec.FLIGHT_LINE)
        note_error(load(record + rec.FLIGHT_FIBER), rec.ERROR_RAISED, raised, line)
    if number != 0:
        move(record, _flight(run, 0), rec.FLIGHT_BYTES)
    head = load(run + rec.RUN_FLIGHT_HEAD)
    store(run + rec.RUN_FLIGHT_HEAD, (head + 1) & (rec.FLIGHT_RING - 1))
    store(run + rec.RUN_FLIGHT_COUNT, load(run + rec.RUN_FLIGHT_COUNT) - 1)
    progress(run)


@inline
def land_one(run):
    """Complete the oldest flight, or a random one if the launch says so."""
    count = load(run + rec.RUN_FLIGHT_COUNT)
    if load(run + rec.RUN_COPIES) == rec.COPIES_RANDOM:
        land(run, random(run + rec.RUN_COPY_SEED) % count)
    else:
        land(run, 0)


@inline
def land_block(run, block):
    """Complete the flights of a CTA, whose memory is about to be another's."""
    count = load(run + rec.RUN_FLIGHT_COUNT)
    number = count - 1
    while number >= 0:
        fiber = load(_flight(run, number) + rec.FLIGHT_FIBER)
        if load(fiber + rec.FIBER_BLOCK) == block:
            land(run, number)
            # Everything older has moved one place, and the oldest stands where this one was.
            count = load(run + rec.RUN_FLIGHT_COUNT)
            number = count
        number -= 1


@inline
def flight_record(line):
    """The record for the operands of the flight that the thread is about to issue."""
    fiber = current_fiber()
    run = load(fiber + rec.FIBER_RUN)
    if load(run + rec.RUN_FLIGHT_COUNT) == rec.FLIGHT_RING:
        land(run, 0)
    return _flight(run, load(run + rec.RUN_FLIGHT_COUNT))


@inline
def flight_issue(line):
    """Issue the flight whose record was just written."""
    fiber = current_fiber()
    run = load(fiber + rec.FIBER_RUN)
    count = load(run + rec.RUN_FLIGHT_COUNT)
    record = _flight(run, count)
    store(record + rec.FLIGHT_FIBER, fiber)
    store(record + rec.FLIGHT_LINE, line)
    store(run + rec.RUN_FLIGHT_COUNT, count + 1)
    mode = load(run + rec.RUN_COPIES)
    if mode == rec.COPIES_EAGER:
        land(run, count)
    elif mode == rec.COPIES_RANDOM and random(run + rec.RUN_COPY_SEED) & 3 == 0:
        land_one(run)
    if load(run + rec.RUN_ERROR) != 0:
        to_hub(fiber)
