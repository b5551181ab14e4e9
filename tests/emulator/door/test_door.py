"""Numba's own door, in processes with the simulator."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NAMES = ["stages", "warps", "copies", "gemm", "divergent", "out_of_bounds", "uninstall"]


def python(*args, **variables):
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, *args],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("engine", ["fast", "interpreted", "checked", "threads"])
def test_engine(engine):
    done = python("-m", "tests.emulator.door.kernels", engine, *NAMES)
    assert done.stdout.split() == NAMES, done.stdout + done.stderr


def test_variable_installs():
    script = (
        "import emulate.door, numpy as np\n"
        "from numba import cuda\n"
        "@cuda.jit(launch_bounds=(32, 1))\n"
        "def k(x):\n"
        "    x[cuda.threadIdx.x] = cuda.shfl_xor_sync(0xFFFFFFFF, cuda.threadIdx.x, 1)\n"
        "x = np.zeros(32, np.int32)\n"
        "k[1, 32](x)\n"
        "print(x.tolist() == [i ^ 1 for i in range(32)])"
    )
    assert python("-c", script, EMULATE_DOOR="fast").stdout == "True\n"
    stock = python("-c", script)
    assert stock.returncode and "launch_bounds" in stock.stderr


@pytest.mark.parametrize(
    ("call", "variables", "message"),
    [
        ("install('slow')", {}, "ValueError: engine: expected one of fast"),
        ("install('threads', seed=1)", {}, "ValueError: engine: threads takes no options"),
        ("install()", {"NUMBA_ENABLE_CUDASIM": "0"}, "NoSimulator: door: set NUMBA_ENABLE"),
    ],
)
def test_mistakes(call, variables, message):
    done = python("-c", f"import emulate.door\nemulate.door.{call}", **variables)
    assert done.returncode and message in done.stderr.splitlines()[-1]


def test_a_deadlock_on_threads_ends():
    script = (
        "import emulate.door, numpy as np\n"
        "import emulate.door_threads as threads\n"
        "from numba import cuda\n"
        "from tests.emulator import small_ops as ops\n"
        "threads.LIMIT = 1.0\n"
        "emulate.door.install('threads')\n"
        "@cuda.jit\n"
        "def k(x):\n"
        "    if cuda.threadIdx.x < 16:\n"
        "        ops.ballot(np.uint32(1))\n"
        "try:\n"
        "    k[1, 32](np.zeros(1))\n"
        "except emulate.Deadlock as error:\n"
        "    print('t_ballot' in str(error))\n"
    )
    done = python("-c", script)
    assert done.stdout == "True\n", done.stderr
