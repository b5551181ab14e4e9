"""Gated activations in float32, each operation rounded once, in the order written.

    silu        (g * sigmoid(g)) * u
    swigluoai   (g * sigmoid(alpha * g)) * (u + 1)
    gelu_tanh   ((0.5 * g) * (1 + tanh(c * (g + 0.044715 * ((g * g) * g))))) * u,  c = sqrt(2 / pi)

A gate of -infinity counts as the most negative float32: all three have the limit 0 there, where the
formulas multiply infinity by 0. So a result is NaN only if a value is NaN or `u` is infinite.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from nbmoe.activation import SILU, GatedActivation
from nbmoe.codecs import F32Array
from nbmoe.reference.float32 import FLT_MAX, exp, sigmoid

HALF, ONE, TWO = np.float32(0.5), np.float32(1), np.float32(2)
GELU_CUBIC: Final = np.float32(0.044715)
GELU_FACTOR: Final = np.float32(np.sqrt(2 / np.pi))


def tanh(y: F32Array) -> F32Array:
    """1 - 2 / (1 + exp(2 y)), each operation rounded to float32; the error is below 2**-22."""
    return ONE - TWO / (ONE + exp(y + y))


def clamp(gate: F32Array, up: F32Array, limit: float) -> tuple[F32Array, F32Array]:
    """min(gate, limit) and up within [-limit, limit]; no clamp for 0; a NaN stays.

    Afterwards a gate is no less than the most negative float32.
    """
    if limit:
        bound = np.float32(limit)
        gate = np.minimum(gate, bound)
        up = np.maximum(np.minimum(up, bound), -bound)
    return np.maximum(gate, -FLT_MAX), up


def gated_activation(
    gate: F32Array, up: F32Array, activation: GatedActivation | None = None
) -> F32Array:
    """Activates gates, times up values.

    Args:
        gate: Float32 of any shape.
        up: Float32 of the same shape.
        activation: Which one, None for silu without a limit.

    Returns:
        Float32 of that shape.
    """
    chosen = activation or SILU
    with np.errstate(all="ignore"):
        if chosen.gated_activation_fn is not None:
            each = np.vectorize(chosen.gated_activation_fn, otypes=[np.float32])
            applied: F32Array = each(gate, up)
            return applied
        g, u = clamp(gate, up, chosen.limit)
        if chosen.fused_activation == "silu":
            return (g * sigmoid(g)) * u
        if chosen.fused_activation == "swigluoai":
            return (g * sigmoid(np.float32(chosen.alpha) * g)) * (u + ONE)
        inner = GELU_FACTOR * (g + GELU_CUBIC * ((g * g) * g))
        return ((HALF * g) * (ONE + tanh(inner))) * u
