"""Finds the cases, which live in the tests of a checkout."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

_PACKAGE = Path("tests/emulator/planted")


class SuiteMissing(RuntimeError):
    """The planted cases are not here: an installation has no tests."""


def suite_root() -> Path:
    """The checkout that holds the cases: of this package, or the current directory.

    Raises:
        SuiteMissing: neither holds them.
    """
    for root in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (root / _PACKAGE / "case.py").is_file():
            return root
    raise SuiteMissing(f"planted: expected a checkout with {_PACKAGE} in it, got {Path.cwd()}")


def load_suite() -> list[Any]:
    """All cases, group by group.

    Raises:
        SuiteMissing: there is no checkout.
    """
    root = str(suite_root())
    if root not in sys.path:
        sys.path.insert(0, root)
    cases = importlib.import_module("tests.emulator.planted").all_cases()
    return list(cases)


def stock_file() -> Path:
    """Where the results of Numba's simulator are kept."""
    return suite_root() / _PACKAGE / "stock.json"


def stock_results() -> dict[str, str]:
    """What Numba's simulator made of each case, by name; empty if that was never recorded."""
    file = stock_file()
    if not file.is_file():
        return {}
    results = json.loads(file.read_text())["results"]
    return {str(name): str(verdict) for name, verdict in results.items()}
