"""Kernels with one planted bug each, and their correct twins; see docs/emulate/planted.md."""

import importlib

from tests.emulator.planted.case import BYTES, CASES, Case

GROUPS = (
    "shared_races",
    "global_races",
    "async_copies",
    "bulk_copies",
    "tensor_cores",
    "mbarriers",
    "barriers",
    "deadlocks",
    "bounds",
    "uninitialised",
    "numerics",
    "contract",
)


def all_cases() -> list[Case]:
    """Every case, group by group."""
    for group in GROUPS:
        importlib.import_module(f"{__name__}.{group}")
    return sorted(CASES, key=lambda case: GROUPS.index(case.group))


__all__ = ["BYTES", "GROUPS", "Case", "all_cases"]
