"""Runs the command line in this process or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from nbmoe.cli import main
from tests.conftest import kernel_backends

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"


@dataclass
class Result:
    """What a command did."""

    status: int
    out: str
    err: str


@pytest.fixture(params=["reference", *kernel_backends()])
def backend(request: pytest.FixtureRequest) -> str:
    """The specification and each backend that can run the kernels here."""
    return request.param


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """Folder of the checkpoints that vendors' tools wrote."""
    return FIXTURES


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture
def nbmoe(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs a command in this process."""

    def call(*argv: object) -> Result:
        capsys.readouterr()
        try:
            status = main([str(arg) for arg in argv])
        except SystemExit as stop:
            status = int(stop.code or 0)
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return call


@pytest.fixture
def python_m_nbmoe() -> Callable[..., Result]:
    """Runs `python -m nbmoe` with a clean environment; variables can be added."""

    def call(*argv: object, **variables: str) -> Result:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("NBMOE_BACKEND")}
        environment.pop("NUMBA_ENABLE_CUDASIM", None)
        done = subprocess.run(
            [sys.executable, "-m", "nbmoe", *(str(arg) for arg in argv)],
            capture_output=True,
            text=True,
            encoding="utf-8",
            cwd=ROOT,
            env=environment | {"PYTHONIOENCODING": "utf-8"} | variables,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return call
