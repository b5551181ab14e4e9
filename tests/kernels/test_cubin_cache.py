"""A second process finds every kernel compiled and starts no compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from numba import config

pytestmark = pytest.mark.skipif(config.ENABLE_CUDASIM, reason="the simulator replaces the compiler")
ROOT = Path(__file__).parents[2]

# What runs at a kernel's first launch on a GPU, without the GPU.
LOAD = """
import sys
from nbmoe_kernels import compiler
from nbmoe_kernels.finalize import make_moe_finalize
from nbmoe_kernels.reciprocal import make_reciprocal
from nbmoe_kernels.launcher import entry_symbol

for kernel in (make_moe_finalize(), make_reciprocal()):
    cubin = compiler.compile_cubin(kernel, (9, 0))
    assert cubin[:4] == b"\\x7fELF" and kernel.py_func.__name__ in entry_symbol(cubin)
libraries = open("/proc/self/maps").read()
print(
    compiler._library.cache_info().misses,
    "nbmoe_kernels.device.ptx" in sys.modules,
    "libnvvm" in libraries,
    "libnvJitLink" in libraries,
)
"""


def load(cache: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        capture_output=True,
        text=True,
        env={**os.environ, "NBMOE_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_second_process_compiles_nothing(tmp_path: Path) -> None:
    assert load(tmp_path) == "2 True True True"
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.cubin")}
    assert len(files) == 2
    # No compilation, no compiler loaded, not even the module that emits PTX.
    assert load(tmp_path) == "0 False False False"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
