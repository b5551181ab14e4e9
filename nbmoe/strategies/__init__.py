"""Strategies: how a layer's activations are quantized and multiplied, one object a recipe.

A layer asks its strategy and never looks at the format itself. `Fp8Strategy` is FP8 with scales a
block, a row or a tensor, `NvMxf4f8Strategy` the block formats NVFP4, MXFP4 and MXFP8.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbmoe.strategies.fp8 import Fp8Strategy
    from nbmoe.strategies.nv_mxf4f8 import NvMxf4f8Strategy
    from nbmoe.strategies.protocol import QuantStrategy

__all__ = ["Fp8Strategy", "NvMxf4f8Strategy", "QuantStrategy"]

_HOMES = {"Fp8Strategy": "fp8", "NvMxf4f8Strategy": "nv_mxf4f8", "QuantStrategy": "protocol"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nbmoe.strategies' has no attribute {name!r}")
    return getattr(importlib.import_module(f"nbmoe.strategies.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
