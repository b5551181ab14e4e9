"""Gated activations: one f32 from a gate, an up value and two constants.

    silu        (g * sig(g)) * u
    swigluoai   (g * sig(alpha * g)) * (u + 1)
    gelu_tanh   ((0.5 * g) * (1 + tanh(c * (g + 0.044715 * ((g * g) * g))))) * u,  c = sqrt(2 / pi)

with sig(x) = 1 / (1 + exp(-x)) and tanh(y) = 1 - 2 / (1 + exp(2 * y)); every operation rounds once,
in the order written. silu and swigluoai first replace g by min(g, limit) and u by u clamped to
[-limit, limit]; a limit of 0 means none, and a NaN passes a clamp.

An infinitely negative gate counts as -FLT_MAX: its activation is 0, the limit, where the formula
would give infinity times 0.
"""

import functools
import types as pytypes
from collections.abc import Callable
from typing import Any

import numpy as np

from nbmoe_kernels.device.math import (
    add_rn,
    div_rn,
    exp_f32,
    max_nan,
    min_nan,
    mul_rn,
    sigmoid,
    sub_rn,
)
from nbmoe_kernels.device.op import device_function

_ZERO, _HALF, _ONE, _TWO = (np.float32(x) for x in (0.0, 0.5, 1.0, 2.0))
_INFINITY = np.float32(np.inf)
_LOWEST = np.float32(-3.4028234663852886e38)
_GELU_CUBIC = np.float32(0.044715)
_GELU_FACTOR = np.float32(0.7978845608028654)


@device_function
def tanh(y):
    """1 - 2 / (1 + exp(2 y)); the absolute error is below 2^-22."""
    return sub_rn(_ONE, div_rn(_TWO, add_rn(_ONE, exp_f32(add_rn(y, y)))))


@device_function
def bound_of(limit):
    """The limit as a bound: 0 bounds nothing. As a value, since a branch would double the code."""
    return limit if limit > _ZERO else _INFINITY


@device_function
def clamped_gate(gate, limit):
    """The gate, at most `limit` unless that is 0, and never -infinity."""
    return max_nan(min_nan(gate, bound_of(limit)), _LOWEST)


@device_function
def clamped_up(up, limit):
    """The up value, within [-limit, limit] unless that is 0."""
    bound = bound_of(limit)
    return max_nan(min_nan(up, bound), sub_rn(_ZERO, bound))


@device_function
def silu(gate, up, alpha, limit):
    """(g * sig(g)) * u of the clamped values; `alpha` has no part in it."""
    gate = clamped_gate(gate, limit)
    return mul_rn(mul_rn(gate, sigmoid(gate)), clamped_up(up, limit))


@device_function
def swigluoai(gate, up, alpha, limit):
    """(g * sig(alpha * g)) * (u + 1) of the clamped values."""
    gate = clamped_gate(gate, limit)
    gated = mul_rn(gate, sigmoid(mul_rn(alpha, gate)))
    return mul_rn(gated, add_rn(clamped_up(up, limit), _ONE))


@device_function
def gelu_tanh(gate, up, alpha, limit):
    """gelu(g) * u in its tanh form; `alpha` and `limit` have no part in it."""
    gate = max_nan(gate, _LOWEST)
    cube = mul_rn(mul_rn(gate, gate), gate)
    inner = mul_rn(_GELU_FACTOR, add_rn(gate, mul_rn(_GELU_CUBIC, cube)))
    return mul_rn(mul_rn(mul_rn(_HALF, gate), add_rn(_ONE, tanh(inner))), up)


_BY_NAME = {"silu": silu, "swigluoai": swigluoai, "gelu_tanh": gelu_tanh}


@functools.cache
def make_gated_activation(activation: str | Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """The device function `f(gate, up, alpha, limit) -> z`, all f32, of an activation.

    Args:
        activation: "silu", "swigluoai" or "gelu_tanh", or a plain function of two scalars that
            Numba can compile. No executor contracts its float32 sums and products, so their bits
            are the same everywhere; functions of `math` differ between executors.
    """
    if isinstance(activation, str):
        return _BY_NAME[activation]
    # A clone carries the mark, so that the caller's own function stays as it is.
    custom = device_function(
        pytypes.FunctionType(
            activation.__code__,
            activation.__globals__,
            activation.__name__,
            activation.__defaults__,
            activation.__closure__,
        )
    )

    @device_function
    def custom_activation(gate, up, alpha, limit):
        return np.float32(custom(gate, up))

    return custom_activation
