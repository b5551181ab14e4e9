"""The `nbmoe` command: parses arguments, runs one command, turns errors into one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import nbmoe
from nbmoe.cli import bench, demo, doctor, run, tune
from nbmoe.errors import NbmoeError

ERROR_EXIT = 2
"""Exit status for bad arguments, files or configurations; argparse uses the same."""

_COMMANDS = (demo, run, bench, doctor, tune)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program name, None for those of the process.

    Returns:
        Exit status: 0 for success, 1 where a check failed, 2 for an error of the library or of a
        file, which is printed as one line.
    """
    args = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        # A terminal without some character shows a replacement, not a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    _enable_simulator(getattr(args, "backend", None))
    try:
        status: int = args.execute(args)
    except BrokenPipeError:
        # Whoever read the output has stopped; the interpreter must not try to flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except _expected_errors() as error:
        print(f"nbmoe {args.command}: {error}", file=sys.stderr)
        return ERROR_EXIT
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nbmoe", description="Quantized mixture-of-experts layers on a GPU or without one."
    )
    parser.add_argument("--version", action="version", version=f"nbmoe {nbmoe.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser


def _expected_errors() -> tuple[type[Exception], ...]:
    """Evaluated only once something was raised, so that no command imports `emulate` for it."""
    from emulate import EmulationError

    return NbmoeError, OSError, EmulationError


def _enable_simulator(backend: str | None) -> None:
    """Makes `numba.cuda` the simulator if that is what the user asked for.

    The variable counts only if numba is not imported yet, which is so at the start of a process;
    otherwise the backend's own error says what to do.
    """
    if (backend or os.environ.get("NBMOE_BACKEND")) == "cudasim" and "numba" not in sys.modules:
        os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
