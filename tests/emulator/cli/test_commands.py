"""`run`, `check`, `replay` and `coverage`."""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from emulate.cli import main
from tests.emulator.cli.example_cases import line_of

PATH = Path(__file__).with_name("example_cases.py")


def target(name):
    return f"{PATH}::{name}"


@pytest.fixture
def run(capsys):
    """Runs the command line: its status, what it printed, its error."""

    def call(*args):
        status = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def as_json(run, *args):
    status, out, err = run(*args, "--json")
    assert err == ""
    return status, json.loads(out)


@pytest.mark.parametrize("engine", ["fast", "interpreted", "checked"])
def test_run(run, engine):
    status, document = as_json(run, "run", target("clean"), "--engine", engine)
    assert status == 0 and document["engine"] == engine and document["blocks"] == 1
    expected = zlib.crc32(np.arange(64, dtype=np.float32)[::-1].tobytes())
    assert int(document["arrays"][1]["crc32"], 16) == expected


def test_run_on_the_checked_engine_reports_findings(run):
    status, document = as_json(run, "run", target("broken"), "--engine", "checked")
    assert status == 1 and document["findings"]


def test_run_prints_text(run):
    status, out, err = run("run", target("constant"))
    assert status == 0 and err == ""
    assert out.startswith("reverse: fast, 1 blocks") and "float32[64]" in out


def test_module_target(run):
    status, _, _ = run("run", "tests.emulator.cli.example_cases:clean")
    assert status == 0


def test_check_finds_both_lines(run):
    status, document = as_json(run, "check", target("broken"), "--schedule", "random", "--seeds", 3)
    assert status == 1
    assert document["schedules"] == ["random:0", "random:1", "random:2"]
    races = [f for f in document["findings"] if f["id"].startswith("RACE")]
    lines = {site["line"] for site in races[0]["sites"]}
    assert lines == {line_of("WRITES"), line_of("READS")}


def test_check_is_quiet_on_clean_kernels(run):
    status, out, _ = run("check", target("clean"))
    assert status == 0 and "0 findings, 15 schedules" in out


def test_check_text_has_two_columns_and_a_token(run):
    status, out, _ = run("check", target("broken"), "--schedule", "adversarial:0")
    assert status == 1
    assert "# WRITES" in out and "# READS" in out and " | " in out
    assert "again: python -m emulate replay adversarial:0@" in out


def test_replay_repeats_a_finding(run):
    _, found = as_json(run, "check", target("broken"), "--schedule", "pct:2", "--seeds", 2)
    finding = found["findings"][-1]
    status, again = as_json(run, "replay", finding["schedule"], target("broken"))
    assert status == 1
    assert finding in [{**f, "schedule": finding["schedule"]} for f in again["findings"]]


def test_replay_refuses_another_kernel(run):
    _, found = as_json(run, "check", target("broken"), "--schedule", "fifo")
    status, out, err = run("replay", found["replay"][0], target("clean"))
    assert status == 2 and out == ""
    assert "it belongs to kernel content" in err and err.count("\n") == 1


@pytest.mark.parametrize("token", ["lifo", "pct:3:1@12", "picks:abc@01234567", "exhaustive:2", "@"])
def test_replay_refuses_damaged_tokens(run, token):
    status, _, err = run("replay", token, target("clean"))
    assert status == 2 and err.startswith("emulate replay: token: ") and err.count("\n") == 1


def test_shrink_gives_a_short_token(run):
    _, document = as_json(run, "check", target("broken"), "--schedule", "random:3", "--shrink")
    token = document["replay"][0]
    assert token.startswith(("fifo@", "picks:")) and len(token) < 60
    status, again = as_json(run, "replay", token, target("broken"))
    assert status == 1
    assert document["findings"][0]["id"] in {f["id"] for f in again["findings"]}


def test_exhaustive(run):
    status, document = as_json(run, "check", target("broken"), "--schedule", "exhaustive:1")
    assert status == 1
    assert {f["id"] for f in document["findings"]} >= {"RACE_RAW"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "has no 'nothing'; its cases: constant"),
        ("number", "an emulate.Case, got int"),
        ("missing_barrier", "an emulate.Case, got"),
        ("line_of", "could not be called"),
        ("too_large", "2048"),
        ("no_grid", "grid: expected"),
        ("too_much_shared", "shared_bytes: expected"),
    ],
)
def test_bad_cases(run, name, message):
    status, out, err = run("run", target(name))
    assert status == 2 and out == ""
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize("text", ["nothing", "no.py::a", "no_such_module:a", "::", "a.py::"])
def test_bad_targets(run, text):
    status, _, err = run("run", text)
    assert status == 2 and err.startswith("emulate run: target: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    "args", [("--schedule", "lifo"), ("--schedule", "pct:0"), ("--seeds", "0")]
)
def test_bad_schedules(run, args):
    status, _, err = run("check", target("clean"), *args)
    assert status == 2 and "expected" in err and err.count("\n") == 1


def test_limits_are_findings_of_a_check(run):
    for name, id in [("too_large", "BLOCK_TOO_LARGE"), ("too_much_shared", "SMEM_OVERFLOW")]:
        status, document = as_json(run, "check", target(name))
        assert status == 1
        assert [f["id"] for f in document["findings"]] == [id]


def test_coverage(run):
    status, document = as_json(run, "coverage", target("clean"))
    (file,) = document["files"]
    assert status == 0 and file["missing"] == [line_of("NEVER")]
    assert (file["lines"], file["covered"]) == (7, 6)


def test_coverage_text_names_the_line(run):
    _, out, _ = run("coverage", target("clean"))
    assert f"never runs: {line_of('NEVER')}: out[0] = float32(1)" in out


def test_trace(run, tmp_path):
    file = tmp_path / "trace.json"
    status, _, _ = run("run", target("clean"), "--trace", file)
    assert status == 0
    events = json.loads(file.read_text())["traceEvents"]
    waits = [e for e in events if e["ph"] == "X"]
    # 63 of 64 threads wait: two warps, one barrier.
    assert [(e["name"], e["cat"], e["args"]["lanes"]) for e in waits] == [
        ("syncthreads", "barrier", 32),
        ("syncthreads", "barrier", 31),
    ]


@pytest.mark.parametrize(("options", "overlap"), [((), True), (("--copies", "eager"), False)])
def test_trace_shows_copies_in_flight(run, tmp_path, options, overlap):
    file = tmp_path / "trace.json"
    run("run", target("pipeline"), "--trace", file, *options)
    events = json.loads(file.read_text())["traceEvents"]
    (ballot,) = [e for e in events if e["name"] == "t_ballot"]
    copies = [e for e in events if e["name"] == "t_copy"]
    around = [e for e in copies if e["ts"] < ballot["ts"] < e["ts"] + e["dur"]]
    assert bool(around) == overlap


def test_trace_of_a_deadlock_is_written(run, tmp_path):
    file = tmp_path / "trace.json"
    status, _, err = run("run", target("stuck"), "--trace", file)
    assert status == 2 and "wait and none can run" in err
    names = {e["name"] for e in json.loads(file.read_text())["traceEvents"]}
    assert "syncthreads (never ends)" in names
