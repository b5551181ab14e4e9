"""Where threads meet: barriers, warp and warpgroup ops, and the async products of warpgroups."""

# Compiled functions and intrinsics are typed by Numba, not by annotations.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from emulate.fast import records as rec
from emulate.fast.scheduler import (
    breathe,
    fail,
    inline,
    note_error,
    progress,
    random,
    to_hub,
    wait_in,
    wake_all,
)
from emulate.fast.words import call_address, current_fiber, load, move, store


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
        breathe(fiber)
    else:
        store(block + rec.BLOCK_ARRIVED, arrived)
        store(block + rec.BLOCK_VOTES, votes)
        wait_in(fiber, block + rec.BLOCK_WAITERS, rec.WAIT_BARRIER, line)
    return load(block + rec.BLOCK_RESULT)


@inline
def named_barrier(number, count, waits, op, line):
    """``bar.sync number, count``, or ``bar.arrive`` if the thread does not wait."""
    fiber = current_fiber()
    run = load(fiber + rec.FIBER_RUN)
    if number < 0 or number >= rec.NAMED_BARRIERS:
        fail(fiber, rec.ERROR_NAMED_ID, number, line)
    if count <= 0 or count % rec.WARP_LANES != 0:
        fail(fiber, rec.ERROR_NAMED_COUNT, count, line)
    place = load(fiber + rec.FIBER_BLOCK) + rec.BLOCK_NAMED + number * rec.NAMED_BYTES
    arrived = load(place + rec.NAMED_ARRIVED)
    if arrived == 0:
        store(place + rec.NAMED_COUNT, count)
    elif load(place + rec.NAMED_COUNT) != count:
        fail(fiber, rec.ERROR_NAMED_OTHER, number, line)
    arrived += 1
    if arrived == count:
        store(place + rec.NAMED_ARRIVED, 0)
        progress(run)
        wake_all(run, place + rec.NAMED_WAITERS)
    else:
        store(place + rec.NAMED_ARRIVED, arrived)
        if waits != 0:
            store(fiber + rec.FIBER_OPERANDS, number)
            store(fiber + rec.FIBER_OPERANDS + 8, count)
            wait_in(fiber, place + rec.NAMED_WAITERS, op, line)


@inline
def partial_mask(function, mask, line):
    """A warp function of `numba.cuda` whose mask leaves lanes out; does not return."""
    fiber = current_fiber()
    store(fiber + rec.FIBER_OPERANDS, function)
    fail(fiber, rec.ERROR_MASK, mask, line)


@inline
def grid_sync(line):
    """``this_grid().sync()``: waits for all threads of all CTAs."""
    fiber = current_fiber()
    run = load(fiber + rec.FIBER_RUN)
    if load(run + rec.RUN_SLOTS) < load(run + rec.RUN_BLOCKS):
        fail(fiber, rec.ERROR_GRID, 0, line)
    arrived = load(run + rec.RUN_GRID_ARRIVED) + 1
    if arrived == load(run + rec.RUN_BLOCKS) * load(run + rec.RUN_THREADS):
        store(run + rec.RUN_GRID_ARRIVED, 0)
        progress(run)
        wake_all(run, run + rec.RUN_GRID_WAITERS)
    else:
        store(run + rec.RUN_GRID_ARRIVED, arrived)
        wait_in(fiber, run + rec.RUN_GRID_WAITERS, rec.WAIT_GRID, line)


@inline
def _join(fiber, unit, op, line):
    """Meet the other lanes in an op. True for the last one, who acts and then wakes the others;
    they return when that is done."""
    arrived = load(unit + rec.UNIT_ARRIVED) + 1
    if load(unit + rec.UNIT_SIZE) != load(unit + rec.UNIT_LANES):
        fail(fiber, rec.ERROR_PARTIAL_UNIT, op, line)
    if arrived == 1:
        store(unit + rec.UNIT_OP, op)
    elif load(unit + rec.UNIT_OP) != op:
        fail(fiber, rec.ERROR_DIVERGENT, op, line)
    if arrived == load(unit + rec.UNIT_LANES):
        store(unit + rec.UNIT_ARRIVED, 0)
        return True
    store(unit + rec.UNIT_ARRIVED, arrived)
    wait_in(fiber, unit + rec.UNIT_WAITERS, op, line)
    return False


@inline
def _release(fiber, unit):
    run = load(fiber + rec.FIBER_RUN)
    progress(run)
    wake_all(run, unit + rec.UNIT_WAITERS)


