"""Quantized mixture-of-experts layers in Python, on NVIDIA GPUs and without one.

`nbmoe.nn` are the layers, `nbmoe.ops` the operations, `nbmoe.reference` is what they compute, in
numpy. Importing this package touches no GPU; backends load when they first run
(`nbmoe.backend.explain`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nbmoe import errors

if TYPE_CHECKING:
    from nbmoe import (
        arrays,
        backend,
        checkpoints,
        codecs,
        config,
        formats,
        layouts,
        nn,
        ops,
        reference,
        strategies,
    )
    from nbmoe.ops import (
        RoutingIndices,
        grouped_matmul_block_scaled,
        grouped_matmul_blocked_swiglu,
        grouped_quantize_dynamic_block_scaled,
        moe_create_indices,
        moe_finalize,
        route,
    )

__version__ = "0.1.0"

__all__ = [
    "RoutingIndices",
    "__version__",
    "arrays",
    "backend",
    "checkpoints",
    "codecs",
    "config",
    "errors",
    "formats",
    "grouped_matmul_block_scaled",
    "grouped_matmul_blocked_swiglu",
    "grouped_quantize_dynamic_block_scaled",
    "layouts",
    "moe_create_indices",
    "moe_finalize",
    "nn",
    "ops",
    "reference",
    "route",
    "strategies",
]

_MODULES = frozenset(
    {
        "arrays",
        "backend",
        "checkpoints",
        "codecs",
        "config",
        "formats",
        "layouts",
        "nn",
        "ops",
        "reference",
        "strategies",
    }
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"nbmoe.{name}")
    if name in __all__:
        return getattr(importlib.import_module("nbmoe.ops"), name)
    raise AttributeError(f"module 'nbmoe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
