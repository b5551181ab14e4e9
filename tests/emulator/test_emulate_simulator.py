"""With NUMBA_ENABLE_CUDASIM=1 both engines run the same kernels on the simulator's arrays."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import numpy as np
from numba import config, cuda
import emulate
from tests.emulator import small_ops as ops

assert config.ENABLE_CUDASIM and type(cuda.jit(lambda x: None)).__name__ == "FakeCUDAKernel"

@cuda.jit(device=True)
def double(v):
    return np.uint32(v + v)

@cuda.jit
def kernel(x, y, scale):
    part = cuda.shared.array(64, np.uint32)
    t = cuda.threadIdx.x
    part[t] = double(ops.shuffle_down(x[t], np.uint32(1)))
    cuda.syncthreads()
    y[t] = np.uint32(part[63 - t] * scale)

results = []
for engine in ("fast", "interpreted"):
    x = cuda.to_device(np.arange(64, dtype=np.uint32))
    y = cuda.device_array(64, np.uint32)
    emulate.launch(kernel, 1, 64, x, y, np.uint32(3), engine=engine)
    results.append(y.copy_to_host().tolist())
shifted = [min(32 * (i // 32) + 31, i + 1) for i in range(64)]
assert results == [[6 * v for v in shifted[::-1]]] * 2, results
print("same")
"""


def test_simulator_arrays_and_kernels(tmp_path):
    root = Path(__file__).parent.parent.parent
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(root)}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    output = subprocess.run(
        [sys.executable, script], env=environment, cwd=root, capture_output=True, text=True
    )
    assert output.stdout == "same\n", output.stderr
