"""`run`, `check` and `replay`: one case."""

import argparse
import contextlib
import json
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from emulate.case import Case
from emulate.cli.target import load


def add_parsers(commands: Any) -> None:
    """Add the commands to a parser."""
    run = commands.add_parser("run", help="run a case once")
    run.add_argument("target", metavar="TARGET")
    run.add_argument("--engine", choices=("fast", "interpreted", "checked"), default="fast")
    run.add_argument(
        "--copies",
        choices=("eager", "lazy", "random"),
        help="when async copies land (default: eager, and lazy with --trace)",
    )
    run.add_argument("--seed", type=int, help="run threads in the random order of this number")
    _add_trace(run)
    run.add_argument("--json", action="store_true", help="print JSON")
    run.set_defaults(execute=_run)

    check = commands.add_parser("check", help="look for bugs over many schedules")
    check.add_argument("target", metavar="TARGET")
    check.add_argument(
        "--schedule",
        action="append",
        metavar="NAME",
        help="fifo, random, pct:DEPTH, adversarial, exhaustive:BOUND, or one with its seed; may be "
        "repeated (default: a mix of them)",
    )
    check.add_argument("--seeds", type=int, default=4, help="seeds of each schedule (default: 4)")
    check.add_argument("--shrink", action="store_true", help="make the failing schedule simple")
    _add_check_options(check)
    check.set_defaults(execute=_check)

    replay = commands.add_parser("replay", help="repeat the run of a finding")
    replay.add_argument("token", metavar="TOKEN")
    replay.add_argument("target", metavar="TARGET")
    _add_check_options(replay)
    replay.set_defaults(execute=_replay)


def _add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", metavar="FILE", type=Path, help="write a timeline for ui.perfetto.dev"
    )


def _add_check_options(parser: argparse.ArgumentParser) -> None:
    _add_trace(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--strict-wgmma",
        action="store_true",
        help="each warp of a warpgroup waits for its own part of a product only",
    )


@contextlib.contextmanager
def _traced(file: Path | None) -> Iterator[None]:
    if file is None:
        yield
        return
    from emulate.trace import recording

    with recording() as timeline:
        try:
            yield
        finally:  # the timeline of a deadlock is the one to look at
            timeline.write(file)


def _run(args: argparse.Namespace) -> int:
    case = load(args.target)
    engine = args.engine
    if args.trace is not None and engine == "fast":
        engine = "interpreted"  # compiled code tells nobody when it waits
    with _traced(args.trace):
        if engine == "checked":
            name = "fifo" if args.seed is None else f"random:{args.seed}"
            report = case.check(schedules=[name])
        else:
            # Copies that land at once would show no pipeline.
            copies = args.copies or ("eager" if args.trace is None else "lazy")
            report = case.launch(engine=engine, copies=copies, seed=args.seed)
    outputs = [
        {
            "argument": position,
            "dtype": str(value.dtype),
            "shape": list(value.shape),
            "crc32": f"{zlib.crc32(np.ascontiguousarray(value).tobytes()):08x}",
        }
        for position, value in enumerate(case.args)
        if isinstance(value, np.ndarray)
    ]
    findings = list(getattr(report, "findings", ()))
    if args.json:
        print(json.dumps({**_numbers(report), "arrays": outputs, **_as_json(findings)}))
    else:
        print(
            f"{case.name}: {report.engine}, {report.blocks} blocks, {report.seconds:.4f} s, "
            f"compiled or loaded in {report.compile_seconds:.2f} s"
        )
        for one in outputs:
            print("  argument {argument}: {dtype}{shape} crc32 {crc32}".format(**one))
        _print_findings(findings)
    return 1 if findings else 0


def _numbers(report: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(report).items()
        if isinstance(value, int | float | str | bool)
    }


def _check(args: argparse.Namespace) -> int:
    from emulate.schedule import expand

    case = load(args.target)
    names = expand(args.schedule or "default", args.seeds)
    start = time.perf_counter()
    with _traced(args.trace):
        findings, runs = _search(case, names, args)
    seconds = time.perf_counter() - start
    tokens = [finding.schedule for finding in findings]
    if args.shrink and findings:
        tokens[0] = _shrunk(case, findings[0], args)
    if args.json:
        document = {"target": args.target, "schedules": names, "runs": runs}
        document["seconds"] = round(seconds, 3)
        print(json.dumps({**document, **_as_json(findings), "replay": tokens[:1]}))
    else:
        _print_findings(findings)
        if findings:
            print(f"\nagain: python -m emulate replay {tokens[0]} {args.target}")
        print(f"{case.name}: {_count(findings)}, {runs} schedules, {seconds:.1f} s")
    return 1 if findings else 0


def _search(case: Case, names: list[str], args: argparse.Namespace) -> tuple[list[Any], int]:
    """All findings, each once, and the number of runs; says on a terminal how far it is."""
    shows = sys.stderr.isatty() and not args.json
    found: dict[Any, Any] = {}
    runs = 0
    arrays = [arg for arg in case.args if isinstance(arg, np.ndarray) and arg.flags.writeable]
    given = [array.copy() for array in arrays]
    for number, name in enumerate(names):
        for array, before in zip(arrays, given, strict=True):
            array[...] = before
        if shows:
            print(f"\r{number}/{len(names)} {name:24}", end="", file=sys.stderr, flush=True)
        report = case.check(schedules=[name], **_options(args))
        runs += report.schedules
        for finding in report.findings:
            found.setdefault(finding.key, finding)
    if shows:
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    for array, before in zip(arrays, given, strict=True):
        array[...] = before
    return list(found.values()), runs


def _options(args: argparse.Namespace) -> dict[str, Any]:
    return {"strict_wgmma": True} if args.strict_wgmma else {}


def _shrunk(case: Case, finding: Any, args: argparse.Namespace) -> str:
    from emulate.replay import shrink

    return shrink(
        finding.schedule,
        case.kernel,
        case.grid,
        case.block,
        *case.args,
        finding=finding.id,
        shared_bytes=case.shared_bytes,
        **{**case.options, **_options(args)},
    )


def _replay(args: argparse.Namespace) -> int:
    from emulate.replay import schedule_of

    case = load(args.target)
    name = schedule_of(args.token, case.kernel)
    with _traced(args.trace):
        findings = list(case.check(schedules=[name], **_options(args)).findings)
    if args.json:
        print(json.dumps({"target": args.target, "schedule": name, **_as_json(findings)}))
    else:
        _print_findings(findings)
        print(f"{case.name}: {_count(findings)} under {name[:60]}")
    return 1 if findings else 0


def _count(findings: list[Any]) -> str:
    return f"{len(findings)} finding{'' if len(findings) == 1 else 's'}"


def _as_json(findings: list[Any]) -> dict[str, Any]:
    return {"findings": [finding.as_dict() for finding in findings]}


def _print_findings(findings: list[Any]) -> None:
    for finding in findings:
        print(f"\n{finding}")
