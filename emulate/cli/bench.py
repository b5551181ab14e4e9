"""`bench`: speed of the engines."""

import argparse
import json
import sys
from typing import Any


def add_parsers(commands: Any) -> None:
    """Add the command to a parser."""
    bench = commands.add_parser("bench", help="measure the engines and Numba's simulator")
    bench.add_argument("--json", action="store_true", help="print JSON")
    bench.add_argument(
        "--engine",
        action="append",
        choices=("simulator", "checked", "interpreted", "fast"),
        help="may be repeated (default: all)",
    )
    bench.set_defaults(execute=_execute)


def _execute(args: argparse.Namespace) -> int:
    from emulate.bench.report import ENGINES, collect

    def progress(what: str) -> None:
        print(f"measuring: {what}", file=sys.stderr, flush=True)

    document = collect(progress, tuple(args.engine or ENGINES))
    if args.json:
        print(json.dumps(document, indent=1))
    else:
        _print_table(document)
    return 0


def _print_table(document: dict[str, Any]) -> None:
    print(f"{'':12}{'thread barriers/s':>20}{'times':>9}{'MAC/s, matmul':>18}{'times':>9}")
    times = document.get("times_simulator", {})
    for engine, rates in document["engines"].items():
        own = times.get(engine, {})
        print(
            f"{engine:12}{rates['thread_barriers_per_s']:20,.0f}"
            f"{own.get('thread_barriers_per_s', 1):9,.0f}"
            f"{rates['macs_per_s']:18,.0f}{own.get('macs_per_s', 1):9,.0f}"
        )
    gemm = document["gemm"]
    for engine in ("checked", "fast"):
        if f"{engine}_macs_per_s" in gemm:
            print(f"Hopper GEMM, {engine}: {gemm[f'{engine}_macs_per_s'] / 1e6:,.0f} MMAC/s")
    if "load_seconds" in gemm:
        print(
            "Hopper GEMM, before a new process runs it: {load_seconds:.2f} s from the cache, "
            "{compile_seconds:.1f} s as a new kernel, {first_seconds:.1f} s with an empty "
            "cache".format(**gemm)
        )
