"""The terminal drawings, character for character."""

import io

import numpy as np
import pytest

from nbmoe.cli.drawing import Progress, load_strip, routing_map, seconds, table


class Stream(io.StringIO):
    def __init__(self, encoding="utf-8", terminal=False):
        super().__init__()
        self._encoding = encoding
        self._terminal = terminal

    @property
    def encoding(self):
        return self._encoding

    def isatty(self):
        return self._terminal


def test_progress_on_a_terminal():
    stream = Stream(terminal=True)
    with Progress(stream, steps=2) as progress:
        progress.step("one")
        progress.step("two")
    frames = stream.getvalue().split("\r")[1:]
    assert frames[0] == "░" * 24 + " one\x1b[K"
    assert frames[1] == "█" * 12 + "░" * 12 + " two\x1b[K"
    assert frames[2] == "█" * 24 + " done\x1b[K\n"


def test_progress_that_fails_says_so():
    stream = Stream(terminal=True, encoding="ascii")
    with pytest.raises(RuntimeError), Progress(stream, steps=1) as progress:
        progress.step("one")
        raise RuntimeError
    assert stream.getvalue().endswith("stopped\x1b[K\n")
    assert stream.getvalue().isascii()


def test_progress_elsewhere():
    stream = Stream()
    with Progress(stream, steps=2) as progress:
        progress.step("one")
        progress.step("two")
    assert stream.getvalue() == "[1/2] one\n[2/2] two\n"


def test_routing_map():
    ids = np.array([[0, 2], [2, 0], [2, -1], [0, 2]], np.int32)
    text = routing_map(ids, 3, Stream())
    assert text.splitlines() == [
        "  expert   0 █▒·█  " + "█" * 18 + " 3",
        "  expert   1 ····   0",
        "  expert   2 ▒██▒  " + "█" * 24 + " 4",
    ]
    assert routing_map(ids, 3, Stream("ascii")).splitlines()[0].startswith("  expert   0 #+.#")


def test_routing_map_of_no_tokens():
    assert routing_map(np.zeros((0, 2), np.int32), 2, Stream()).splitlines()[1].endswith(" 0")


def test_load_strip():
    counts = np.array([0, 1, 8, 4])
    assert load_strip(counts, Stream()) == "  \N{SPACE}▁█▄"
    assert load_strip(counts, Stream("ascii"), width=2) == "   .\n  #="
    assert load_strip(np.zeros(3, np.int64), Stream()) == "     "


@pytest.mark.parametrize(
    ("value", "text"), [(12.345, "12.35 s"), (0.0123, "12.30 ms"), (4.2e-5, "42 us")]
)
def test_seconds(value, text):
    assert seconds(value) == text


def test_table():
    assert table([("a", "bb", ""), ("ccc", "d", "e")]) == "  a    bb\n  ccc  d   e"
