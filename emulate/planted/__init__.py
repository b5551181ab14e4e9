"""Runs the suite of planted bugs: `python -m emulate planted`.

Each case is caught by the checked engine if it reports the expected finding with every marked line
and nothing that is not a consequence of it, and is quiet on the correct twin, whose output must be
right. See docs/emulate/planted.md.
"""

from emulate.planted.run import Outcome, main, run_case, run_suite
from emulate.planted.suite import SuiteMissing, load_suite

__all__ = ["Outcome", "SuiteMissing", "load_suite", "main", "run_case", "run_suite"]
