"""Marks on arguments."""

import numpy as np


class Uninitialised(np.ndarray):
    """An array whose bytes count as not written when the kernel starts."""


def uninitialised(array: np.ndarray) -> Uninitialised:
    """A view of an array for `emulate.check`: reading an element before it is written is a finding.

    Use it for outputs and scratch memory, which on a GPU hold anything.
    """
    return array.view(Uninitialised)
