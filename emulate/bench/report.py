"""All measurements in one document."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from emulate.bench.measure import GEMM_SIZES, measure, measure_gemm
from emulate.errors import EmulationError


class ProcessFailed(EmulationError):
    """A measurement in a process of its own failed."""


Progress = Callable[[str], None]
ENGINES = ("simulator", "checked", "interpreted", "fast")


def collect(progress: Progress, engines: tuple[str, ...] = ENGINES) -> dict[str, Any]:
    """Measure the engines one after the other, and the Hopper GEMM on two of them.

    In the result, ``gemm`` has the rates, and the seconds before a process can run: ``first`` with
    an empty cache (all twins and the kernel), ``compile`` a new kernel, ``load`` a known one.

    Args:
        progress: told what is measured now.
        engines: which ones.

    Raises:
        ProcessFailed: a measurement in another process failed.
    """
    results: dict[str, dict[str, float]] = {}
    for engine in engines:
        progress(engine)
        if engine == "simulator":
            results[engine] = run_module(["emulate.bench.measure", engine], simulator=True)
        else:
            results[engine] = measure(engine)
    document: dict[str, Any] = {"machine": machine(), "engines": results}
    document["gemm"] = _gemm(progress, engines)
    base = results.get("simulator")
    if base:
        document["times_simulator"] = {
            engine: {name: rates[name] / base[name] for name in base if name.endswith("_per_s")}
            for engine, rates in results.items()
            if engine != "simulator"
        }
    return document


def _gemm(progress: Progress, engines: tuple[str, ...]) -> dict[str, float]:
    """The Hopper GEMM: rates, and what a process waits for before it runs [s]."""
    result: dict[str, float] = {}
    for engine in GEMM_SIZES:
        if engine in engines:
            progress(f"Hopper GEMM, {engine}")
            result[f"{engine}_macs_per_s"] = measure_gemm(engine)["macs_per_s"]
    if "fast" not in engines:
        return result
    with tempfile.TemporaryDirectory() as folder:
        for name, stages in (("first", 4), ("compile", 3), ("load", 3)):
            progress(f"Hopper GEMM, {name}")
            measured = run_module(
                ["emulate.bench.measure", "fast", "gemm", str(stages)], cache=folder
            )
            result[f"{name}_seconds"] = measured["compile_seconds"]
    return result


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    import numba
    import numpy

    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numba": numba.__version__,
        "numpy": numpy.__version__,
    }


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def run_module(command: list[str], *, simulator: bool = False, cache: str | None = None) -> Any:
    """What a module of this package prints as JSON, in a process of its own.

    Args:
        command: the module and its arguments.
        simulator: `numba.cuda` is Numba's simulator there.
        cache: folder of compiled kernels there.

    Raises:
        ProcessFailed: it failed; the message is its last line.
    """
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1" if simulator else "0"}
    if cache is not None:
        environment["NBMOE_CACHE_DIR"] = cache
    environment["PYTHONPATH"] = os.pathsep.join(path or "." for path in sys.path)
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ProcessFailed(f"python -m {' '.join(command)}: {last}")
    return json.loads(done.stdout.splitlines()[-1])
