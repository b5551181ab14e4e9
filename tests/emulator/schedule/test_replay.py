"""Tokens and schedules on the real machine."""

import numpy as np
import pytest
from numba import cuda

import emulate
from emulate.replay import TokenError, replay, schedule_of, shrink, token
from emulate.schedule import Picks, Recorder, decode, expand, make


def race_in_order(x, order):
    """Thread 3 reads what thread 0 writes only if it comes before thread 0's first step."""
    t = cuda.threadIdx.x
    place = cuda.atomic.add(order, 0, 1)
    if t == 3 and place == 0:
        order[1] = x[0]
    if t == 0:
        x[0] = np.int64(1)


def args():
    return np.zeros(1, np.int64), np.zeros(2, np.int64)


def orderings(name):
    """The order in which the threads of two blocks come to an atomic."""

    def kernel(order, count):
        order[cuda.atomic.add(count, 0, 1)] = cuda.grid(1)

    order, count = np.zeros(16, np.int64), np.zeros(1, np.int64)
    emulate.check(kernel, 2, 8, order, count, schedules=[name], ignore=["RACE_WAW"])
    return order.tolist()


def test_orders_differ_and_repeat():
    names = expand("default", 2)
    orders = {name: orderings(name) for name in names}
    assert all(sorted(order) == list(range(16)) for order in orders.values())
    assert orders["fifo"] == list(range(16))
    assert orders["adversarial:1"] == [*range(8, 16), *range(8)]  # the last block first
    assert len({tuple(order) for order in orders.values()}) >= len(names) - 1
    assert {name: orderings(name) for name in names} == orders


def test_picks_repeat_a_named_run():
    for name in ("random:3", "pct:3:1", "adversarial:0"):
        recorder = Recorder(make(name))
        orders = [orderings(recorder), orderings(Picks(recorder.picks)), orderings(name)]
        assert orders[0] == orders[1] == orders[2]


def failing():
    for seed in range(200):
        report = emulate.check(race_in_order, 1, 8, *args(), schedules=[f"random:{seed}"])
        if report.findings:
            return report.findings[0]
    raise AssertionError("no schedule lets thread 3 come first")


def test_fifo_hides_it():
    assert not emulate.check(race_in_order, 1, 8, *args(), schedules=["fifo"]).findings


def test_replay_has_the_same_finding():
    finding = failing()
    report = replay(finding.schedule, race_in_order, 1, 8, *args())
    assert report.findings == (finding,)


def test_shrink_leaves_the_one_switch_that_it_needs():
    finding = failing()
    small = shrink(finding.schedule, race_in_order, 1, 8, *args())
    picks = decode(small.removeprefix("picks:").partition("@")[0])
    assert sum(pick > 0 for pick in picks) == 1
    again = replay(small, race_in_order, 1, 8, *args())
    assert [one.id for one in again.findings] == [finding.id]


def test_shrink_without_a_finding():
    with pytest.raises(ValueError, match="no finding"):
        shrink("fifo", race_in_order, 1, 8, *args())


def test_exhaustive_finds_it():
    report = emulate.check(race_in_order, 1, 8, *args(), schedules="exhaustive:3")
    assert {finding.id for finding in report.findings} & {"RACE_WAR", "RACE_RAW"}
    name = schedule_of(report.findings[0].schedule, race_in_order)
    assert name.startswith("picks:")


def test_one_line_tokens():
    for name in ("fifo", "pct:3:7", "picks:eJwDAAAAAAE"):
        text = token(name, race_in_order)
        assert "\n" not in text and " " not in text
        assert schedule_of(text, race_in_order) == name
        assert schedule_of(name, race_in_order) == name
        with pytest.raises(TokenError, match="belongs to kernel content"):
            schedule_of(text, args)
