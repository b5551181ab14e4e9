"""What block quantizers share: who handles which elements of a tile, codes, the scale tile.

A tile is 128 rows by four scale columns. A thread handles 16 neighbouring columns, 8 words of bf16,
in 128 / PASS_ROWS rows. With L threads a row (4 for blocks of 16, 8 for blocks of 32, where
neighbours share a block), thread t has columns [16 (t % L), 16 (t % L) + 16) of the tile in rows
t // L + PASS_ROWS p. The scale of row r and scale column c is byte (r % 32) * 16 + r // 32 * 4 + c
of the tile.
"""

import functools
from dataclasses import dataclass

import numpy as np

from nbmoe_kernels.block_quantizer import BlockQuantizer, DeviceFunction, make_block_quantizer
from nbmoe_kernels.device.convert import bf16x2_of_f32, f32_of_bf16, max_nan_bf16x2
from nbmoe_kernels.device.math import bits_f32, div_rn, f32_bits, max_nan, mul_rn
from nbmoe_kernels.device.memory import load_v4, store_v2, store_v4
from nbmoe_kernels.device.mx import pack_low_bytes, quantize_4
from nbmoe_kernels.device.nvfp4 import quantize_8
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.warp import shuffle_xor

THREADS = 128
PASSES = 4
"""Rows of a thread whose loads are in flight together."""

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_MAGNITUDES = np.uint32(0x7FFF7FFF)
_ALL_SIGNS = np.uint32(0x88888888)
_NAN_E4M3 = np.uint32(0x7F7F7F7F)


@dataclass(frozen=True)
class QuantizeTile:
    """The shape of a format's tiles, and the device functions of a thread's 16 elements.

    Attributes:
        quantizer: the format's arithmetic.
        columns: elements of a tile's row.
        lanes: threads of a row.
        pass_rows: rows that the block handles at once.
        groups: how many times PASSES rows a thread has.
        shares_block: whether two neighbours share a scale.
        word_shift: log2 of the elements in a word of codes.
        encode_words: ``(words, at, byte, multiplier) -> w0, w1, w2, w3``, the codes of the 16 bf16
            in words[at : at + 8]; four-bit codes leave w2 and w3 0.
        encode_values: ``(values, multiplier) -> w0, w1, w2, w3`` of 16 f32.
        store_codes: ``(output, at, w0, w1, w2, w3)`` stores them from word ``at`` on.
    """

    quantizer: BlockQuantizer
    columns: int
    lanes: int
    pass_rows: int
    groups: int
    shares_block: bool
    word_shift: int
    encode_words: DeviceFunction
    encode_values: DeviceFunction
    store_codes: DeviceFunction


@device_function
def load_16(input, at, words, first):
    """16 bf16 from word ``at`` on to words[first : first + 8]."""
    w0, w1, w2, w3 = load_v4(input, at)
    w4, w5, w6, w7 = load_v4(input, at + np.uint64(4))
    words[first] = w0
    words[first + 1] = w1
    words[first + 2] = w2
    words[first + 3] = w3
    words[first + 4] = w4
    words[first + 5] = w5
    words[first + 6] = w6
    words[first + 7] = w7


@device_function
def amax_of_words(words, at):
    """Largest magnitude of the 16 bf16 in words[at : at + 8]; NaN if any is."""
    largest = np.uint32(words[at] & _MAGNITUDES)
    for i in unroll(range(1, 8)):
        largest = max_nan_bf16x2(largest, np.uint32(words[at + i] & _MAGNITUDES))
    low = bits_f32(np.uint32(largest << np.uint32(16)))
    return max_nan(low, bits_f32(np.uint32(largest & np.uint32(0xFFFF0000))))


@device_function
def amax_of_values(values):
    """Largest magnitude of the 16 f32; NaN if any is."""
    largest = bits_f32(np.uint32(f32_bits(values[0]) & np.uint32(0x7FFFFFFF)))
    for i in unroll(range(1, 16)):
        magnitude = bits_f32(np.uint32(f32_bits(values[i]) & np.uint32(0x7FFFFFFF)))
        largest = max_nan(largest, magnitude)
    return largest


