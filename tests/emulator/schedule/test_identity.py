"""A kernel's short hash changes with its content and with nothing else."""

import numpy as np

from emulate.schedule.identity import identity

SOURCE = """
import numpy as np
from numba import cuda
SIZE = {size}
def helper(x):
    return x {sign} 1
helper.is_device_function = True
def kernel(x):
    x[cuda.threadIdx.x] = helper(SIZE)
"""


def made(text, name="<a>", lines=0):
    scope = {}
    exec(compile("\n" * lines + text, name, "exec"), scope)
    return scope["kernel"]


def test_place_does_not_matter():
    text = SOURCE.format(size=3, sign="+")
    assert identity(made(text)) == identity(made(text, "/other/place.py", lines=50))


def test_content_matters():
    base = SOURCE.format(size=3, sign="+")
    changed = [
        base.replace("SIZE = 3", "SIZE = 4"),
        base.replace("x + 1", "x - 1"),
        base.replace("threadIdx.x", "threadIdx.y"),
        base.replace("helper(SIZE)", "helper(SIZE) + np.uint32(7)"),
    ]
    assert len({identity(made(text)) for text in [base, *changed]}) == 5


def test_closures_and_unknown_values():
    def make(value):
        def kernel(x):
            x[0] = value

        return kernel

    assert identity(make(1)) == identity(make(1)) != identity(make(2))
    arrays = [np.arange(4), np.arange(4), np.arange(4, dtype=np.float32)]
    assert identity(make(arrays[0])) == identity(make(arrays[1])) != identity(make(arrays[2]))
    assert identity(make(object())) == identity(make(object()))


def test_sets_of_strings_are_stable():
    import subprocess
    import sys

    program = (
        "from emulate.schedule.identity import identity\n"
        "def k(x):\n    return x in {'a', 'b', 'c', 'd'}\n"
        "print(identity(k))"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(4)
    }
    assert len(hashes) == 1 and len(hashes.pop().strip()) == 8
