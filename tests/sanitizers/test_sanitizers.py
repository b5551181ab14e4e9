"""How the sanitizers' output is read, and that every planted fault is one."""

import subprocess
import sys

import numpy as np
import pytest
from numba import config

import emulate
from tests.sanitizers import __main__ as command
from tests.sanitizers.faults import CONTROL, FAULTS, THREADS, main
from tests.sanitizers.tools import TOOLS, read_output, run_tool, surprise

MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at stores_behind_the_end+0x90
=========     by thread (63,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at reads_without_a_barrier+0x80
=========     and Read access at reads_without_a_barrier+0xb0 [64 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
CLEAN = """\
========= COMPUTE-SANITIZER
matmul: the reference's bytes
========= ERROR SUMMARY: 0 errors
"""
CLEAN_RACES = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


def test_counts_and_first_messages():
    found = read_output(MEMCHECK, 1)
    assert (found.count, found.first) == (1, "Invalid __global__ write of size 4 bytes")
    assert read_output(RACECHECK, 0).count == 1
    assert read_output(CLEAN, 0).count == 0 and read_output(CLEAN_RACES, 0).count == 0
    two = MEMCHECK.replace("1 error", "103 errors (3 errors were not printed)") + CLEAN
    assert read_output(two, 0).count == 103
    assert read_output("no such tool", 1).count is None


def test_initcheck_counts_what_kernels_read():
    host = """\
========= COMPUTE-SANITIZER
========= Host API memory access error at host access to 0x7f45ca85c600 of size 44,880 bytes
=========     Uninitialized access to 0x7f45ca865060 on access by cudaMemcpy source
========= ERROR SUMMARY: 1448 errors
"""
    kernel = "========= Uninitialized __global__ memory read of size 4 bytes\n"
    clean, found = (read_output(text, 0, tool="initcheck") for text in (host, host + 2 * kernel))
    assert (clean.count, clean.first, found.count) == (0, "", 2) and surprise(clean) == ""
    assert read_output(host, 0).count == 1448
    assert read_output("no such tool", 1, tool="initcheck").count is None


@pytest.mark.parametrize(
    ("output", "status", "planted", "wrong"),
    [
        (CLEAN, 0, "", ""),
        (CLEAN_RACES, 0, "", ""),
        (MEMCHECK, 1, "stores_behind_the_end", ""),
        (RACECHECK, 0, "reads_without_a_barrier", ""),
        (CLEAN, 0, "stores_behind_the_end", "was not found"),
        (MEMCHECK, 1, "reads_without_a_barrier", "found, but not in"),
        (MEMCHECK, 1, "", "1 found: Invalid __global__ write"),
        (RACECHECK, 0, "", "1 found: Error: Race"),
        (CLEAN, 3, "", "exit status 3"),
        ("", 0, "", "no summary"),
        ("", 127, "stores_behind_the_end", "no summary"),
        (CLEAN, None, "", "took too long"),
    ],
)
def test_surprises(output, status, planted, wrong):
    said = surprise(read_output(output, status), planted)
    assert wrong in said and bool(wrong) == bool(said)


def test_every_tool_has_a_fault_and_all_runs():
    work = command.jobs(list(TOOLS))
    assert set(FAULTS) == set(TOOLS)
    assert [j.planted for j in work[:4]] == [FAULTS[tool].name for tool in TOOLS]
    assert work[4].tool == "racecheck" and work[4].planted == CONTROL.name
    names = set(command.commands("memcheck"))
    assert len([n for n in names if n.startswith("tiny")]) == 6
    assert {"hopper matmul", "hopper fused", "hopper fp8", "hopper operands"} <= names
    for tool in TOOLS:
        assert {j.name for j in work if j.tool == tool and not j.planted} == names
    shown = {j.tool: j.command for j in work if j.name == "hopper fused"}
    assert "tests.sanitizers.every_lane" in shown.pop("racecheck")
    assert all("tests.sanitizers.hopper" in used for used in shown.values())
    few = command.jobs(["memcheck"], "fused")
    assert [(j.name, bool(j.planted)) for j in few] == [
        ("planted fault", True),
        ("hopper fused", False),
    ]


def test_a_table_and_its_surprises(capsys):
    faulty = command.Job("memcheck", "planted fault", ["a"], "stores_behind_the_end")
    clean = command.Job("racecheck", "a layer", ["b"])
    answers = {"a": read_output(MEMCHECK, 1), "b": read_output(CLEAN_RACES, 0)}
    assert command.check([faulty, clean], lambda tool, args: answers[args[0]]) == 0
    assert "as planted" in capsys.readouterr().out
    answers = {"a": read_output(CLEAN, 0), "b": read_output(RACECHECK, 0)}
    assert command.check([faulty, clean], lambda tool, args: answers[args[0]], 2) == 2
    shown = capsys.readouterr().out
    assert shown.count("SURPRISE") == 2 and "Race reported between" in shown


def test_a_tool_is_run_and_given_up(tmp_path):
    script = tmp_path / "compute-sanitizer"
    script.write_text(f"#!/bin/sh\nprintf '{CLEAN_RACES.strip()}\\n'\necho $@\nexec $7 $8\n")
    script.chmod(0o755)
    found = run_tool(str(script), "racecheck", ["sleep", "0"], 60)
    assert (found.count, found.status) == (0, 0)
    assert "--tool racecheck --report-api-errors no --show-backtrace no sleep 0" in found.output
    assert run_tool(str(script), "racecheck", ["sleep", "60"], 0.2).status is None


def test_without_the_tool(monkeypatch, capsys):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert command.main([]) == 2
    assert "compute-sanitizer" in capsys.readouterr().out


@pytest.mark.skipif(config.ENABLE_CUDASIM, reason="the emulator's engines do not need it")
@pytest.mark.parametrize(
    ("tool", "finding"), [("memcheck", "OOB_WRITE"), ("racecheck", "RACE_RAW")]
)
def test_the_emulator_finds_the_fault_too(tool, finding):
    def check(kernel):
        data, out = np.arange(THREADS, dtype=np.uint32), np.zeros(THREADS, np.uint32)
        report = emulate.check(kernel.py_func, 1, THREADS, data, out)
        found.extend(f.id for f in report.findings)

    found = []
    assert main([tool], check) == 0
    assert finding in found


@pytest.mark.skipif(config.ENABLE_CUDASIM, reason="the emulator's engines do not need it")
def test_the_control_has_no_fault():
    def check(kernel):
        assert kernel is CONTROL
        data, out = np.arange(THREADS, dtype=np.uint32), np.zeros(THREADS, np.uint32)
        assert emulate.check(kernel.py_func, 1, THREADS, data, out, seeds=20).findings == ()
        assert out[32:].tolist() == data[:32][::-1].tolist()

    main(["control"], check)


_EVERY_LANE = """
from nbmoe_kernels import warp_arrival
warp_arrival.ARRIVALS = 32
from nbmoe.formats import NVFP4
from tests.kernels import test_matmul_fp8_sm90 as fp8
from tests.kernels import test_mega_ffn_sm90 as mega
for kind in ("wgmma", "warps", "finish"):
    mega.test_checker_finds_nothing(NVFP4, kind)
fp8.test_checker_finds_nothing(fp8.PAIR)
from nbmoe_kernels.matmul_sm90_tiles import ARRIVALS
assert ARRIVALS == 32
"""


@pytest.mark.skipif(config.ENABLE_CUDASIM, reason="the emulator's engines do not need it")
def test_kernels_in_which_every_lane_arrives_are_right():
    """What racecheck gets: the reference's bytes and no finding of the checked engine."""
    done = subprocess.run([sys.executable, "-c", _EVERY_LANE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
