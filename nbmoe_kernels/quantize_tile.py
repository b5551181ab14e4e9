"""What block quantizers share: who handles which elements, codes, scale tiles.

A block of four warps handles 128 rows of one slot, those of a scale tile, by 256 columns; warp w
the panel of 64 columns from 64 w on. Where that makes too few blocks, it is 128 or 64 columns wide,
and 2 or 4 warps share the rows of a panel: `place_of_warp`. In a pass lane 4 g + t has the 16
columns from 16 t on of row g of eight, and in blocks of 32 two neighbouring lanes share a scale.
The 128 rows are 16 passes.

The scale of row r and scale column c of a tile is byte (r % 32) * 16 + r // 32 * 4 + c of its 512.
The tiles of a block, four or for blocks of 32 two, lie in shared memory one after another.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numba import cuda

from nbmoe_kernels.block_quantizer import BlockQuantizer, DeviceFunction, make_block_quantizer
from nbmoe_kernels.device.convert import (
    abs_bf16x2,
    bf16x2_of_f32,
    f32_of_bf16,
    f32_of_e4m3,
    f32_of_low_bf16,
    max_nan_bf16x2,
    permute_bytes,
)
from nbmoe_kernels.device.math import (
    bits_f32,
    div_rn,
    f32_bits,
    max_nan,
    mul_abs_sat,
    mul_rn,
)
from nbmoe_kernels.device.memory import load_v4, store_v2, store_v4
from nbmoe_kernels.device.mx import pack_low_bytes, quantize_4
from nbmoe_kernels.device.nvfp4 import (
    INTEGER_SUM,
    e2m1_count,
    quantize_8,
    scale_code,
    sevens_for_eights,
    with_signs,
)
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.warp import shuffle_xor

THREADS = 128
MIN_BLOCKS = 6
"""Blocks on an SM: enough warps to hide the loads behind the arithmetic of others."""

BLOCK_COLUMNS = 256
MANY_BLOCKS = 6000
"""More than seven times what an H200 runs at once."""

TILE_ROWS = 128
PASS_ROWS = 8
TILE_BYTES = 512

_ZERO, _ONE, _EIGHTH = np.float32(0.0), np.float32(1.0), np.float32(0.125)
_NAN_E2M1, _NAN_E4M3 = np.uint32(0x77777777), np.uint32(0x7F7F7F7F)


@dataclass(frozen=True)
class QuantizeTile:
    """A format's part of a quantizer: the device functions of a thread's 16 elements.

    Attributes:
        quantizer: the format's arithmetic.
        shares_block: whether two neighbours share a scale.
        word_shift: log2 of the elements in a word of codes.
        scale_of: ``(amax, tensor_scale, inverse_tensor_scale, table) -> byte, factor`` of a block;
            ``table`` as `fill_table` makes it.
        encode_words: ``(words, at, byte, factor) -> w0, w1, w2, w3``, the codes of the 16 bf16 in
            words[at : at + 8]; four-bit codes leave w2 and w3 0.
        encode_values: ``(values, byte, factor) -> w0, w1, w2, w3`` of 16 f32.
        store_codes: ``(output, at, w0, w1, w2, w3)`` stores them from word ``at`` on.
    """

    quantizer: BlockQuantizer
    shares_block: bool
    word_shift: int
    scale_of: DeviceFunction
    encode_words: DeviceFunction
    encode_values: DeviceFunction
    store_codes: DeviceFunction


def split_of(num_rows: int, num_slots: int, num_tiles: int, num_cols: int, most: int) -> int:
    """Into how many parts, as a power of two, a panel's rows are split; changes no byte.

    With few rows a slot parts of a tile would be empty. Else the last blocks of a grid leave
    multiprocessors idle for as long as a block takes, which should be little beside the whole.
    """
    if num_rows < TILE_ROWS // 2 * num_slots:
        return 0
    split = 0
    while split < most and num_tiles * -(-num_cols * 2**split // BLOCK_COLUMNS) < MANY_BLOCKS:
        split += 1
    return split


def column_blocks_of(num_cols: int, split: int) -> int:
    """Blocks across."""
    return -(-num_cols * 2**split // BLOCK_COLUMNS)


@device_function
def place_of_warp(thread, across, split):
    """(panel, its place in the block, first row, end of rows) of a thread's warp."""
    warp = np.uint32(thread >> np.uint32(5))
    log = np.uint32(np.uint32(2) - split)
    in_block = np.uint32(warp & np.uint32(np.uint32(np.uint32(1) << log) - np.uint32(1)))
    height = np.uint32(np.uint32(TILE_ROWS) >> split)
    first = np.uint32(np.uint32(warp >> log) * height)
    panel = np.uint32(np.uint32(across << log) + in_block)
    return panel, in_block, first, np.uint32(first + height)


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
    largest = abs_bf16x2(words[at])
    for i in unroll(range(1, 8)):
        largest = max_nan_bf16x2(largest, abs_bf16x2(words[at + i]))
    return max_nan(f32_of_low_bf16(largest), bits_f32(np.uint32(largest & np.uint32(0xFFFF0000))))


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
        low = f32_of_low_bf16(words[at + i])
        high = bits_f32(np.uint32(words[at + i] & np.uint32(0xFFFF0000)))
        if relu2 != np.uint32(0):
            low = relu_squared(low)
            high = relu_squared(high)
        words[at + i] = bf16x2_of_f32(mul_rn(high, inverse), mul_rn(low, inverse))


