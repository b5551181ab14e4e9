"""Nothing runs in these tests: every executor is replaced by one that records."""

import pytest

from nbmoe import backend
from tests.bad_inputs.case import Recorder


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Stands in for every executor, so that a launch is recorded instead of run."""
    recorder = Recorder()
    monkeypatch.setattr(backend, "executor", lambda *args, **kwargs: recorder)
    return recorder
