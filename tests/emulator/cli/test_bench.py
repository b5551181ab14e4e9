"""`bench`: what it measures, on less work; and the commands that call suites."""

import json

import pytest

from emulate.bench import measure, report
from emulate.bench.kernels import WrongResult, barrier_case, check_result, matmul_case
from emulate.cli import main


@pytest.fixture
def less_work(monkeypatch):
    monkeypatch.setattr(measure, "BARRIERS", {"checked": 3, "interpreted": 3, "fast": 100})
    monkeypatch.setattr(measure, "SIZES", {"checked": 16, "interpreted": 16, "fast": 32})
    monkeypatch.setattr(report, "_gemm", lambda progress, engines: {})


def test_document(less_work, capsys):
    assert main(["bench", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert set(document["engines"]) == {"simulator", "checked", "interpreted", "fast"}
    for rates in document["engines"].values():
        assert rates["thread_barriers_per_s"] > 0 and rates["macs_per_s"] > 0
    times = document["times_simulator"]["fast"]
    engines = document["engines"]
    assert times["macs_per_s"] == pytest.approx(
        engines["fast"]["macs_per_s"] / engines["simulator"]["macs_per_s"]
    )
    assert times["thread_barriers_per_s"] > 50
    assert "measuring: simulator" in captured.err


def test_text(less_work, capsys):
    assert main(["bench", "--engine", "fast"]) == 0
    assert "thread barriers/s" in capsys.readouterr().out


@pytest.mark.parametrize("engine", ["fast", "checked"])
def test_gemm(engine, monkeypatch):
    monkeypatch.setattr(measure, "GEMM_SIZES", {engine: (128, 256, 128)})
    assert measure.measure_gemm(engine)["macs_per_s"] > 0


def test_wrong_results_are_noticed():
    for case in (barrier_case(2), matmul_case(16)):
        with pytest.raises(WrongResult):
            check_result(case)
        case.launch(engine="fast")
        check_result(case)


def test_a_failing_process_is_one_line():
    with pytest.raises(
        report.ProcessFailed, match=r"^python -m emulate.bench.measure nothing: Key"
    ):
        report.run_module(["emulate.bench.measure", "nothing"])


@pytest.mark.parametrize(
    ("arguments", "called"),
    [
        (["planted", "--json", "--workers", "3"], {"json": True, "workers": 3}),
        (
            ["mutate", "create_indices_64", "--workers", "1"],
            {"kernel": "create_indices_64", "json": False, "workers": 1},
        ),
    ],
)
def test_suites_are_called(arguments, called, monkeypatch):
    calls = []
    monkeypatch.setattr(f"emulate.{arguments[0]}.main", lambda **kw: calls.append(kw) or 1)
    assert main(arguments) == 1
    assert calls == [called]
