"""A forward pass whose times are those of the kernels, not of their compilation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nbmoe.nn import MoELayer, MoETrace

_COMPILED = ("gpu", "emulate")


def timed_trace(
    layer: MoELayer, x: Any, on_stage: Callable[[str], None] | None = None
) -> tuple[MoETrace, float | None]:
    """Traces a layer, after a first pass where kernels are compiled.

    Args:
        layer: The layer.
        x: Its tokens, bf16 [T, H].
        on_stage: Called with the name of each stage of the first pass as it begins.

    Returns:
        The trace, and how long the first pass took [s]; None if there was only one pass, because
        nothing compiles (numpy) or a pass is slow (interpreted).
    """
    if layer.backend.name not in _COMPILED:
        return layer.trace(x, on_stage=on_stage), None
    begin = time.perf_counter()
    layer.trace(x, on_stage=on_stage)
    first = time.perf_counter() - begin
    return layer.trace(x), first
