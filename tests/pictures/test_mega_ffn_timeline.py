"""The picture is the one that is drawn today, and what its notes say is so."""

import pytest
from numba import config as numba_config

from tests.pictures import mega_ffn_timeline as timeline
from tests.pictures.mega_ffn_run import DOWN_TILES, UP_TILES, WARPS, record
from tests.pictures.spans import common, outside, union

pytestmark = pytest.mark.skipif(
    numba_config.ENABLE_CUDASIM, reason="the emulator's engines do not need it"
)


def test_picture_is_up_to_date() -> None:
    drawn = timeline.draw().encode()
    same = drawn == timeline.FILE.read_bytes()
    assert same, "python -m tests.pictures.mega_ffn_timeline draws it again; read its notes, too"


def test_notes() -> None:
    runs = record()
    waiting = [run for run in runs if run.counter]
    assert waiting, "no down tile waits"
    counted = min(end for run in waiting for _, end in run.counter)
    finished = [end for run in runs for _, end in run.finishes()]
    assert len(finished) == UP_TILES and max(finished) <= counted
    for run in waiting:
        weights, tokens = (
            [span for bars in run.copies(what).values() for span, is_down in bars if is_down]
            for what in ("weights", "tokens")
        )
        early = [span for span in weights if span[0] < counted]
        # As many as there are stages, and tokens of none.
        assert len(early) == len(run.copies("weights")) == 2
        assert min(start for start, _ in tokens) > counted
    products = [run.products(WARPS["consumers 0"]) for run in runs]
    assert sum(any(is_down for _, is_down in each) for each in products) == DOWN_TILES


def test_spans() -> None:
    spans = [(5, 7), (1, 3), (2, 4)]
    assert union(spans) == [(1, 4), (5, 7)]
    assert outside(spans, 0, 10) == [(0, 1), (4, 5), (7, 10)]
    assert outside(spans, 2, 6) == [(4, 5)]
    assert outside([], 2, 2) == []
    assert common([spans, [(3, 6)]], 0, 10) == [(3, 4), (5, 6)]
