"""A toy model, and a timer that measures nothing."""

from __future__ import annotations

import pytest

from nbmoe.bench.models import Model
from nbmoe.bench.timing import Spread, Times

TOY = Model("toy", experts=4, top_k=2, hidden=128, moe_dim=128)


class FakeTimer:
    """Runs a call twice, as a capture does; every run takes 1, 2, 3, ... us."""

    def __init__(self) -> None:
        self.stream = None
        self.measured = self.synced = 0

    def capture(self, call):
        call(None)
        return lambda: call(None)

    def measure(self, launch, runs=15):
        launch()
        self.measured += 1
        time = float(self.measured)
        return Times(Spread(time, time - 0.5, time + 0.5), Spread(time - 0.25, time, time))

    def sync(self) -> None:
        self.synced += 1

    def forget(self) -> None:
        pass


@pytest.fixture
def toy() -> Model:
    return TOY


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations run by the specification, since the kernels have tests of their own."""
    monkeypatch.setenv("NBMOE_BACKEND", "reference")
