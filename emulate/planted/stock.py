"""What Numba's own simulator makes of the planted cases.

    python -m emulate.planted.stock

runs every case in it and stores the verdicts next to the cases:

    error         the bug ends in an exception
    wrong output  the output differs; whether it does can depend on the order of OS threads
    hangs         no end within the time limit
    silent        the bug's output is right
    cannot run    the correct twin does not run there: an op or a warp function is missing

The simulator can hang for good, so cases run in a process that is replaced when one does.
"""

import datetime
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import numpy as np

from emulate.planted.suite import load_suite, stock_file, suite_root

LIMIT = 6.0
"""Time for one launch [s]; the slowest correct twin takes 3 s."""


def record() -> dict[str, str]:
    """Run all cases in the simulator, store the verdicts and return them."""
    results = dict(verdicts([case.name for case in load_suite()]))
    from importlib.metadata import version

    document = {
        "date": datetime.date.today().isoformat(),
        "numba-cuda": version("numba-cuda"),
        "limit_seconds": LIMIT,
        "results": results,
    }
    stock_file().write_text(json.dumps(document, indent=1) + "\n")
    return results


def verdicts(names: list[str]) -> Iterator[tuple[str, str]]:
    """The verdict on each case."""
    left = list(names)
    while left:
        for name, clean, bug in _run(list(left)):
            left.remove(name)
            yield name, _verdict(clean, bug)


def _verdict(clean: str, bug: str) -> str:
    return "cannot run" if clean != "silent" else bug


def _run(names: list[str]) -> Iterator[tuple[str, str, str]]:
    """Name, result of the twin, result of the bug; ends early after a hang."""
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(suite_root())}
    process = subprocess.Popen(
        [sys.executable, "-m", "emulate.planted.stock", *names],
        env=environment,
        cwd=suite_root(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    lines: Queue[str] = Queue()
    assert process.stdout is not None
    threading.Thread(target=_forward, args=(process.stdout, lines), daemon=True).start()
    try:
        for name in names:
            results: list[str] = []
            while len(results) < 2 and "hangs" not in results:
                try:
                    results.append(lines.get(timeout=LIMIT).strip())
                except Empty:
                    results.append("hangs")
            yield name, results[0], results[-1]
            if "hangs" in results:
                return
    finally:
        process.kill()
        process.wait()


def _forward(stream: Any, lines: "Queue[str]") -> None:
    for line in stream:
        lines.put(line)


def _work(names: list[str]) -> None:
    """In the simulator's process: print one result a launch."""
    cases = {case.name: case for case in load_suite()}
    for name in names:
        for bug in (False, True):
            print(_launch(cases[name], bug), flush=True)
    # Threads of a hung launch would keep the process alive.
    os._exit(0)


def _launch(case: Any, bug: bool) -> str:
    from numba import cuda

    args = tuple(a.copy() if isinstance(a, np.ndarray) else a for a in case.args())
    try:
        cuda.jit(case.make(bug))[case.grid, case.block, 0, case.shared_bytes](*args)
    except Exception:
        return "error"
    return "silent" if case.is_right(args) else "wrong output"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _work(sys.argv[1:])
    else:
        for case_name, verdict in record().items():
            print(f"{case_name:40} {verdict}")
        print(f"stored in {Path(stock_file()).relative_to(suite_root())}")
