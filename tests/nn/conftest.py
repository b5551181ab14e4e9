"""Backends and layers for the tests of `nbmoe.nn`."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbmoe.backend import simulator_enabled
from tests.conftest import kernel_backends

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(params=["reference", *kernel_backends()])
def backend(request: pytest.FixtureRequest) -> str:
    """The specification and each backend that can run the kernels here."""
    return request.param


@pytest.fixture(params=["reference", *([] if simulator_enabled() else kernel_backends())])
def fast_backend(request: pytest.FixtureRequest) -> str:
    """As `backend` without the simulator, which takes seconds for one call of a layer.

    Its kernels are the emulator's; tests of operations and those with `backend` run them in it.
    """
    return request.param


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """Folder of the checkpoints that vendors' tools wrote."""
    return FIXTURES
