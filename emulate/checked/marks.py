"""Marks on arguments."""

import numpy as np


class Uninitialised(np.ndarray):
    """An array whose bytes count as not written when the kernel starts."""


class Unfinished(np.ndarray):
    """An array that the previous kernel may still read and write when the kernel starts."""


def unfinished(array: np.ndarray) -> Unfinished:
    """A view of an array for `emulate.check`: touching it before the kernel waits is a finding.

    Use it for a kernel that may start before the previous one of its stream has ended
    (`nbmoe_kernels.device.grid_dependency`), on what that one reads or writes.
    """
    return array.view(Unfinished)


def uninitialised(array: np.ndarray) -> Uninitialised:
    """A view of an array for `emulate.check`: reading an element before it is written is a finding.

    Use it for outputs and scratch memory, which on a GPU hold anything.
    """
    return array.view(Uninitialised)
