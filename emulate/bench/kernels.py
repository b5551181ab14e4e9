"""The kernels that are measured; plain numba.cuda, so that Numba's simulator runs them too."""

import numpy as np
from numba import cuda, float32

from emulate.case import Case
from emulate.errors import EmulationError

TILE = 16
BARRIER_THREADS = 128


class WrongResult(EmulationError):
    """What was measured is not what should have been."""


def barriers(out, count):  # type: ignore[no-untyped-def]
    """Nothing but barriers."""
    for _ in range(count):
        cuda.syncthreads()
    out[cuda.threadIdx.x] = count


def matmul(a, b, c, size):  # type: ignore[no-untyped-def]
    """c = a @ b by tiles in shared memory, one thread an element."""
    left = cuda.shared.array((TILE, TILE), float32)
    right = cuda.shared.array((TILE, TILE), float32)
    x = cuda.threadIdx.x
    y = cuda.threadIdx.y
    row = cuda.blockIdx.y * TILE + y
    column = cuda.blockIdx.x * TILE + x
    total = float32(0.0)
    for k in range(0, size, TILE):
        left[y, x] = a[row, k + x]
        right[y, x] = b[k + y, column]
        cuda.syncthreads()
        for i in range(TILE):
            total += left[y, i] * right[i, x]
        cuda.syncthreads()
    c[row, column] = total


def barrier_case(count: int) -> Case:
    """A block of 128 threads that meets ``count`` times."""
    return Case(barriers, 1, BARRIER_THREADS, (np.zeros(BARRIER_THREADS, np.int32), count))


def matmul_case(size: int) -> Case:
    """Square matrices of small whole numbers, so that every order of summation is exact."""
    rng = np.random.default_rng(7)
    a, b = (rng.integers(-4, 5, (size, size)).astype(np.float32) for _ in range(2))
    c = np.full((size, size), np.nan, np.float32)
    tiles = size // TILE
    return Case(matmul, (tiles, tiles), (TILE, TILE), (a, b, c, size))


def check_result(case: Case) -> None:
    """Raise unless a case's launch computed what it should.

    Raises:
        WrongResult: it did not.
    """
    if case.kernel is barriers:
        right = bool((case.args[0] == case.args[1]).all())
    else:
        a, b, c = case.args[:3]
        right = bool((c == a @ b).all())
    if not right:
        raise WrongResult(f"{case.name} computed something else")
