"""Names of schedules."""

import pytest

from emulate.schedule import Explorer, expand, make, series
from tests.emulator.schedule import toy


def test_expand():
    assert expand("pct:3", 2) == ["pct:3:0", "pct:3:1"]
    assert expand(["fifo", "random"], seeds=[7, 9]) == ["fifo", "random:7", "random:9"]
    assert expand("pct", 1) == ["pct:3:0"]
    assert expand("random:4", 20) == ["random:4"]
    assert expand(["fifo", "fifo", "exhaustive:2"]) == ["fifo", "exhaustive:2"]
    assert expand()[0] == "fifo" and len(expand()) == len(set(expand())) == 15


@pytest.mark.parametrize(
    "name",
    ["", "lifo", "random:", "random:x", "random:-1", "pct:3", "pct:0:1", "fifo:1", "pct:1:2:3"],
)
def test_bad_names(name):
    with pytest.raises(ValueError, match="schedule: expected"):
        make(name)


@pytest.mark.parametrize("asked", ["lifo", "pct:x", "exhaustive", "exhaustive:a", ["fifo", "no"]])
def test_bad_requests(asked):
    with pytest.raises(ValueError, match="schedule: expected"):
        expand(asked)


@pytest.mark.parametrize(("asked", "seeds"), [([], 4), ("random", 0), ("random", [])])
def test_empty_requests(asked, seeds):
    with pytest.raises(ValueError, match="schedules: expected"):
        expand(asked, seeds)


def test_exhaustive_is_a_series():
    with pytest.raises(ValueError, match="series"):
        make("exhaustive:1")
    names = []
    for schedule in series(["fifo", "exhaustive:1"]):
        toy.run(toy.two_orders, 2, schedule)
        names.append(schedule.name)
    # Two threads of two steps: A may be delayed at each of three moments, or not at all.
    assert names[0] == "fifo" and len(names) == 1 + 4
    assert all(name.startswith("picks:") for name in names[1:])
    assert len(set(names[1:])) == 4


def test_without_a_bound_every_interleaving_is_seen():
    # Two threads of 3 resumptions each: 6! / (3! 3!) orders.
    def program(thread, state):
        yield None
        yield None

    explorer = Explorer(100)
    orders = [tuple(choice.thread for choice in toy.run(program, 2, run)[1]) for run in explorer]
    assert explorer.complete
    assert len(orders) == len(set(orders)) == 20


def test_limit():
    explorer = Explorer(100, limit=7)
    assert sum(1 for run in explorer if toy.run(toy.two_orders, 3, run)) == 7
    assert not explorer.complete
