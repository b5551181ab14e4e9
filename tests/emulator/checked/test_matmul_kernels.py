"""A matmul's bytes do not depend on the order in which its threads and blocks run."""

from typing import Any

import pytest

from tests.emulator.checked.matmul_calls import others, smallest
from tests.emulator.checked.shipped import checking

SCHEDULES = ("fifo", "random:1", "pct:3:1")
SMALLEST, OTHERS = smallest(), others()


@pytest.mark.parametrize("name", SMALLEST)
def test_every_order_gives_the_bytes_of_the_fast_engine(name: str) -> None:
    wanted = bytes_of(SMALLEST[name]("emulate"))
    for schedule in SCHEDULES:
        with checking(schedules=[schedule]) as executor:
            got = SMALLEST[name]("emulate")
        assert executor.reports and not executor.findings, str(executor.findings[0])
        assert bytes_of(got) == wanted, schedule


@pytest.mark.parametrize("name", OTHERS)
def test_other_variants_give_the_bytes_of_the_reference(name: str) -> None:
    wanted = bytes_of(OTHERS[name]("reference"))
    with checking(schedules=["random:2"]) as executor:
        got = OTHERS[name]("emulate")
    assert executor.reports and not executor.findings, str(executor.findings[0])
    assert bytes_of(got) == wanted


def bytes_of(value: Any) -> list[bytes]:
    """Of each result of an operation."""
    return [v.tobytes() for v in value] if isinstance(value, tuple) else [value.tobytes()]
