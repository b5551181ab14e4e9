"""The block formats' arithmetic, as device functions that every quantizing kernel is built from."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbmoe_kernels.device import nvfp4
from nbmoe_kernels.device.mx import (
    NAN_BYTE,
    e4m3_code_of_f32,
    exponent_byte,
    inverse_power,
    rceil_byte,
)
from nbmoe_kernels.device.op import device_function

DeviceFunction = Callable[..., Any]


@dataclass(frozen=True)
class BlockQuantizer:
    """How values become scale bytes and codes.

    Attributes:
        format: "nvfp4", "mxfp4" or "mxfp8".
        block: elements that share a scale byte.
        code_bits: 4 (e2m1) or 8 (e4m3).
        nan_scale: the scale byte of a block with a NaN; all its codes are ``nan_code``.
        nan_code: 7 or 0x7F, without sign.
        block_scale: ``(amax, tensor_scale, inverse_tensor_scale) -> (byte, multiplier)`` of a
            block whose largest magnitude is amax >= 0 or NaN. MX formats ignore the tensor scales.
        code_of_f32: ``v -> code`` of ``v = x * multiplier``, with its sign; NaN gives nan_code.
    """

    format: str
    block: int
    code_bits: int
    nan_scale: np.uint32
    nan_code: np.uint32
    block_scale: DeviceFunction
    code_of_f32: DeviceFunction


@functools.cache
def make_block_quantizer(format: str, rule: str = "rceil") -> BlockQuantizer:
    """The quantizer of a format.

    Args:
        format: "nvfp4", "mxfp4" or "mxfp8".
        rule: how MX formats choose a scale, "rceil", "even" or "floor".
    """
    if format == "nvfp4":
        return BlockQuantizer(
            format, 16, 4, nvfp4.NAN_SCALE, np.uint32(7), nvfp4.block_scale, nvfp4.code_of_f32
        )
    if format == "mxfp4":
        scale = _make_block_scale(rule, max_value=6.0, max_exponent=2, mantissa_bits=1)
        return BlockQuantizer(format, 32, 4, NAN_BYTE, np.uint32(7), scale, nvfp4.code_of_f32)
    if format == "mxfp8":
        scale = _make_block_scale(rule, max_value=448.0, max_exponent=8, mantissa_bits=3)
        return BlockQuantizer(format, 32, 8, NAN_BYTE, np.uint32(0x7F), scale, e4m3_code_of_f32)
    raise ValueError(f"make_block_quantizer: there is no block format {format!r}")


def _make_block_scale(
    rule: str, max_value: float, max_exponent: int, mantissa_bits: int
) -> DeviceFunction:
    inverse_max = np.float32(1) / np.float32(max_value)
    carry = np.uint32(1 << (22 - mantissa_bits)) if rule == "even" else np.uint32(0)
    largest = np.uint32(max_exponent)

    @device_function
    def rceil_scale(amax, tensor_scale, inverse_tensor_scale):
        byte = rceil_byte(amax, inverse_max)
        return byte, inverse_power(byte)

    @device_function
    def exponent_scale(amax, tensor_scale, inverse_tensor_scale):
        byte = exponent_byte(amax, carry, largest)
        return byte, inverse_power(byte)

    if rule not in ("rceil", "even", "floor"):
        raise ValueError(f"make_block_quantizer: there is no scale rule {rule!r}")
    return rceil_scale if rule == "rceil" else exponent_scale