@device_function
def pair_max(x):
    """The larger x of two neighbouring lanes; NaN wins."""
    return max_nan(x, bits_f32(shuffle_xor(f32_bits(x), np.uint32(1))))


@device_function
def place_of_scale(first, row_in_pass):
    """Where a tile has the scale of the first column and of a row of the pass from ``first`` on."""
    row = np.uint32(np.uint32(first & np.uint32(31)) + row_in_pass)
    high = np.uint32(np.uint32(first >> np.uint32(5)) << np.uint32(2))
    return np.uint32(np.uint32(row << np.uint32(4)) + high)


_SMALLEST_USUAL, _LARGEST_USUAL = np.float32(2.0**-80), np.float32(2.0**80)


@device_function
def is_usual(tensor_scale):
    """Whether 1 / (scale / tensor_scale) is a normal f32 far from the ends for every e4m3 scale."""
    return _SMALLEST_USUAL <= tensor_scale and tensor_scale <= _LARGEST_USUAL


@device_function
def fill_table(table, thread, inverse_tensor_scale):
    """Thread ``byte`` of 128 stores multiplier / 8 of scale code ``byte`` in table[byte]."""
    multiplier = _ZERO
    if thread != np.uint32(0):
        multiplier = div_rn(_ONE, mul_rn(f32_of_e4m3(thread), inverse_tensor_scale))
    table[thread] = mul_rn(multiplier, _EIGHTH)


@device_function
def _count_8(values, at, eighth):
    word = e2m1_count(mul_abs_sat(values[at], eighth))
    for i in unroll(range(1, 8)):
        count = e2m1_count(mul_abs_sat(values[at + i], eighth))
        word = np.uint32(word + np.uint32(count << np.uint32(4 * i)))
    return sevens_for_eights(np.uint32(word - INTEGER_SUM))


@device_function
def _high_halves(values, at):
    """The high halves of two f32 in a word, for their signs."""
    return permute_bytes(f32_bits(values[at]), f32_bits(values[at + 1]), np.uint32(0x7632))


@device_function
def _code_8(values, at, eighth):
    return with_signs(
        _count_8(values, at, eighth),
        _high_halves(values, at),
        _high_halves(values, at + 2),
        _high_halves(values, at + 4),
        _high_halves(values, at + 6),
    )


@device_function
def store_e2m1(output, at, w0, w1, w2, w3):
    """Store 16 four-bit codes."""
    store_v2(output, at, w0, w1)


@functools.cache
def make_quantize_tile(format: str, rule: str, is_exact: bool = False) -> QuantizeTile:
    """The functions of a format under a scale rule.

    Args:
        format: "nvfp4", "mxfp4" or "mxfp8".
        rule: how MX formats choose a scale, "rceil", "even" or "floor".
        is_exact: whether NVFP4 must take tensor scales that are not `is_usual`, at half the speed.
    """
    quantizer = make_block_quantizer(format, rule)
    if format == "mxfp8":
        return _make_e4m3_tile(quantizer)
    if format == "nvfp4":
        return _make_exact_tile(quantizer) if is_exact else _make_nvfp4_tile(quantizer)
    return _make_mxfp4_tile(quantizer)


