"""Kernels that overlap in a stream: one fills an array slowly, one copies what it sees of it."""

import numpy as np
from numba import cuda

from nbmoe_kernels.device.grid_dependency import allow_next_grid, wait_for_previous_grid
from nbmoe_kernels.device.sync import nanosleep
from nbmoe_kernels.kernel import kernel

THREADS = 64
MICROSECOND = np.uint32(1000)


@kernel(
    "global u32* data, u32 value, u32 microseconds",
    threads=THREADS,
    name="fills_slowly",
    min_cc=(9, 0),
    overlaps_previous=True,
)
def fills_slowly(data, value, microseconds):
    """data[i] = value, some time after the next kernel may have started."""
    wait_for_previous_grid()
    allow_next_grid()
    for _ in range(microseconds):
        nanosleep(MICROSECOND)
    data[np.uint64(cuda.grid(1))] = value


@kernel(
    "global u32* data, global u32* early, global u32* late",
    threads=THREADS,
    name="copies_twice",
    min_cc=(9, 0),
    overlaps_previous=True,
)
def copies_twice(data, early, late):
    """early[i] = data[i] before the wait, late[i] = data[i] after it."""
    i = np.uint64(cuda.grid(1))
    before = data[i]
    wait_for_previous_grid()
    allow_next_grid()
    early[i] = before
    late[i] = data[i]


@kernel(
    "global u32* source, global u32* target",
    threads=THREADS,
    name="adds_one",
    min_cc=(9, 0),
    overlaps_previous=True,
)
def adds_one(source, target):
    """target[i] = source[i] + 1, where the previous kernel wrote source and read target."""
    i = np.uint64(cuda.grid(1))
    wait_for_previous_grid()
    allow_next_grid()
    target[i] = np.uint32(source[i] + np.uint32(1))


@kernel(
    "global u32* source, global u32* target",
    threads=THREADS,
    name="adds_one_in_turn",
)
def adds_one_in_turn(source, target):
    """The same, without overlap."""
    i = np.uint64(cuda.grid(1))
    target[i] = np.uint32(source[i] + np.uint32(1))


_MANY = ", ".join(f"global u32* p{i}" for i in range(24))


@kernel(_MANY, threads=THREADS, name="takes_many", min_cc=(9, 0), overlaps_previous=True)
def takes_many(
    p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11,
    p12, p13, p14, p15, p16, p17, p18, p19, p20, p21, p22, p23,
):  # fmt: skip
    """Does nothing to its 24 arguments."""
    wait_for_previous_grid()
    allow_next_grid()
