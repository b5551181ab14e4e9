"""Four values a lane and token to codes: a block of 16 is four neighbouring lanes, one of 32 eight.

The arithmetic and its bits are those of `nbmoe_kernels.block_quantizer`. A usual NVFP4 scale takes
a shorter way to its multiplier.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.block_quantizer import BlockQuantizer, make_block_quantizer
from nbmoe_kernels.device.convert import e4m3x2_of_f32, permute_signs
from nbmoe_kernels.device.math import bits_f32, f32_bits, max_nan, mul_abs_sat, mul_rn
from nbmoe_kernels.device.nvfp4 import e2m1_count
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.usual import hidden, max_abs, reciprocal_usual
from nbmoe_kernels.device.warp import shuffle_xor

_ZERO, _EIGHTH, _SIXTH = np.float32(0.0), np.float32(0.125), np.float32(1.0 / 6.0)
_TWO_120 = np.float32(2.0**120)
_SMALLEST, _LARGEST = np.float32(2.0**-80), np.float32(2.0**80)
"""Tensor scales for which every block's multiplier is far from the ends of f32."""
_NAN_E2M1, _NAN_E4M3 = np.uint32(0x7777), np.uint32(0x7F7F7F7F)


def _make_block_max(block: int) -> Callable[..., Any]:
    has_eight_lanes = block == 32

    @device_function
    def block_max(z, at):
        amax = max_abs(max_abs(max_abs(z[at], z[at + 1]), z[at + 2]), z[at + 3])
        amax = max_nan(amax, bits_f32(shuffle_xor(f32_bits(amax), np.uint32(1))))
        amax = max_nan(amax, bits_f32(shuffle_xor(f32_bits(amax), np.uint32(2))))
        if has_eight_lanes:
            amax = max_nan(amax, bits_f32(shuffle_xor(f32_bits(amax), np.uint32(4))))
        return amax

    return block_max


@device_function
def _e2m1_codes(z, at, eighth):
    """Four codes in 16 bits of z * 8 * eighth; eighth is the multiplier / 8, exactly."""
    word = np.uint32(0)
    for i in unroll(range(4)):
        # What the counts have in front of the code is above bit 15, shifted or not.
        count = e2m1_count(mul_abs_sat(z[at + i], eighth))
        word = np.uint32(word + np.uint32(count << np.uint32(4 * i)))
    word = np.uint32(word - np.uint32(np.uint32(word & np.uint32(0x8888)) >> np.uint32(3)))
    even = permute_signs(f32_bits(z[at]), f32_bits(z[at + 2]), np.uint32(0x0073))
    odd = permute_signs(f32_bits(z[at + 1]), f32_bits(z[at + 3]), np.uint32(0x0073))
    word = np.uint32(np.uint32(word & np.uint32(0x7777)) | np.uint32(odd & np.uint32(0x8080)))
    return np.uint32(word | np.uint32(even & np.uint32(0x0808)))


def _make_quantize_nvfp4(quantizer: BlockQuantizer, tokens: int) -> Callable[..., Any]:
    block_max, block_scale = _make_block_max(16), quantizer.block_scale
    code_of_f32, nan_scale = quantizer.code_of_f32, quantizer.nan_scale

    @device_function
    def quantize_exactly(z, at, amax, tensor_scale, inverse):
        byte, multiplier = block_scale(amax, tensor_scale, inverse)
        word, shift = np.uint32(0), np.uint32(0)
        a, b, c, d = z[at], z[at + 1], z[at + 2], z[at + 3]
        # Rarely run, so one copy of the code: the values move past it.
        left = hidden(np.uint32(4))
        while left > np.uint32(0):
            word = np.uint32(word | np.uint32(code_of_f32(mul_rn(a, multiplier)) << shift))
            shift = np.uint32(shift + np.uint32(4))
            a, b, c = b, c, d
            left = np.uint32(left - np.uint32(1))
        return byte, _NAN_E2M1 if byte == nan_scale else word

    @device_function
    def quantize(z, bytes_, words, tensor_scale, inverse):
        amax = cuda.local.array(tokens, np.float32)
        scale = cuda.local.array(tokens, np.float32)
        for t in unroll(range(tokens)):
            amax[t] = block_max(z, 4 * t)
        for t in unroll(range(tokens)):
            byte = e4m3x2_of_f32(_ZERO, mul_rn(tensor_scale, mul_rn(amax[t], _SIXTH)))
            # The fields read as an f32 are the scale times 2^-120, subnormals included.
            value = mul_rn(bits_f32(np.uint32(byte << np.uint32(20))), _TWO_120)
            scale[t] = mul_rn(value, inverse)
            bytes_[t] = byte
        if tensor_scale >= _SMALLEST and tensor_scale <= _LARGEST:
            for t in unroll(range(tokens)):
                eighth = mul_rn(reciprocal_usual(scale[t]), _EIGHTH)
                if bytes_[t] == np.uint32(0):
                    eighth = _ZERO
                word = _e2m1_codes(z, 4 * t, eighth)
                words[t] = _NAN_E2M1 if bytes_[t] == nan_scale else word
        else:
            for t in unroll(range(tokens)):
                byte, word = quantize_exactly(z, 4 * t, amax[t], tensor_scale, inverse)
                bytes_[t] = byte
                words[t] = word

    return quantize


def _make_quantize_mxfp4(quantizer: BlockQuantizer, tokens: int) -> Callable[..., Any]:
    block_max, block_scale = _make_block_max(32), quantizer.block_scale
    nan_scale = quantizer.nan_scale

    @device_function
    def quantize(z, bytes_, words, tensor_scale, inverse):
        for t in unroll(range(tokens)):
            byte, multiplier = block_scale(block_max(z, 4 * t), tensor_scale, inverse)
            word = _e2m1_codes(z, 4 * t, mul_rn(multiplier, _EIGHTH))
            bytes_[t] = byte
            words[t] = _NAN_E2M1 if byte == nan_scale else word

    return quantize


def _make_quantize_mxfp8(quantizer: BlockQuantizer, tokens: int) -> Callable[..., Any]:
    block_max, block_scale = _make_block_max(32), quantizer.block_scale
    nan_scale = quantizer.nan_scale

    @device_function
    def quantize(z, bytes_, words, tensor_scale, inverse):
        for t in unroll(range(tokens)):
            byte, multiplier = block_scale(block_max(z, 4 * t), tensor_scale, inverse)
            at = 4 * t
            low = e4m3x2_of_f32(mul_rn(z[at + 1], multiplier), mul_rn(z[at], multiplier))
            high = e4m3x2_of_f32(mul_rn(z[at + 3], multiplier), mul_rn(z[at + 2], multiplier))
            word = np.uint32(low | np.uint32(high << np.uint32(16)))
            bytes_[t] = byte
            words[t] = _NAN_E4M3 if byte == nan_scale else word

    return quantize


_MAKERS = {
    "nvfp4": _make_quantize_nvfp4,
    "mxfp4": _make_quantize_mxfp4,
    "mxfp8": _make_quantize_mxfp8,
}


def make_quantize_quads(format: str, tokens: int) -> Callable[..., Any]:
    """``quantize(z, scales, words, tensor_scale, inverse)``: four z of each of ``tokens`` tokens to
    the scales of their blocks and four codes a word, 16 bits of it or, for "mxfp8", 32.

    All lanes of a warp come together. ``inverse`` is 1 / tensor_scale; MX formats use neither.
    """
    return _MAKERS[format](make_block_quantizer(format), tokens)
