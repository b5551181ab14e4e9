"""One valid call of each operation and format, to spoil in one place."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from nbmoe import ops
from tests.bad_inputs import (
    valid_fp8,
    valid_matmul,
    valid_prepared,
    valid_quantize,
    valid_routing,
)
from tests.bad_inputs.sizes import NORMAL, POISON, Arguments, Sizes

__all__ = ["LAUNCHES", "POISON", "VALID", "Arguments", "function", "op_name", "valid"]

_CALLS = (
    valid_routing.CALLS
    | valid_quantize.CALLS
    | valid_matmul.CALLS
    | valid_fp8.CALLS
    | valid_prepared.CALLS
)

LAUNCHES = {"grouped_quantize_nvfp4_row_scaled": 2, "quantize_tensor_dynamic_scaled_float8": 2}
"""Kernels that a call launches, where they are not one."""


def op_name(entry: str) -> str:
    """The operation of an entry "operation" or "operation:variant"."""
    return entry.partition(":")[0]


def function(entry: str) -> Callable[..., Any]:
    """The public function of an entry."""
    found: Callable[..., Any] = getattr(ops, op_name(entry))
    return found


@lru_cache(maxsize=1024)
def _built(entry: str, sizes: Sizes) -> Arguments:
    return _CALLS[entry](sizes)


def _copied(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    return value.copy() if isinstance(value, np.ndarray) else value


def valid(entry: str, sizes: Sizes = NORMAL) -> Arguments:
    """Fresh arguments of a valid call."""
    return {name: _copied(value) for name, value in _built(entry, sizes).items()}


VALID: dict[str, Callable[[], Arguments]] = {entry: partial(valid, entry) for entry in _CALLS}
