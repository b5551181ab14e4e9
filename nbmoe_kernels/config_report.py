"""Prints which tile shape was chosen for a problem and why not another: NBMOE_PRINT_CONFIGS=1."""

import os
import sys
from collections.abc import Iterable

VARIABLE = "NBMOE_PRINT_CONFIGS"
_printed: set[tuple[str, str]] = set()


def report_choice(problem: str, chosen: str, others: Iterable[tuple[str, str]]) -> None:
    """Print a choice to stderr if the variable asks for it, each one once in a process.

    Args:
        problem: kernel, formats and sizes, in words.
        chosen: name of the config, with the reason for it.
        others: name of every other candidate and what speaks against it, empty if nothing.
    """
    if os.environ.get(VARIABLE, "0").strip() in ("", "0") or (problem, chosen) in _printed:
        return
    _printed.add((problem, chosen))
    by_reason: dict[str, list[str]] = {}
    for name, reason in others:
        by_reason.setdefault(reason or "another comes first", []).append(name)
    lines = [f"nbmoe: {problem}", f"  chosen: {chosen}"]
    for reason, names in by_reason.items():
        lines += [f"  not, because {reason}:", *(f"    {name}" for name in names)]
    print("\n".join(lines), file=sys.stderr)
