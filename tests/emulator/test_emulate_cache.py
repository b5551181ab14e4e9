"""Machine code is kept on disk by content: found again, and never for another kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import cuda

import emulate
from emulate import cache

SCRIPT = """
import json, sys
import numpy as np
from numba import cuda
import emulate
from tests.emulator import small_ops as ops

def make(factor):
    @cuda.jit(device=True)
    def scale(v):
        return np.uint32(v * np.uint32(factor))

    def kernel(x):
        i = cuda.grid(1)
        value = np.int32(scale(ops.shuffle_down(x[i], np.uint32(1))))
        x[i] = cuda.shfl_sync(0xFFFFFFFF, value, cuda.laneid)  # its own

    return kernel

x = np.arange(64, dtype=np.uint32)
report = emulate.launch(make(int(sys.argv[1])), 2, 32, x)
print(json.dumps([report.cached, report.compile_seconds, x.tolist()]))
"""
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def run_script(tmp_path):
    def run(factor):
        environment = {**os.environ, "NBMOE_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        output = subprocess.run(
            [sys.executable, script, str(factor)],
            env=environment,
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        cached, seconds, values = json.loads(output.stdout)
        assert values == [factor * min(32 * (i // 32) + 31, i + 1) for i in range(64)]
        return cached, seconds

    return run


def test_second_process_loads_what_the_first_compiled(run_script, tmp_path):
    cached, _ = run_script(3)
    assert not cached
    files = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "emulate").iterdir()}
    cached, seconds = run_script(3)
    assert cached
    assert seconds < 0.5
    assert files == {f.name: f.stat().st_mtime_ns for f in (tmp_path / "emulate").iterdir()}

    # The factor is a value in the closure of a helper.
    cached, _ = run_script(4)
    assert not cached


def kernel_that_nothing_else_has():
    def kernel(x):
        x[cuda.threadIdx.x] = np.uint32(x[cuda.threadIdx.x] + np.uint32(41))

    return kernel


def test_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "emulate").write_text("not a folder")
    monkeypatch.setenv("NBMOE_CACHE_DIR", str(tmp_path))
    x = np.zeros(4, np.uint32)
    report = emulate.launch(kernel_that_nothing_else_has(), 1, 4, x)
    assert not report.cached
    assert x.tolist() == [41] * 4


def test_damaged_entry_is_no_entry(tmp_path, monkeypatch):
    monkeypatch.setenv("NBMOE_CACHE_DIR", str(tmp_path))
    assert cache.load("some-key") is None
    cache.save("some-key", {"facts": 1}, b"object\ncode")
    assert cache.load("some-key") == ({"facts": 1}, b"object\ncode")
    (entry,) = (tmp_path / "emulate").iterdir()
    whole = entry.read_bytes()
    for damaged in (whole[:-1], whole[1:], b"", whole.replace(b"code", b"cope")):
        entry.write_bytes(damaged)
        assert cache.load("some-key") is None


def test_kernel_of_unknown_content_is_compiled_and_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("NBMOE_CACHE_DIR", str(tmp_path))

    names = [{"a": 1}]

    def kernel(x):
        x[0] = 5
        if False:
            names  # noqa: B018

    x = np.zeros(1, np.int64)
    assert not emulate.launch(kernel, 1, 1, x).cached
    assert x[0] == 5
    assert not list(tmp_path.rglob("*"))


def test_function_of_the_same_content_is_not_compiled_again():
    x = np.zeros(4, np.uint32)
    emulate.launch(kernel_that_nothing_else_has(), 1, 4, x)
    report = emulate.launch(kernel_that_nothing_else_has(), 1, 4, x)
    assert report.cached and report.compile_seconds == 0
    assert x.tolist() == [82] * 4
