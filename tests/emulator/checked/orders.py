"""Runs an operation in the checked engine, in one order of its threads and blocks after another."""

from collections.abc import Callable, Iterable
from typing import Any

from tests.emulator.checked.shipped import checking


def check_orders(call: Callable[[], Any], wanted: Any, schedules: Iterable[str]) -> None:
    """Asserts that no schedule has a finding or gives other bytes than those of `wanted`."""
    for schedule in schedules:
        with checking(schedules=[schedule]) as executor:
            got = call()
        assert executor.reports, "nothing was launched"
        assert not executor.findings, str(executor.findings[0])
        assert bytes_of(got) == bytes_of(wanted), schedule


def bytes_of(value: Any) -> list[bytes]:
    """Of each result of an operation."""
    return [v.tobytes() for v in value] if isinstance(value, tuple) else [value.tobytes()]
