"""`coverage`: which lines of a kernel some thread ran."""

import argparse
import json
import sys
import types as pytypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from emulate.case import Case
from emulate.cli.target import load
from emulate.fingerprint import named_globals
from emulate.rebind import plain_function


def add_parsers(commands: Any) -> None:
    """Add the command to a parser."""
    coverage = commands.add_parser("coverage", help="show which lines of a kernel run")
    coverage.add_argument("targets", metavar="TARGET", nargs="+", help="cases; their lines add up")
    coverage.add_argument("--json", action="store_true", help="print JSON")
    coverage.set_defaults(execute=_execute)


def _execute(args: argparse.Namespace) -> int:
    cases = [load(target) for target in args.targets]
    wanted: dict[str, set[int]] = {}
    for case in cases:
        for code in kernel_codes(case.kernel):
            wanted.setdefault(code.co_filename, set()).update(code_lines(code))
    ran = run_lines(cases)
    files = []
    for name, lines in sorted(wanted.items()):
        missing = sorted(lines - ran.get(name, set()))
        files.append(
            {
                "file": name,
                "lines": len(lines),
                "covered": len(lines) - len(missing),
                "missing": missing,
            }
        )
    if args.json:
        print(json.dumps({"files": files}))
        return 0
    for one in files:
        print(f"{one['file']}: {one['covered']} of {one['lines']} lines")
        text = Path(str(one["file"]))
        source = text.read_text(encoding="utf-8").splitlines() if text.is_file() else []
        for line in one["missing"]:  # type: ignore[attr-defined]
            print(f"  never runs: {line}: {source[line - 1].strip() if source else ''}")
    return 0


def kernel_codes(kernel: Any) -> Iterator[pytypes.CodeType]:
    """The code of a kernel and of the helpers that are compiled with it."""
    found: list[pytypes.FunctionType] = []

    def collect(value: Any) -> None:
        is_helper = getattr(value, "is_device_function", False) or (
            type(value).__module__.startswith("numba.cuda") and hasattr(value, "py_func")
        )
        if is_helper:
            visit(plain_function(value))

    def visit(function: pytypes.FunctionType) -> None:
        if function in found:
            return
        found.append(function)
        for cell in function.__closure__ or ():
            collect(cell.cell_contents)
        for _, value in named_globals(function):
            collect(value)

    visit(plain_function(kernel))
    for function in found:
        yield from _with_inner(function.__code__)


def _with_inner(code: pytypes.CodeType) -> Iterator[pytypes.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, pytypes.CodeType):
            yield from _with_inner(const)


def code_lines(code: pytypes.CodeType) -> set[int]:
    """Lines that have instructions, without the one that begins the function."""
    lines = {line for _, _, line in code.co_lines() if line}
    return lines - {code.co_firstlineno}


def run_lines(cases: list[Case]) -> dict[str, set[int]]:
    """The lines that ran, by file, over all threads of launches on the interpreted engine."""
    ran: dict[str, set[int]] = {}
    watched = {code for case in cases for code in kernel_codes(case.kernel)}

    def watch(frame: pytypes.FrameType, event: str, arg: Any) -> Any:
        # Clones of kernels share their code objects.
        if frame.f_code not in watched:
            return None
        if event == "line":
            ran.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
        return watch

    before = sys.gettrace()
    for case in cases:
        sys.settrace(watch)
        try:
            case.launch(engine="interpreted")
        finally:
            sys.settrace(before)
    return ran
