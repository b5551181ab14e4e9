"""What the launches of mutants share: slots of rows, and outputs in which a missing store shows."""

from typing import Any

import numpy as np

EXPERTS = np.array([-1, 0, 1], np.int32)
"""Experts of three slots: the first is masked, the second has no rows."""


def unwritten(count: int, dtype: Any = np.uint32) -> np.ndarray:
    """An output whose elements, if they are not written, show."""
    return np.full(count, 0xA5, np.uint8).repeat(np.dtype(dtype).itemsize).view(dtype)


def slots(rows: int) -> tuple[int, np.ndarray, np.ndarray]:
    """All rows if the third slot has ``rows``, where each slot's begin, and their scale tiles."""
    starts = np.cumsum([0, 3, 0, rows]).astype(np.uint32)
    return 3 + rows, starts, np.array([0, 1, 1], np.uint32)
