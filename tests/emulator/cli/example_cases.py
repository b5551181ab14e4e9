"""Cases that the tests of the command line run; lines are found by their marks."""

from pathlib import Path

import numpy as np
from numba import cuda, float32

from emulate.case import Case
from tests.emulator import small_ops as ops


@cuda.jit
def missing_barrier(x, out):
    part = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    part[t] = x[t]  # WRITES
    out[t] = part[63 - t]  # READS


@cuda.jit
def reverse(x, out):
    part = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    part[t] = x[t]
    cuda.syncthreads()
    if t > 1000:
        out[0] = float32(1)  # NEVER
    out[t] = part[63 - t]


def deadlock(x, out):
    if cuda.threadIdx.x < 32:
        cuda.syncthreads()  # WAITS
    while out[0] == 0:
        cuda.nanosleep(1)


@cuda.jit
def copies(x, y):
    part = cuda.shared.array(32, np.uint32)
    t = cuda.threadIdx.x
    ops.copy_word(part, t, x, t)
    ops.copy_commit()
    votes = ops.ballot(np.uint32(1))
    ops.copy_wait_all()
    cuda.syncthreads()
    y[t] = part[31 - t] + votes


def _arrays():
    return np.arange(64, dtype=np.float32), np.zeros(64, np.float32)


def broken():
    return Case(missing_barrier, 1, 64, _arrays())


def clean():
    return Case(reverse, 1, 64, _arrays())


def stuck():
    return Case(deadlock, 1, 64, _arrays())


def pipeline():
    return Case(copies, 1, 32, (np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)))


def too_large():
    return Case(reverse, 1, 2048, _arrays())


def no_grid():
    return Case(reverse, 0, 64, _arrays())


def too_much_shared():
    return Case(reverse, 1, 64, _arrays(), shared_bytes=300_000)


constant = Case(reverse, 1, 64, _arrays())
number = 7


def line_of(mark: str) -> int:
    """The line that a comment marks."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))
