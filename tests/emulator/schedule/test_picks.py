"""Picks as text, recorded and replayed."""

import random

import pytest

from emulate.schedule import Picks, Recorder, decode, encode, make
from tests.emulator.schedule import toy


@pytest.mark.parametrize("picks", [[], [1], [0, 0, 3], [127, 128, 300, 70000], [5] * 1000])
def test_text_and_back(picks):
    text = encode(picks)
    assert decode(text) == picks
    assert ":" not in text and text.isascii() and not text.endswith("=")


def test_zeros_at_the_end_are_left_out():
    assert encode([0, 2, 0, 0]) == encode([0, 2])
    assert decode(encode([0, 2, 0, 0])) == [0, 2]


def test_long_runs_stay_short():
    assert len(encode([0] * 5000 + [3] + [0] * 5000)) < 100


@pytest.mark.parametrize("text", ["%%", "abc", encode([1, 2, 3] * 50)[:-6], "eJw=x"])
def test_damaged_text(text):
    with pytest.raises(ValueError, match="damaged"):
        decode(text)


@pytest.mark.parametrize("name", ["random:5", "pct:3:1", "adversarial:0", "fifo"])
def test_a_recorded_run_is_replayed(name):
    recorder = Recorder(make(name))
    state, order = toy.run(toy.lost_update, 5, recorder)
    text = encode(recorder.picks)
    again, same = toy.run(toy.lost_update, 5, make(f"picks:{text}"))
    assert (again["sum"], same) == (state["sum"], order)


def test_a_schedule_without_a_name_is_called_by_its_picks():
    from emulate.schedule import Schedule

    schedule = Schedule("", Picks([0, 1]))
    assert [schedule.pick([1, 2, 3]) for _ in range(3)] == [0, 1, 0]
    assert decode(schedule.name.removeprefix("picks:")) == [0, 1]


def test_random_lists_survive():
    source = random.Random(9)
    for _ in range(50):
        picks = [source.randrange(1 << source.randrange(1, 20)) for _ in range(30)] + [1]
        assert decode(encode(picks)) == picks
