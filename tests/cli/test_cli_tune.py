"""`nbmoe tune`: measures what the heuristics leave open and writes what they then read."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from nbmoe.cli import tune
from nbmoe_kernels import hopper_table
from nbmoe_kernels.heuristics_sm90 import HOPPER_PAIRS, hopper_matmul_config, rows_per_busy_slot
from nbmoe_kernels.tuning import TuningProblem

ONE_MODEL = ("--models", "qwen3-30b-a3b", "--tokens", "1,128", "--pairs", "nvfp4:nvfp4")


class Slowest:
    """A stopwatch that prefers the last candidate of every problem."""

    card = "no card"

    def __init__(self):
        self.measured = []

    def __call__(self, problem, config):
        self.measured.append((problem, config))
        return 100.0 - problem.candidates().index(config)


@pytest.fixture
def stopwatch(monkeypatch):
    made = Slowest()
    monkeypatch.setattr(tune, "make_stopwatch", lambda: made)
    return made


def test_pairs_are_those_of_the_kernels():
    assert tune.PAIRS == tuple(":".join(pair) for pair in HOPPER_PAIRS)


def test_a_table_is_written_and_decides(nbmoe, stopwatch, tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    result = nbmoe("tune", *ONE_MODEL, "--table", path)
    assert result.status == 0, result.err
    assert f"wrote {path}" in result.out
    assert "0/" in result.err and "nvfp4_sm90_n" in result.err
    about = json.loads(path.read_text())
    assert about["card"] == "no card" and set(about) >= {"date", "command", "unit", "entries"}
    problems = tune.tuning_problems(["Qwen3-30B-A3B"], (1, 128), ["nvfp4:nvfp4"])
    assert [(p.n, p.k, p.total_rows) for p in problems] == [
        (1536, 2048, 8), (1536, 2048, 1024), (2048, 768, 8), (2048, 768, 1024),
    ]  # fmt: skip
    # Each candidate once, in order, and nothing that was rejected.
    assert stopwatch.measured == [(p, c) for p in problems for c in p.candidates()]
    monkeypatch.setenv(hopper_table.VARIABLE, str(path))
    hopper_matmul_config.cache_clear()
    try:
        for p in problems:
            arguments = (p.a_format, p.b_format, p.n, p.k, p.num_active, p.total_rows)
            assert hopper_matmul_config(*arguments) == p.candidates()[-1] != p.candidates()[0]
    finally:
        hopper_matmul_config.cache_clear()


def test_the_preferred_candidate_wins_within_the_noise(nbmoe, stopwatch, tmp_path, monkeypatch):
    def time(self, problem, config):
        return 100.5 if problem.candidates().index(config) == 0 else 100.0

    monkeypatch.setattr(Slowest, "__call__", time)
    path = tmp_path / "table.json"
    assert nbmoe("tune", *ONE_MODEL, "--table", path).status == 0
    problems = tune.tuning_problems(["Qwen3-30B-A3B"], (1, 128), ["nvfp4:nvfp4"])
    for measured, problem in zip(hopper_table.read_table(path), problems, strict=True):
        assert measured.shape.widths == problem.candidates()[0].widths
        assert measured.microseconds == 100.5
        assert measured.rows == rows_per_busy_slot(128, problem.total_rows)


def test_of_batches_that_choices_do_not_tell_apart_one_is_measured():
    """32 experts, 1 and 16 rows: one row a busy slot. The packaged table has one entry, too."""
    problems = tune.tuning_problems(["DeepSeek-V3-EP8"], (16, 1, 128), ["nvfp4:nvfp4"])
    assert [(p.total_rows, p.rows) for p in problems] == 2 * [(16, 1), (128, 4)]


def test_without_a_gpu(nbmoe, tmp_path, monkeypatch):
    monkeypatch.setattr("nbmoe.backend.find_gpus", lambda: ((), "no NVIDIA driver"))
    monkeypatch.setattr("nbmoe.backend.simulator_enabled", lambda: False)
    path = tmp_path / "table.json"
    result = nbmoe("tune", *ONE_MODEL, "--table", path)
    assert result.status == 2 and not path.exists()
    assert "tune(): GPU: expected a GPU of compute capability 9.0" in result.err
    assert "no NVIDIA driver" in result.err and result.err.count("\n") == 1


def test_another_gpu(nbmoe, tmp_path, monkeypatch):
    from nbmoe.gpus import Gpu

    found = ((Gpu(0, "NVIDIA B200", (10, 0)),), "")
    for module in ("backend", "gpus"):
        monkeypatch.setattr(f"nbmoe.{module}.find_gpus", lambda: found)
    monkeypatch.setattr("nbmoe.backend.problem", lambda name: None)
    result = nbmoe("tune", *ONE_MODEL, "--table", tmp_path / "table.json")
    assert result.status == 2
    assert "got NVIDIA B200 of 10.0" in result.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--models", "nobody"), "names out of"),
        (("--tokens", "0"), "numbers of at least 1"),
        (("--tokens", "a"), "numbers of at least 1"),
        (("--pairs", "nvfp4:bf16"), "invalid choice"),
        (("--table", "/nowhere/table.json"), "a file that can be written"),
    ],
)
def test_bad_arguments(nbmoe, stopwatch, arguments, says):
    result = nbmoe("tune", *arguments)
    assert result.status == 2 and says in result.err
    assert not stopwatch.measured


def test_operands_have_the_sizes_that_kernels_read():
    problem = TuningProblem("mxfp4", "mxfp4", 200, 160, 32, 12)
    arrays = tune.random_operands(problem, "reference")
    assert arrays["weights"].nbytes == 32 * 4 * 3 * 2176
    assert arrays["tokens"].nbytes == 3 * (16 + 8 * 32) * 128
    assert arrays["output"].shape == (12 * 200,)
    assert arrays["expert_start"][0] == 0 and arrays["expert_start"][-1] == 12
    assert (np.diff(arrays["expert_start"].astype(int)) >= 0).all()


def test_help_imports_no_compiler():
    """The command line may still turn the simulator on."""
    code = "import sys, nbmoe.cli; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_stopwatch_launches_the_config_on_operands_that_it_keeps(monkeypatch):
    launches, graphs = [], []

    class Recorder:
        """An executor that only notes what it is to launch."""

        multiprocessors = 3

        def __call__(self, kernel, grid, args, stream):
            launches.append((kernel, args, stream))

    class Timer:
        def capture(self, call):
            call("a stream")
            graphs.append(call)
            return call

        def measure(self, launch):
            spread = SimpleNamespace(median=12.5)
            return SimpleNamespace(clean=spread, dirty=SimpleNamespace(median=99.0))

        def forget(self):
            graphs.clear()

    made = []

    def operands(problem, make=tune.random_operands):
        made.append(problem)
        return make(problem, "reference")

    monkeypatch.setattr(tune, "random_operands", operands)
    stopwatch = object.__new__(tune.Stopwatch)
    stopwatch.timer, stopwatch._held = Timer(), (None, {})
    stopwatch._run = Recorder()
    problems = [TuningProblem("nvfp4", "nvfp4", 64, 64, 2, rows) for rows in (3, 300)]
    for problem in problems:
        for config in problem.candidates()[:2]:
            assert stopwatch(problem, config) == 12.5
            kernel, args, stream = launches[-1]
            assert config.name in kernel.name and stream == "a stream"
            assert len(args) == len(kernel.params) and not graphs
    assert made == problems