@device_function
def relu_squared(x):
    """bf16(max(x, 0)^2) as f32; a NaN stays."""
    positive = max_nan(x, _ZERO)
    return f32_of_bf16(bf16x2_of_f32(_ZERO, mul_rn(positive, positive)))


@device_function
def rescale_16(words, at, row_scale, relu2):
    """Replace each x of the 16 bf16 in words[at : at + 8] by bf16(x * (1 / row_scale))."""
    inverse = div_rn(_ONE, f32_of_bf16(row_scale))
    for i in unroll(range(8)):
        low = f32_of_bf16(words[at + i])
        high = bits_f32(np.uint32(words[at + i] & np.uint32(0xFFFF0000)))
        if relu2 != np.uint32(0):
            low = relu_squared(low)
            high = relu_squared(high)
        words[at + i] = bf16x2_of_f32(mul_rn(high, inverse), mul_rn(low, inverse))


@device_function
def pair_max(x):
    """The larger x of two neighbouring lanes; NaN wins."""
    return max_nan(x, bits_f32(shuffle_xor(f32_bits(x), np.uint32(1))))


@functools.cache
def make_quantize_tile(format: str, rule: str) -> QuantizeTile:
    """The tile of a format under a scale rule."""
    quantizer = make_block_quantizer(format, rule)
    code_of_f32, nan_scale = quantizer.code_of_f32, quantizer.nan_scale

    @device_function
    def encode_e2m1_words(words, at, byte, multiplier):
        # A NaN block's codes are all 7: no signs.
        signs = np.uint32(0) if byte == nan_scale else _ALL_SIGNS
        low = quantize_8(words[at], words[at + 1], words[at + 2], words[at + 3], multiplier, signs)
        high = quantize_8(
            words[at + 4], words[at + 5], words[at + 6], words[at + 7], multiplier, signs
        )
        return low, high, np.uint32(0), np.uint32(0)

    @device_function
    def encode_e4m3_words(words, at, byte, multiplier):
        w0 = quantize_4(words[at], words[at + 1], multiplier)
        w1 = quantize_4(words[at + 2], words[at + 3], multiplier)
        w2 = quantize_4(words[at + 4], words[at + 5], multiplier)
        w3 = quantize_4(words[at + 6], words[at + 7], multiplier)
        if byte == nan_scale:
            w0 = _NAN_E4M3
            w1 = _NAN_E4M3
            w2 = _NAN_E4M3
            w3 = _NAN_E4M3
        return w0, w1, w2, w3

    @device_function
    def encode_e2m1_values(values, multiplier):
        low = np.uint32(0)
        high = np.uint32(0)
        for i in unroll(range(8)):
            shift = np.uint32(4 * i)
            low = np.uint32(low | np.uint32(code_of_f32(mul_rn(values[i], multiplier)) << shift))
            upper = code_of_f32(mul_rn(values[i + 8], multiplier))
            high = np.uint32(high | np.uint32(upper << shift))
        return low, high, np.uint32(0), np.uint32(0)

    @device_function
    def four_codes(values, at, multiplier):
        return pack_low_bytes(
            code_of_f32(mul_rn(values[at], multiplier)),
            code_of_f32(mul_rn(values[at + 1], multiplier)),
            code_of_f32(mul_rn(values[at + 2], multiplier)),
            code_of_f32(mul_rn(values[at + 3], multiplier)),
        )

    @device_function
    def encode_e4m3_values(values, multiplier):
        return (
            four_codes(values, 0, multiplier),
            four_codes(values, 4, multiplier),
            four_codes(values, 8, multiplier),
            four_codes(values, 12, multiplier),
        )

    @device_function
    def store_e2m1(output, at, w0, w1, w2, w3):
        store_v2(output, at, w0, w1)

    lanes = quantizer.block // 4
    is_e2m1 = quantizer.code_bits == 4
    return QuantizeTile(
        quantizer,
        columns=4 * quantizer.block,
        lanes=lanes,
        pass_rows=THREADS // lanes,
        groups=lanes // 4,
        shares_block=quantizer.block == 32,
        word_shift=3 if is_e2m1 else 2,
        encode_words=encode_e2m1_words if is_e2m1 else encode_e4m3_words,
        encode_values=encode_e2m1_values if is_e2m1 else encode_e4m3_values,
        store_codes=store_e2m1 if is_e2m1 else store_v4,
    )
