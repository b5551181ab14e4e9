"""Fixtures of the emulator's tests."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import emulate

ENGINES = ["fast", "interpreted"]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine in turn."""
    return str(request.param)


@pytest.fixture
def launch(engine: str) -> Callable[..., emulate.Report]:
    """`emulate.launch` on that engine."""
    return functools.partial(emulate.launch, engine=engine)


@pytest.fixture
def both() -> Callable[..., tuple[np.ndarray, ...]]:
    """Runs a kernel on copies of its arrays in both engines; the arrays, after they agree."""

    def run(kernel: Any, grid: Any, block: Any, *args: Any, **options: Any) -> Any:
        results = []
        for name in ENGINES:
            copies = tuple(a.copy() if isinstance(a, np.ndarray) else a for a in args)
            emulate.launch(kernel, grid, block, *copies, engine=name, **options)
            results.append([a for a in copies if isinstance(a, np.ndarray)])
        for fast, interpreted in zip(*results, strict=True):
            assert fast.tobytes() == interpreted.tobytes()
        return tuple(results[0])

    return run
