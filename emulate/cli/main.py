"""Parses arguments, runs one command, turns errors into one line."""

import argparse
import os
import sys
from collections.abc import Sequence

from emulate.cli import bench, coverage, run, suites
from emulate.errors import EmulationError

ERROR_EXIT = 2
"""Exit status for bad arguments, targets and kernels; argparse uses the same."""

_COMMANDS = (run, bench, suites, coverage)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; ``None`` for those of the process.

    Returns:
        0 for success, 1 if there are findings or a suite did not pass, 2 for an error, which is
        printed as one line.
    """
    args = _parser().parse_args(argv)
    try:
        status: int = args.execute(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has stopped; the interpreter must not flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (EmulationError, ValueError, TypeError, OSError) as error:
        if os.environ.get("EMULATE_TRACEBACK"):
            raise
        print(f"emulate {args.command}: {error}", file=sys.stderr)
        return ERROR_EXIT
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m emulate",
        description="Runs numba.cuda kernels on the CPU and finds their bugs.",
        epilog="A TARGET is path.py::name or module:name of an emulate.Case, or of a function that "
        "returns one.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parsers(commands)
    return parser
