"""Sampled outputs in float64, from the operands that the kernels saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe.bench.routing import Problem
from nbmoe.codecs import decode_bf16

F64Array = npt.NDArray[np.float64]
Rows = Callable[[npt.NDArray[np.int64]], F64Array]
"""Dequantized rows [n, K] of given positions."""
Weight = Callable[[int, npt.NDArray[np.int64]], F64Array]
"""Dequantized weight rows [c, K] of an expert."""

SAMPLED_COLUMNS = 96


def sampled_columns(n: int, multiple: int = 1) -> npt.NDArray[np.int64]:
    """Columns to compare, in whole groups of `multiple`, the first and the last among them."""
    groups = np.linspace(0, n // multiple - 1, max(1, SAMPLED_COLUMNS // multiple))
    starts = np.unique(groups.astype(np.int64)) * multiple
    return (starts[:, np.newaxis] + np.arange(multiple)).ravel()


def relative_error(found: F64Array, exact: F64Array) -> float:
    """|found - exact| / |exact| in L2; infinite if anything found is not finite."""
    norm = float(np.linalg.norm(exact))
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.linalg.norm(found - exact)) / (norm or 1.0)


def product(
    problem: Problem, rows: Rows, weight: Weight, columns: npt.NDArray[np.int64]
) -> F64Array:
    """Exact outputs [sampled rows, columns] of a grouped matmul."""
    chosen = problem.sampled_rows
    left, experts = rows(chosen), problem.row_experts[chosen]
    result = np.zeros((len(chosen), len(columns)))
    for expert in np.unique(experts):
        mine = experts == expert
        result[mine] = left[mine] @ weight(int(expert), columns).T
    return result


def sample_bf16(read: Callable[[Any], Any], array: Any, problem: Problem) -> F64Array:
    """The sampled rows of bf16 outputs [S, N]."""
    rows = [read(array[int(row)]) for row in problem.sampled_rows]
    return np.asarray([decode_bf16(row) for row in rows], np.float64)
