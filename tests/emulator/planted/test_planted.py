"""Planted bugs are caught with their lines, and their correct twins are clean."""

import json
import subprocess
import sys

import pytest

import emulate.planted.run as planted_run
from emulate.findings import Finding, Site
from emulate.planted import Outcome, load_suite, run_case
from emulate.planted.document import table
from emulate.planted.stock import verdicts
from emulate.planted.suite import stock_results, suite_root
from tests.emulator.planted import BYTES, GROUPS, Case, all_cases
from tests.emulator.planted.case import case, zeros

CASES = {case.name: case for case in all_cases()}


def every_fourth() -> list[str]:
    """Of each group the first case and every fourth from there."""
    names = []
    for group in GROUPS:
        names += [case.name for case in all_cases() if case.group == group][::4]
    return names


def test_the_suite_is_large_and_its_cases_are_complete():
    assert len(CASES) == len(all_cases()) >= 100, "names are unique"
    assert {case.group for case in all_cases()} == set(GROUPS)
    for planted in all_cases():
        _, lines = planted.lines
        assert (len(lines) == 0) == (planted.finds == BYTES), planted.name
        assert len(lines) <= 2, planted.name
        assert planted.make.__doc__, planted.name
        assert planted.want(*planted.args()), f"{planted.name} has no output to check"


@pytest.mark.parametrize("name", every_fourth())
def test_bug_is_caught_and_twin_is_clean(name):
    outcome = run_case(CASES[name])
    assert outcome.caught, outcome.found
    assert outcome.quiet, outcome.alarms
    assert outcome.right


def a_case(**changes) -> Case:
    """A case that is no part of the suite."""
    from tests.emulator.planted import case as module

    known = list(module.CASES)
    options = {"args": lambda: (zeros(1),), "want": lambda out: {0: [1]}, "block": 1, **changes}

    @case(options.pop("finds", "OOB_WRITE"), **options)
    def made(bug):
        def kernel(out):
            out[1 if bug else 0] = 1  # BUG-A

        return kernel

    module.CASES[:] = known
    return made


def test_a_case_is_caught_only_with_its_id_its_line_and_nothing_else():
    good = a_case()
    (line,) = good.lines[1]
    site = Site(good.lines[0], line, "kernel")
    other = Site(good.lines[0], line + 1, "kernel")
    assert good.catches(Finding("OOB_WRITE", "", (site,)))
    assert not good.catches(Finding("OOB_READ", "", (site,)))
    assert not good.catches(Finding("OOB_WRITE", "", (other,)))
    assert not good.explains(Finding("UNINIT_READ", "", (other,)))
    assert a_case(also=("UNINIT_READ",)).explains(Finding("UNINIT_READ", "", (other,)))
    race = a_case(finds="RACE_RAW")
    assert race.catches(Finding("RACE_WAR", "", (site, other)))
    assert not race.catches(Finding("RACE_WAW", "", (site, other)))


def test_outcomes_of_bad_cases():
    assert run_case(a_case()).passed
    wrong_id = run_case(a_case(finds="UNINIT_READ"))
    assert not wrong_id.caught and wrong_id.quiet and wrong_id.right
    wrong_output = run_case(a_case(want=lambda out: {0: [2]}))
    assert wrong_output.caught and not wrong_output.right and not wrong_output.passed
    always = a_case(args=lambda: (zeros(0),), want=lambda out: {0: []})
    assert not run_case(always).quiet


def test_main_reports_and_fails(capsys, monkeypatch):
    good = Outcome("one", "group", "OOB_READ", True, ("OOB_READ 3",), True, (), True, 0.5)
    bad = Outcome("two", "group", "DEADLOCK", False, (), True, (), True, 0.5)
    for outcomes, status in (([good], 0), ([good, bad], 1)):
        monkeypatch.setattr(planted_run, "run_suite", lambda *_, kept=outcomes: kept)
        assert planted_run.main(json=True) == status
        document = json.loads(capsys.readouterr().out)
        assert document["summary"]["cases"] == len(outcomes)
        assert document["summary"]["caught"] == 1
        assert planted_run.main() == status
        assert ("MISSED" in capsys.readouterr().out) == bool(status)


def test_without_a_checkout_there_is_a_message(capsys, monkeypatch):
    def missing():
        raise planted_run.SuiteMissing("planted: expected a checkout")

    monkeypatch.setattr(planted_run, "load_suite", missing)
    assert planted_run.main() == 2
    assert "expected a checkout" in capsys.readouterr().out


def test_the_stock_simulator_has_been_tried_on_every_case():
    assert set(stock_results()) == set(CASES) == {case.name for case in load_suite()}


def test_the_page_has_the_table_of_this_suite():
    page = suite_root() / "docs" / "emulate" / "planted.md"
    assert table() in page.read_text(encoding="utf-8")


def test_verdicts_of_the_stock_simulator():
    names = ["partial_last_block", "nibbles_swapped", "counters_not_cleared"]
    found = dict(verdicts([*names, "wait_relaxed"]))
    assert found["partial_last_block"] == "error"
    assert found["nibbles_swapped"] == "wrong output"
    assert found["wait_relaxed"] == "cannot run"
    assert set(found) == {*names, "wait_relaxed"}


def test_the_suite_runs_without_pytest():
    code = (
        "import sys, emulate.planted; emulate.planted.load_suite(); print('pytest' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=suite_root(), capture_output=True, text=True
    )
    assert run.stdout == "False\n", run.stderr
