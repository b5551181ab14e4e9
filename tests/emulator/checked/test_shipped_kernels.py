"""The library's own kernels have no findings, and the same bytes as in the fast engine."""

import pytest

from tests.emulator.checked.shipped import checking, shipped

QUICK = ("create_indices", "quantize_80", "quantize_64", "finalize")
"""Kernels without matrix products, of which many schedules fit into the time of a test."""
CALLS = shipped()


@pytest.mark.parametrize("name", CALLS)
def test_no_finding_and_the_same_bytes(name):
    wanted = CALLS[name]()
    schedules = [f"random:{seed}" for seed in range(2)] + [f"pct:3:{seed}" for seed in range(2)]
    if name not in QUICK:
        schedules = ["fifo"]
    with checking(schedules=schedules) as executor:
        got = CALLS[name]()
    assert executor.reports and not executor.findings, str(executor.findings[0])
    pairs = zip(_as_tuple(got), _as_tuple(wanted), strict=True)
    assert all(a.tobytes() == b.tobytes() for a, b in pairs)


def _as_tuple(value):
    return value if isinstance(value, tuple) else (value,)
