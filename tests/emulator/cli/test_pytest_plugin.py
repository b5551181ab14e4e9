"""The pytest plugin, in a pytest of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = """
import emulate
import numpy as np
import pytest
from tests.emulator.cli.example_cases import missing_barrier, reverse

def arrays():
    return np.arange(64, dtype=np.float32), np.zeros(64, np.float32)

@pytest.mark.emulate(schedule="pct:3", seeds=5)
def test_clean(emulate_check):
    x, out = arrays()
    report = emulate_check(reverse, 1, 64, x, out)
    assert report.schedules == 5 and out[0] == 63

@pytest.mark.emulate(schedule=["random", "fifo"], seeds=2)
def test_broken(emulate_check):
    emulate_check(missing_barrier, 1, 64, *arrays())

def test_without_a_marker(emulate_check):
    with pytest.raises(emulate.FindingError):
        emulate_check(missing_barrier, 1, 64, *arrays())

@pytest.mark.emulate(seeds=1)
@pytest.mark.emulate(schedule="random", seeds=3)
class TestOptions:
    @pytest.mark.emulate(seeds=2)
    def test_closest_wins(self, emulate_check):
        assert emulate_check(reverse, 1, 64, *arrays()).schedules == 2

    def test_call_wins(self, emulate_check):
        assert emulate_check(reverse, 1, 64, *arrays(), schedule="random:1").schedules == 1

@pytest.mark.emulate(sched="pct:3")
def test_unknown_option(emulate_check):
    pass
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "test_kernels.py").write_text(TESTS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = ["-p", "emulate.pytest_plugin", "-p", "no:cacheprovider", "--strict-markers", "-v"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", folder, folder],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout


def test_results(output):
    assert "4 passed" in output and "1 failed" in output and "1 error" in output
    assert "test_broken FAILED" in output and "test_unknown_option ERROR" in output


def test_report_has_both_sides_and_no_frames_of_the_engine(output):
    report = output.partition("test_broken ___")[2].partition("short test summary")[0]
    assert "# WRITES" in report and "# READS" in report and " | " in report
    assert "again: python -m emulate replay " in report
    assert "test_kernels.py:18: in test_broken" in report
    assert "emulate/checked" not in report and "emulate/pytest_plugin" not in report


def test_unknown_option_says_what_there_is(output):
    assert "mark.emulate: expected options schedule, seeds" in output and "got sched" in output
