"""Failing schedules become simple and still fail."""

import pytest

from emulate.schedule import Picks, Recorder, make, shrink
from tests.emulator.schedule import toy


def loses(scheduler):
    state, _ = toy.run(toy.lost_update, 4, scheduler)
    return state["sum"] != 12


def third_first(scheduler):
    _, order = toy.run(toy.two_orders, 6, scheduler)
    return order[0].thread == 3


def inverted(scheduler):
    """Thread 5 first and thread 0 never before thread 4."""
    _, order = toy.run(toy.two_orders, 6, scheduler)
    ranks = [choice.thread for choice in order]
    return ranks[0] == 5 and ranks.index(0) > ranks.index(4)


@pytest.mark.parametrize(("fails", "fewest"), [(third_first, 1), (inverted, 2)])
def test_fewest_switches(fails, fewest):
    for seed in range(2000):
        recorder = Recorder(make(f"random:{seed}"))
        if fails(recorder):
            small = shrink(recorder.picks, fails)
            assert fails(Picks(small))
            assert sum(pick > 0 for pick in small) == fewest
            assert sum(pick > 0 for pick in recorder.picks) > fewest
            return
    raise AssertionError("no random schedule fails")


def test_a_failure_of_fifo_needs_no_switch():
    recorder = Recorder(make("random:1"))
    assert loses(recorder) and loses(make("fifo"))
    assert shrink(recorder.picks, loses) == []


def test_a_run_that_does_not_fail():
    with pytest.raises(ValueError, match="does not fail"):
        shrink([0, 1], lambda scheduler: False)


def test_budget():
    runs = []

    def counted(scheduler):
        runs.append(1)
        return inverted(scheduler)

    seed = next(s for s in range(2000) if inverted(make(f"random:{s}")))
    recorder = Recorder(make(f"random:{seed}"))
    inverted(recorder)
    small = shrink(recorder.picks, counted, max_runs=5)
    assert len(runs) == 5 and inverted(Picks(small))