def _make_e2m1_tile(quantizer: BlockQuantizer, scale_of: DeviceFunction) -> QuantizeTile:
    """A tile whose factor is the multiplier / 8."""
    nan_scale = quantizer.nan_scale

    @device_function
    def encode_words(words, at, byte, factor):
        low = quantize_8(words[at], words[at + 1], words[at + 2], words[at + 3], factor)
        high = quantize_8(words[at + 4], words[at + 5], words[at + 6], words[at + 7], factor)
        if byte == nan_scale:
            low = _NAN_E2M1
            high = _NAN_E2M1
        return low, high, np.uint32(0), np.uint32(0)

    @device_function
    def encode_values(values, byte, factor):
        low = _code_8(values, 0, factor)
        high = _code_8(values, 8, factor)
        if byte == nan_scale:
            low = _NAN_E2M1
            high = _NAN_E2M1
        return low, high, np.uint32(0), np.uint32(0)

    shares_block = quantizer.block == 32
    return QuantizeTile(
        quantizer, shares_block, 3, scale_of, encode_words, encode_values, store_e2m1
    )


def _make_nvfp4_tile(quantizer: BlockQuantizer) -> QuantizeTile:
    @device_function
    def scale_of(amax, tensor_scale, inverse, table):
        byte = scale_code(amax, tensor_scale)
        return byte, table[byte]

    return _make_e2m1_tile(quantizer, scale_of)


def _make_mxfp4_tile(quantizer: BlockQuantizer) -> QuantizeTile:
    block_scale = quantizer.block_scale

    @device_function
    def scale_of(amax, tensor_scale, inverse, table):
        byte, multiplier = block_scale(amax, tensor_scale, inverse)
        return byte, mul_rn(multiplier, _EIGHTH)

    return _make_e2m1_tile(quantizer, scale_of)


def _make_exact_tile(quantizer: BlockQuantizer) -> QuantizeTile:
    """Element by element: the multiplier may be 0, subnormal or the largest f32."""
    block_scale, code_of_f32 = quantizer.block_scale, quantizer.code_of_f32

    @device_function
    def scale_of(amax, tensor_scale, inverse, table):
        return block_scale(amax, tensor_scale, inverse)

    @device_function
    def encode_values(values, byte, factor):
        low = np.uint32(0)
        high = np.uint32(0)
        for i in unroll(range(8)):
            shift = np.uint32(4 * i)
            low = np.uint32(low | np.uint32(code_of_f32(mul_rn(values[i], factor)) << shift))
            upper = code_of_f32(mul_rn(values[i + 8], factor))
            high = np.uint32(high | np.uint32(upper << shift))
        return low, high, np.uint32(0), np.uint32(0)

    @device_function
    def encode_words(words, at, byte, factor):
        values = cuda.local.array(16, np.float32)
        for i in unroll(range(8)):
            values[2 * i] = f32_of_low_bf16(words[at + i])
            values[2 * i + 1] = bits_f32(np.uint32(words[at + i] & np.uint32(0xFFFF0000)))
        return encode_values(values, byte, factor)

    return QuantizeTile(quantizer, False, 3, scale_of, encode_words, encode_values, store_e2m1)


def _make_e4m3_tile(quantizer: BlockQuantizer) -> QuantizeTile:
    block_scale, code_of_f32 = quantizer.block_scale, quantizer.code_of_f32
    nan_scale = quantizer.nan_scale

    @device_function
    def scale_of(amax, tensor_scale, inverse, table):
        return block_scale(amax, tensor_scale, inverse)

    @device_function
    def encode_words(words, at, byte, multiplier):
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
    def four_codes(values, at, multiplier):
        return pack_low_bytes(
            code_of_f32(mul_rn(values[at], multiplier)),
            code_of_f32(mul_rn(values[at + 1], multiplier)),
            code_of_f32(mul_rn(values[at + 2], multiplier)),
            code_of_f32(mul_rn(values[at + 3], multiplier)),
        )

    @device_function
    def encode_values(values, byte, multiplier):
        return (
            four_codes(values, 0, multiplier),
            four_codes(values, 4, multiplier),
            four_codes(values, 8, multiplier),
            four_codes(values, 12, multiplier),
        )

    return QuantizeTile(quantizer, True, 2, scale_of, encode_words, encode_values, store_v4)
