"""Backends and layers for the tests of `nbmoe.nn`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import kernel_backends

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(params=["reference", *kernel_backends()])
def backend(request: pytest.FixtureRequest) -> str:
    """The specification and each backend that can run the kernels here."""
    return request.param


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """Folder of the checkpoints that vendors' tools wrote."""
    return FIXTURES
