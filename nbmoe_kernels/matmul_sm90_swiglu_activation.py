"""A gated activation on several pairs of bf16, as the fused Hopper matmul has them.

The formulas and their bits are those of `nbmoe_kernels.activation`. Usual gates take a shorter way
to them (`nbmoe_kernels.device.usual`); a thread with an unusual one takes the long way.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.activation import make_gated_activation
from nbmoe_kernels.device.convert import abs_bf16x2, f32_of_low_bf16, max_nan_bf16x2
from nbmoe_kernels.device.math import (
    add_rn,
    bits_f32,
    f32_bits,
    max_nan,
    min_nan,
    mul_rn,
    sub_rn,
)
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.usual import (
    LARGEST_EXPONENT,
    exp_negative,
    hidden,
    reciprocal_usual,
    sigmoid_of,
)

_ZERO, _HALF, _ONE, _TWO = (np.float32(x) for x in (0.0, 0.5, 1.0, 2.0))
_GELU_CUBIC = np.float32(0.044715)
_GELU_FACTOR = np.float32(0.7978845608028654)
_LARGEST_GELU = np.float32(9.0)
_HIGH = np.uint32(0xFFFF0000)


@device_function
def _silu(gate, up, alpha):
    return mul_rn(mul_rn(gate, sigmoid_of(gate)), up)


@device_function
def _silu_is_usual(largest, alpha):
    return largest <= LARGEST_EXPONENT


@device_function
def _swigluoai(gate, up, alpha):
    return mul_rn(mul_rn(gate, sigmoid_of(mul_rn(alpha, gate))), add_rn(up, _ONE))


@device_function
def _swigluoai_is_usual(largest, alpha):
    bound = bits_f32(np.uint32(f32_bits(alpha) & np.uint32(0x7FFFFFFF)))
    return largest <= LARGEST_EXPONENT and mul_rn(largest, bound) <= LARGEST_EXPONENT


@device_function
def _gelu_tanh(gate, up, alpha):
    cube = mul_rn(mul_rn(gate, gate), gate)
    inner = mul_rn(_GELU_FACTOR, add_rn(gate, mul_rn(_GELU_CUBIC, cube)))
    # exp(2 y), and 2 / x is twice 1 / x.
    exponential = exp_negative(np.float32(-add_rn(inner, inner)))
    tanh = sub_rn(_ONE, mul_rn(_TWO, reciprocal_usual(add_rn(_ONE, exponential))))
    return mul_rn(mul_rn(mul_rn(_HALF, gate), add_rn(_ONE, tanh)), up)


@device_function
def _gelu_is_usual(largest, alpha):
    return largest <= _LARGEST_GELU


_USUAL = {
    "silu": (_silu, _silu_is_usual, True),
    "swigluoai": (_swigluoai, _swigluoai_is_usual, True),
    "gelu_tanh": (_gelu_tanh, _gelu_is_usual, False),
}


@functools.cache
def make_activate(activation: str, count: int) -> Callable[..., Any]:
    """``activate(words, z, alpha, limit)``: ``count`` words (gate low, up high) to as many f32 z.

    The words are lost.
    """
    usual, is_usual, is_clamped = _USUAL[activation]
    gated = make_gated_activation(activation)

    @device_function
    def activate_usual(words, z, alpha, limit):
        gates, ups = cuda.local.array(count, np.float32), cuda.local.array(count, np.float32)
        for i in unroll(range(count)):
            gates[i] = f32_of_low_bf16(words[i])
            ups[i] = bits_f32(np.uint32(words[i] & _HIGH))
        if is_clamped and limit > _ZERO:
            for i in unroll(range(count)):
                gates[i] = min_nan(gates[i], limit)
                ups[i] = max_nan(min_nan(ups[i], limit), np.float32(-limit))
        for i in unroll(range(count)):
            z[i] = usual(gates[i], ups[i], alpha)

    @device_function
    def activate(words, z, alpha, limit):
        largest = abs_bf16x2(words[0])
        for i in unroll(range(1, count)):
            largest = max_nan_bf16x2(largest, abs_bf16x2(words[i]))
        if is_usual(f32_of_low_bf16(largest), alpha):
            activate_usual(words, z, alpha, limit)
        else:
            # Rarely run, so one copy of the code: the words move past it.
            left = hidden(np.uint32(count))
            while left > np.uint32(0):
                gate = f32_of_low_bf16(words[0])
                value = gated(gate, bits_f32(np.uint32(words[0] & _HIGH)), alpha, limit)
                for i in unroll(range(count - 1)):
                    words[i] = words[i + 1]
                words[count - 1] = f32_bits(value)
                left = np.uint32(left - np.uint32(1))
            for i in unroll(range(count)):
                z[i] = bits_f32(words[i])

    return activate
