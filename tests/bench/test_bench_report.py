"""Rows on a terminal and in tables; percentiles; the kernel that cleans a cache."""

import numpy as np
import pytest

from nbmoe.backend import executor, simulator_enabled
from nbmoe.bench import card, flush, launches, report
from nbmoe.bench.floors import Work
from nbmoe.bench.memory import Memory
from nbmoe.bench.row import Row
from nbmoe.bench.timing import Spread, Times, spread
from tests.bench.conftest import FakeTimer


def timed(library, us, tokens=16, leg="pair", **keys):
    around = Spread(us, us - 1, us + 2), Spread(us - 3, us - 4, us)
    form = {"nbmoe": "nvfp4"}.get(library, "fp8_block x fp8_group")
    work = Work(43e6, 2e10, 5.0)  # 10 us
    return Row("toy", tokens, library, form, "packed", leg, Times(*around), work, 1.7e-3, **keys)


def test_percentiles():
    assert spread([float(i) for i in range(15, 0, -1)]) == Spread(8.0, 2.0, 14.0)
    assert spread([3.0]) == Spread(3.0, 3.0, 3.0)


def test_line():
    text = report.line(timed("nbmoe", 20.0, digest="abc"))
    assert text.split() == (
        "16 nbmoe nvfp4, packed pair 20.0 17.0 19.0-22.0 10.0 50 % 1000 1.7e-03 abc".split()
    )
    layer = timed("nbmoe", 50.0, leg="layer", others={"route": 10.0, "down": 30.5})
    assert report.line(layer).endswith("sum of its 2 kernels' legs 40.5")
    failed = Row("toy", 1, "nbmoe", "fp8", "packed", "down", note="RuntimeError: no")
    assert report.line(failed).split()[-2:] == ["RuntimeError:", "no"]
    assert len(report.HEADING.split("hash")[0]) == len(
        report.line(timed("nbmoe", 1.0, digest="abc")).split("abc")[0]
    )


def test_tables_hold_the_best_in_bold():
    rows = [
        timed("DeepGEMM fp8", 30.0),
        timed("nbmoe", 20.0),
        timed("nbmoe", 8.0, tokens=1),
        timed("nbmoe", 15.0, leg="gate_up"),
        Row("toy", 16, "nbmoe", "fp8", "packed", "pair", note="RuntimeError: no"),
    ]
    assert report.markdown(rows).split("\n") == [
        "### toy",
        "",
        "| gate/up + down | T = 1 | T = 16 | error |",
        "|---|--:|--:|--:|",
        "| nbmoe nvfp4, packed | **8.0** / 5.0 (125 %) | **20.0** / 17.0 (50 %) | 1.7e-03 |",
        "| DeepGEMM fp8 (fp8_block x fp8_group) | - | 30.0 / 27.0 (33 %) | 1.7e-03 |",
        "",
        "| fastest | T = 1 | T = 16 |",
        "|---|--:|--:|",
        "| ours | 8.0 nbmoe nvfp4, packed | 20.0 nbmoe nvfp4, packed |",
        "| peers' | - | 30.0 DeepGEMM fp8, packed |",
        "| times as fast | - | 1.50 |",
        "",
        "| leg | T = 16 | error |",
        "|---|--:|--:|",
        "| gate_up: nbmoe nvfp4, packed | 15.0 / 12.0 (67 %) | 1.7e-03 |",
        "",
    ]


def test_reading_memory_writes_none_of_it():
    """Unless all that a thread read is the unlikely word, which shows that it reads everything."""
    backend = "cudasim" if simulator_enabled() else "emulate"
    run = executor(backend)
    small = flush.make_read_memory()
    words = np.arange(4 * 256 * 2, dtype=np.uint32)
    before = words.copy()
    small.launch(run, (1, 1, 1), words, len(words) // 4)
    assert np.array_equal(words, before)
    words[:] = 0
    words[4 * 256 + 7] = flush.UNLIKELY
    small.launch(run, (1, 1, 1), words, len(words) // 4)
    assert words[0] == flush.UNLIKELY


class Recorder:
    """An executor that keeps what is launched."""

    multiprocessors = 132

    def __init__(self, cc):
        self.cc, self.launched = cc, []

    def __call__(self, kernel, grid, args, stream):
        self.launched.append(kernel.name)


@pytest.mark.parametrize("cc", [(8, 0), (9, 0)])
def test_every_launcher_launches_one_kernel(cc, monkeypatch):
    """With the arguments that its kernel takes."""
    run = Recorder(cc)
    monkeypatch.setattr(launches, "executor", lambda name: run)
    calls = launches.launchers(1 << 20)
    assert len(calls) == (6 if cc == (9, 0) else 5)
    for call in calls.values():
        call(None)
    assert len(set(run.launched)) == len(calls)


def test_what_fails_on_the_card_says_so(monkeypatch):
    monkeypatch.setattr(card, "QUANTIZED", ())
    facts = list(card.measure(FakeTimer(), Memory(on_gpu=False)))
    assert [fact["case"] for fact in facts][:2] == ["empty", "copy"]
    assert all("AttributeError" in card.line(fact) for fact in facts[:2])
    times = {"median": 3.0, "p10": 2.0, "p90": 4.0}
    both = {"case": "copy", "us": {"dirty": times, "clean": times}, "TB/s": 4.2}
    assert card.line(both).split() == "copy 3.0 / 3.0 us 4.20 TB/s".split()
    assert card.line({"case": "launch", "us": times}).split() == "launch 3.0 us".split()
