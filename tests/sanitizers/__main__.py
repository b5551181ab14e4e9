"""Runs every tool over its planted fault and over the library; see the package."""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.sanitizers.faults import CONTROL, FAULTS
from tests.sanitizers.hopper import GROUPS
from tests.sanitizers.tools import TOOLS, Finding, run_tool, surprise

FIXTURES = Path(__file__).parents[1] / "fixtures"
_PYTHON = [sys.executable, "-m"]
Runner = Callable[[str, list[str]], Finding]


@dataclass(frozen=True)
class Job:
    """A command under a tool; ``planted`` is the kernel that must be reported."""

    tool: str
    name: str
    command: list[str]
    planted: str = ""


def commands(tool: str, only: str = "") -> dict[str, list[str]]:
    """What must be clean, by name: a layer of each fixture, and the kernels for Hopper.

    Args:
        tool: under which; racecheck gets Hopper's kernels with arrivals of every lane.
        only: what a name must contain.
    """
    module = "every_lane" if tool == "racecheck" else "hopper"
    layers = {
        path.name: [*_PYTHON, "nbmoe", "run", str(path), *"--tokens 129 --seed 0".split()]
        for path in sorted(FIXTURES.glob("*/"))
    }
    on_gpu = {name: [*command, "--backend", "gpu"] for name, command in layers.items()}
    hopper = {f"hopper {g}": [*_PYTHON, f"tests.sanitizers.{module}", g] for g in GROUPS}
    return {name: command for name, command in {**on_gpu, **hopper}.items() if only in name}


def jobs(tools: list[str], only: str = "") -> list[Job]:
    """Faults first: a tool that misses its own makes the rest worthless."""
    faults = [
        Job(tool, "planted fault", [*_PYTHON, "tests.sanitizers.faults", tool], FAULTS[tool].name)
        for tool in tools
    ]
    if "racecheck" in tools:
        control = [*_PYTHON, "tests.sanitizers.faults", "control"]
        faults.append(Job("racecheck", "control", control, CONTROL.name))
    clean = [Job(tool, name, c) for tool in tools for name, c in commands(tool, only).items()]
    return faults + clean


def check(work: list[Job], run: Runner, workers: int = 1) -> int:
    """Run jobs, print a row each, and count surprises."""
    count = 0
    print(f"{'tool':<10} {'run':<28} {'found':>6} {'s':>5}")
    with ThreadPoolExecutor(workers) as pool:
        for job, found in zip(work, pool.map(lambda j: run(j.tool, j.command), work), strict=True):
            wrong = surprise(found, job.planted)
            count += bool(wrong)
            shown = "-" if found.count is None else found.count
            verdict = f"  SURPRISE: {wrong}" if wrong else "  as planted" if job.planted else ""
            print(f"{job.tool:<10} {job.name:<28} {shown:>6} {found.seconds:>5.0f}{verdict}")
            if wrong:
                print("    " + "\n    ".join(found.output.splitlines()[-40:]))
            sys.stdout.flush()
    return count


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 if anything is not as it should be, 2 if nothing can be run."""
    parser = argparse.ArgumentParser(prog="python -m tests.sanitizers", description=__doc__)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a run")
    parser.add_argument("--only", default="", help="what a run's name must contain")
    options = parser.parse_args(argv)
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        print("no compute-sanitizer in PATH: it comes with the CUDA toolkit")
        return 2
    # Once without a tool, so that kernels are compiled and results are right.
    together = {tuple(c) for tool in options.tools for c in commands(tool, options.only).values()}
    with ThreadPoolExecutor(options.jobs) as pool:
        plain = list(pool.map(partial(subprocess.run, capture_output=True), sorted(together)))
    failed = [p for p in plain if p.returncode]
    for process in failed:
        print(f"without a tool: {' '.join(process.args)}\n{process.stderr.decode()[-3000:]}")
    count = check(
        jobs(options.tools, options.only),
        lambda tool, command: run_tool(sanitizer, tool, command, options.limit),
        options.jobs,
    )
    print(f"{count + len(failed)} surprises")
    return 1 if count or failed else 0


if __name__ == "__main__":
    sys.exit(main())
