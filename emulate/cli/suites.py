"""`planted` and `mutate`: the emulator's own tests of what it finds."""

import argparse
from typing import Any


def add_parsers(commands: Any) -> None:
    """Add the commands to a parser."""
    planted = commands.add_parser(
        "planted", help="run the planted bugs: each must be found, each clean twin be quiet"
    )
    planted.add_argument("--json", action="store_true", help="print JSON")
    planted.add_argument("--workers", type=int, help="processes (default: one a core)")
    planted.set_defaults(execute=_planted)

    mutate = commands.add_parser(
        "mutate", help="plant faults into shipped kernels: each mutant must be noticed"
    )
    mutate.add_argument("kernel", metavar="KERNEL", nargs="?", help="one kernel (default: all)")
    mutate.add_argument("--json", action="store_true", help="print JSON")
    mutate.add_argument("--workers", type=int, help="processes (default: one a core)")
    mutate.set_defaults(execute=_mutate)


def _planted(args: argparse.Namespace) -> int:
    from emulate.planted import main

    return main(json=args.json, workers=args.workers)


def _mutate(args: argparse.Namespace) -> int:
    from emulate.mutate import main

    return main(kernel=args.kernel, json=args.json, workers=args.workers)
