"""`nbmoe bench` where there is no GPU: clear errors, and what needs none."""

import json

import pytest

from nbmoe.bench.models import MODELS
from nbmoe.cli import bench
from tests.bench.conftest import TOY, FakeTimer


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("nbmoe.backend.find_gpus", lambda: ((), "no NVIDIA driver"))
    monkeypatch.setattr("nbmoe.backend.simulator_enabled", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu(nbmoe):
    result = nbmoe("bench")
    assert result.status == 2 and not result.out
    assert result.err == (
        "nbmoe bench: bench(): GPU: expected a usable GPU, got no NVIDIA driver — it measures GPUs;"
        " `nbmoe demo` runs the kernels without one\n"
    )


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "Qwen4"], "--models: expected names out of Qwen3-30B-A3B, "),
        (["--tokens", "1,x"], "--tokens: expected numbers above 0 with commas between, got '1,x'"),
        (["--tokens", "0"], "--tokens: expected numbers above 0"),
        (["--formats", "int4"], "--formats: expected names out of nvfp4, "),
        (["--legs", "up"], "--legs: expected names out of logits, "),
        (["--peers", "cutlass"], "--peers: expected auto, none, or names out of DeepGEMM"),
        (["--json", "/no/such/folder/x.json"], "file: expected an existing folder"),
    ],
)
def test_bad_arguments_are_found_before_the_gpu(nbmoe, arguments, message):
    result = nbmoe("bench", *arguments)
    assert result.status == 2 and message in result.err and result.err.count("\n") == 1


def test_list_of_models(nbmoe):
    result = nbmoe("bench", "--models", "list")
    assert result.status == 0 and result.out.count("\n") == len(MODELS)
    assert "gpt-oss-20b            32 experts, top 4, hidden 2880, moe dim 2880\n" in result.out


def test_a_run_on_a_stand_in(nbmoe, monkeypatch, tmp_path):
    """Rows on the terminal as they come, then tables; the JSON has the command and all rows."""
    from nbmoe.bench import card, memory, timing

    monkeypatch.setenv("NBMOE_BACKEND", "reference")
    monkeypatch.setitem(MODELS, "toy", TOY)
    monkeypatch.setattr(bench, "_require_gpu", lambda: None)
    monkeypatch.setattr(timing, "Timer", FakeTimer)
    made = memory.Memory(on_gpu=False)
    monkeypatch.setattr(memory, "Memory", lambda: made)
    facts = {"card": "Toy GPU", "driver": "1.2", "cuda": "13.0"}
    monkeypatch.setattr(card, "facts", lambda timer: dict(facts))
    path, table = tmp_path / "rows.json", tmp_path / "rows.md"
    arguments = ["--models", "TOY", "--tokens", "2,3", "--formats", "bf16", "--legs", "down,layer"]
    files = ["--json", path, "--markdown", table]
    result = nbmoe("bench", *arguments, "--peers", "none", *files)
    assert result.status == 0, result.err
    assert result.out.startswith("Toy GPU, driver 1.2, CUDA 13.0\n\ntoy\n     T what")
    written = json.loads(path.read_text())
    packed = [r for r in written["rows"] if r["variant"] == "packed"]
    assert [(r["tokens"], r["leg"]) for r in packed] == [
        (2, "down"),
        (2, "layer"),
        (3, "down"),
        (3, "layer"),
    ]
    assert written["card"] == "Toy GPU" and written["skew"] == "uniform"
    assert written["command"] == (
        "nbmoe bench --models TOY --tokens 2,3 --skew uniform --seed 0 --formats bf16"
        " --legs down,layer --peers none --runs 15"
    )
    assert table.read_text().startswith("### toy\n\n| leg | T = 2 | T = 3 | error |")
