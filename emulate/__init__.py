"""Runs any numba.cuda kernel on the CPU: warps, tensor cores, async copies and all.

>>> import emulate, numpy as np
>>> from numba import cuda
>>> def double(x):
...     i = cuda.grid(1)
...     if i < x.size:
...         x[i] = np.float32(2) * x[i]
>>> x = np.arange(5, dtype=np.float32)
>>> report = emulate.launch(double, 1, 32, x)
>>> x
array([0., 2., 4., 6., 8.], dtype=float32)
"""

from emulate.case import Case
from emulate.checked.check import check
from emulate.checked.marks import unfinished, uninitialised
from emulate.errors import (
    CollectiveDivergence,
    CompileError,
    Deadlock,
    EarlyExit,
    EmulationError,
    KernelError,
    ResourceError,
    StackOverflow,
    UnsupportedOp,
    UnsupportedPlatform,
)
from emulate.findings import Finding, FindingError, Site
from emulate.front import launch
from emulate.report import Report

__all__ = [
    "Case",
    "CollectiveDivergence",
    "CompileError",
    "Deadlock",
    "EarlyExit",
    "EmulationError",
    "Finding",
    "FindingError",
    "KernelError",
    "Report",
    "ResourceError",
    "Site",
    "StackOverflow",
    "UnsupportedOp",
    "UnsupportedPlatform",
    "check",
    "launch",
    "unfinished",
    "uninitialised",
]