@inline
def meet(op, twin, place, line):
    """A collective of the unit at field ``place``: the last lane runs the twin for all.

    Each lane has written its operands to its row of the exchange area. The area has two halves that
    collectives use in turn: a fast lane may be in the next one before a slow lane has read the
    result of this one.
    """
    fiber = current_fiber()
    unit = load(fiber + place)
    if _join(fiber, unit, op, line):
        generation = load(unit + rec.UNIT_GENERATION)
        half = load(unit + rec.UNIT_EXCHANGE) + (generation & 1) * load(unit + rec.UNIT_HALF)
        store(unit + rec.UNIT_GENERATION, generation + 1)
        raised = call_address(twin, half)
        if raised != 0:
            fail(fiber, rec.ERROR_RAISED, raised, line)
        _release(fiber, unit)


@inline
def _products_until(fiber, unit, until):
    """Complete a unit's async products up to number ``until``: tiles change now."""
    done = load(unit + rec.UNIT_DONE)
    lanes = load(unit + rec.UNIT_LANES)
    stage = load(unit + rec.UNIT_STAGE)
    while done < until:
        slot = (done % rec.PRODUCT_RING) * load(unit + rec.UNIT_PRODUCT_BYTES)
        record = load(unit + rec.UNIT_PRODUCTS) + slot
        count = load(record + rec.PRODUCT_TILES)
        rows = record + rec.PRODUCT_HEADER
        operands = (rows + 8 * lanes * count + 63) & ~63
        move(stage, operands, load(record + rec.PRODUCT_OPERAND_BYTES))
        for tile in range(count):
            at = stage + load(record + rec.PRODUCT_TILE + 16 * tile)
            nbytes = load(record + rec.PRODUCT_TILE + 16 * tile + 8)
            for lane in range(lanes):
                move(at + lane * nbytes, load(rows + 8 * (tile * lanes + lane)), nbytes)
        raised = call_address(load(record + rec.PRODUCT_RUN), stage)
        if raised != 0:
            # The place of the op, not that of the wait.
            issuer = load(record + rec.PRODUCT_FIBER)
            note_error(issuer, rec.ERROR_RAISED, raised, load(record + rec.PRODUCT_LINE))
            to_hub(fiber)
        for tile in range(count):
            at = stage + load(record + rec.PRODUCT_TILE + 16 * tile)
            nbytes = load(record + rec.PRODUCT_TILE + 16 * tile + 8)
            for lane in range(lanes):
                move(load(rows + 8 * (tile * lanes + lane)), at + lane * nbytes, nbytes)
        done += 1
    store(unit + rec.UNIT_DONE, done)


@inline
def product_record(place, line):
    """The record for the operands of the async op that the unit is about to issue."""
    fiber = current_fiber()
    unit = load(fiber + place)
    issued = load(unit + rec.UNIT_ISSUED)
    _products_until(fiber, unit, issued + 1 - rec.PRODUCT_RING)
    slot = (issued % rec.PRODUCT_RING) * load(unit + rec.UNIT_PRODUCT_BYTES)
    return load(unit + rec.UNIT_PRODUCTS) + slot


@inline
def product_issue(op, place, line):
    """Issue the op whose record every lane has written its row of."""
    fiber = current_fiber()
    unit = load(fiber + place)
    if _join(fiber, unit, op, line):
        run = load(fiber + rec.FIBER_RUN)
        issued = load(unit + rec.UNIT_ISSUED) + 1
        store(unit + rec.UNIT_ISSUED, issued)
        mode = load(run + rec.RUN_COPIES)
        if mode == rec.COPIES_EAGER:
            _products_until(fiber, unit, issued)
        elif mode == rec.COPIES_RANDOM:
            pending = issued - load(unit + rec.UNIT_DONE)
            some = random(run + rec.RUN_COPY_SEED) % (pending + 1)
            _products_until(fiber, unit, issued - pending + some)
        _release(fiber, unit)


@inline
def product_commit(op, place, line):
    """Close the group of the warpgroup's products since the last commit of this unit."""
    fiber = current_fiber()
    unit = load(fiber + place)
    if _join(fiber, unit, op, line):
        groups = load(unit + rec.UNIT_GROUPS)
        issued = load(load(fiber + rec.FIBER_WARPGROUP) + rec.UNIT_ISSUED)
        store(unit + rec.UNIT_ENDS + 8 * (groups % rec.GROUP_RING), issued)
        store(unit + rec.UNIT_GROUPS, groups + 1)
        _release(fiber, unit)


@inline
def product_wait(op, place, pending, line):
    """Complete all groups that the unit committed but the last ``pending``."""
    fiber = current_fiber()
    unit = load(fiber + place)
    if _join(fiber, unit, op, line):
        last = load(unit + rec.UNIT_GROUPS) - pending - 1
        if last >= 0:
            end = load(unit + rec.UNIT_ENDS + 8 * (last % rec.GROUP_RING))
            _products_until(fiber, load(fiber + rec.FIBER_WARPGROUP), end)
        _release(fiber, unit)
