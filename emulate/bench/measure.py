"""Measures one engine; run as a module for Numba's simulator and for a cold cache.

Seconds are those that one waits: most of the simulator's go into handing over between OS threads.
Other load on the machine falsifies them.

    python -m emulate.bench.measure ENGINE
    python -m emulate.bench.measure ENGINE gemm STAGES
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from emulate.bench import kernels
from emulate.case import Case

# Amounts of work that take about a second an engine; rates do not depend on them.
BARRIERS = {"simulator": 20, "checked": 100, "interpreted": 200, "fast": 20_000}
SIZES = {"simulator": 32, "checked": 48, "interpreted": 48, "fast": 256}
REPEATS = 3
GEMM_SIZES = {"checked": (256, 512, 1024), "fast": (512, 1024, 1024)}
"""Rows, columns and inner size of the Hopper GEMM."""


def measure(engine: str) -> dict[str, float]:
    """Rates of an engine.

    Args:
        engine: ``fast``, ``checked``, ``interpreted``, or ``simulator`` in a process that has it.

    Returns:
        ``thread_barriers_per_s``: 128 threads, times barriers, a second. ``macs_per_s``:
        multiply-adds of the tiled matmul a second. ``compile_seconds``: to compile both kernels or
        to load them. All of the best of some launches.
    """
    launch = _launcher(engine)
    barrier = kernels.barrier_case(BARRIERS[engine])
    product = kernels.matmul_case(SIZES[engine])
    seconds, compiled = _best(launch, barrier)
    product_seconds, product_compiled = _best(launch, product)
    return {
        "thread_barriers_per_s": kernels.BARRIER_THREADS * BARRIERS[engine] / seconds,
        "macs_per_s": SIZES[engine] ** 3 / product_seconds,
        "compile_seconds": compiled + product_compiled,
    }


def _best(launch: Callable[[Case], float], case: Case) -> tuple[float, float]:
    """The shortest time of a launch, and the time to compile before the first one [s]."""
    compiled = launch(case)
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        launch(case)
        best = min(best, time.perf_counter() - start)
    kernels.check_result(case)
    return best, compiled


def _launcher(engine: str) -> Callable[[Case], float]:
    if engine == "simulator":
        return _launch_simulator
    if engine == "checked":

        def check(case: Case) -> float:
            report = case.check(schedules=["fifo"])
            if report.findings:
                raise kernels.WrongResult(str(report.findings[0]))
            return 0.0

        return check
    return lambda case: float(case.launch(engine=engine).compile_seconds)


def _launch_simulator(case: Case) -> float:
    from numba import cuda

    arguments: Any = [cuda.to_device(a) if hasattr(a, "shape") else a for a in case.args]
    cuda.jit(case.kernel)[case.grid, case.block](*arguments)
    for host, device in zip(case.args, arguments, strict=True):
        if hasattr(device, "copy_to_host"):
            host[...] = device.copy_to_host()
    return 0.0


def measure_gemm(engine: str, stages: int = 4) -> dict[str, float]:
    """Rate of the warp-specialised Hopper GEMM, e4m3, with Hopper's bits.

    Args:
        engine: ``fast`` or ``checked``.
        stages: of its ring of copies; another number is another kernel.

    Returns:
        ``macs_per_s``, and ``compile_seconds`` of the kernel and the twins that it uses.
    """
    from emulate.bench.hopper_gemm import hopper_gemm, make_problem

    problem = make_problem(*GEMM_SIZES[engine])
    kernel = hopper_gemm("e4m3", stages=stages)
    map_a, map_b, *rest = problem.arguments()
    # Allocations of their own, which count as aligned, as on a GPU.
    args = (map_a.copy(), map_b.copy(), *rest)
    case = Case(kernel, problem.tiles, kernel.threads, args, kernel.shared_bytes)
    launch = _launcher(engine)
    compiled = launch(case)
    best = float("inf")
    for _ in range(REPEATS if engine == "fast" else 1):
        start = time.perf_counter()
        launch(case)
        best = min(best, time.perf_counter() - start)
    if not (args[2] == problem.expected()).all():
        raise kernels.WrongResult("the Hopper GEMM computed something else")
    return {"macs_per_s": problem.products / best, "compile_seconds": compiled}


def main(engine: str, *gemm: str) -> None:
    """Print a measurement as JSON."""
    print(json.dumps(measure_gemm(engine, int(gemm[1])) if gemm else measure(engine)))


if __name__ == "__main__":
    main(*sys.argv[1:])
