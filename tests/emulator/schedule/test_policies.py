"""Each policy gives the order that it promises, and none starves a thread that others spin on."""

import itertools
from collections import Counter

import pytest

from emulate.schedule import Choice, make
from tests.emulator.schedule import toy

NAMES = ["fifo", "random:3", "pct:1:0", "pct:3:7", "adversarial:0", "adversarial:1"]


def threads(count: int, block: int = 0) -> list[Choice]:
    return [Choice("thread", block, i) for i in range(count)]


@pytest.mark.parametrize("name", NAMES)
def test_same_name_same_run(name):
    orders = [toy.run(toy.two_orders, 6, make(name))[1] for _ in range(2)]
    assert orders[0] == orders[1]
    assert len(orders[0]) == 12


@pytest.mark.parametrize("name", [*NAMES, *(f"pct:2:{seed}" for seed in range(20))])
def test_nobody_spins_for_ever(name):
    state, order = toy.run(toy.late_flag, 40, make(name))
    assert state["flag"] == 1
    assert len(order) < 40 * 200


def test_fifo_takes_turns():
    _, order = toy.run(toy.two_orders, 3, make("fifo"))
    assert [choice.thread for choice in order] == [0, 1, 2, 0, 1, 2]


def test_random_reaches_every_choice_about_equally():
    scheduler = make("random:1")
    counts = Counter(scheduler.pick(threads(4)) for _ in range(4000))
    assert set(counts) == {0, 1, 2, 3}
    assert all(850 < n < 1150 for n in counts.values())  # 1000 +- 5 standard deviations


def test_pct_of_depth_one_is_strict_priorities():
    scheduler = make("pct:1:4")
    first = scheduler.pick(threads(5))
    assert [scheduler.pick(threads(5)) for _ in range(20)] == [first] * 20
    rest = [choice for choice in threads(5) if choice.thread != first]
    second = rest[scheduler.pick(rest)]
    assert rest[scheduler.pick(rest[::-1]) * -1 - 1] == second


def test_pct_changes_its_mind_depth_minus_one_times():
    for seed in range(10):
        scheduler = make(f"pct:4:{seed}")
        picks = []
        for _ in range(1 << 14):
            # A pair, so that the higher of the two never counts as spinning.
            picks.append(scheduler.pick(threads(3)))
            scheduler.pick([Choice("thread", 1, 0), Choice("thread", 1, 1)])
        changes = sum(a != b for a, b in itertools.pairwise(picks))
        assert changes <= 3


def test_pct_seeds_differ():
    orders = {tuple(toy.run(toy.two_orders, 4, make(f"pct:3:{s}"))[1]) for s in range(30)}
    assert len(orders) > 10


def test_adversarial_copies_last_and_last_block_first():
    scheduler = make("adversarial:0")
    choices = [
        Choice("copy", 3, 0, 1),
        Choice("thread", 0, 0),
        Choice("thread", 2, 5),
        Choice("thread", 2, 6),
    ]
    picked = choices[scheduler.pick(choices)]
    assert picked.kind == "thread"
    left = [choice for choice in choices if choice.kind == "thread" and choice != picked]
    while len(left) > 1:
        left.pop(make("adversarial:0").pick([choices[0], *left]) - 1)
    assert left  # the copy was never taken while a thread was ready


def test_adversarial_starves_a_warp_until_nothing_else_is_left():
    starved = set()
    for seed in range(0, 20, 2):
        _, order = toy.run(toy.two_orders, 96, make(f"adversarial:{seed}"), block_threads=96)
        warps = [choice.thread // 32 for choice in order]
        last = warps[-1]
        assert warps[-64:] == [last] * 64
        starved.add(last)
    assert len(starved) > 1


def test_adversarial_prefers_who_is_ready_for_longest():
    scheduler = make("adversarial:1")
    ready = [Choice("thread", 0, i) for i in range(4)]
    order = []
    for _ in range(8):
        order.append(ready.pop(scheduler.pick(ready)))
        ready.append(order[-1])
    assert [choice.thread for choice in order] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_adversarial_gives_in_to_a_copy_that_all_wait_for():
    scheduler = make("adversarial:0")
    ready = [Choice("copy", 0, 0, 1), Choice("thread", 0, 0), Choice("thread", 0, 1)]
    for _ in range(1000):
        picked = ready.pop(scheduler.pick(ready))
        if picked.kind == "copy":
            return
        ready.append(picked)
    raise AssertionError("the copy never landed")
