"""Importing is cheap, needs no GPU, and leaves heavy packages alone."""

import subprocess
import sys

import pytest

import nbmoe


def run(code: str) -> str:
    """Runs code in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_import_is_light() -> None:
    code = "import sys, nbmoe; print([m for m in sys.modules if m.split('.')[0] in {names!r}])"
    assert (
        run(code.replace("{names!r}", "('numba', 'torch', 'emulate', 'cuda', 'llvmlite')")) == "[]"
    )


def test_operations_import_no_cuda_and_no_torch() -> None:
    shown = "'numba.cuda' in sys.modules, 'torch' in sys.modules"
    code = f"import sys, nbmoe; nbmoe.ops.route; print({shown})"
    assert run(code) == "False False"


def test_import_time() -> None:
    """The best of three, since the machine may be busy."""
    code = "import time; t = time.perf_counter(); import nbmoe; print(time.perf_counter() - t)"
    assert min(float(run(code)) for _ in range(3)) < 1


def test_exports_exist() -> None:
    for name in nbmoe.__all__:
        assert getattr(nbmoe, name) is not None
    assert set(nbmoe.__all__) <= set(dir(nbmoe))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        nbmoe.nothing  # noqa: B018
