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
        activation,
        arrays,
        backend,
        checkpoints,
        codecs,
        config,
        formats,
        layouts,
        nn,
        ops,
        prepared,
        reference,
        strategies,
    )

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "activation",
    "arrays",
    "backend",
    "checkpoints",
    "codecs",
    "config",
    "errors",
    "formats",
    "layouts",
    "nn",
    "ops",
    "prepared",
    "reference",
    "strategies",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"nbmoe.{name}")
    raise AttributeError(f"module 'nbmoe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
