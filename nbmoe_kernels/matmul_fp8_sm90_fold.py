"""Decoding of MXFP4 weights that are folded into e4m3 (`nbmoe_kernels.prepared_w4a8`).

A table in shared memory has the e4m3 codes of the 8 magnitudes for each power of two, so that four
codes are one permutation of its bytes, with their magnitudes as the selector.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.convert import e4m3_of_f32, permute_bytes
from nbmoe_kernels.device.math import bits_f32
from nbmoe_kernels.device.memory import load_shared_v2, load_shared_v4
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.prepared_w4a8 import NAN_POWER, POWER_BIAS

TABLE_BYTES = 128
_PLANE_WORDS = 512
_MAGNITUDES, _SIGNS = np.uint32(0x77777777), np.uint32(0x80808080)


def make_fill_table(table_at: int) -> Callable[..., Any]:
    """``fill_table(smem)``: 128 threads make the table at byte ``table_at``, a byte each."""

    @device_function
    def fill_table(smem):
        thread = np.uint32(cuda.threadIdx.x)
        if thread < np.uint32(TABLE_BYTES):
            power = np.uint32(thread >> np.uint32(3))
            magnitude = np.uint32(thread & np.uint32(7))
            # e2m1: 0, 0.5, then 1, 1.5 times 1, 2, 4.
            exponent = np.uint32(np.uint32(126) + np.uint32(magnitude >> np.uint32(1)))
            bits = np.uint32(exponent << np.uint32(23))
            if magnitude > np.uint32(1):
                bits = np.uint32(
                    bits | np.uint32(np.uint32(magnitude & np.uint32(1)) << np.uint32(22))
                )
            bits = np.uint32(bits + np.uint32(power << np.uint32(23)))
            bits = np.uint32(bits - np.uint32(POWER_BIAS << 23))
            if magnitude == np.uint32(0):
                bits = np.uint32(0)
            if power == np.uint32(NAN_POWER):
                bits = np.uint32(0x7FFFFFFF)
            smem[np.uint32(np.uint32(table_at) + thread)] = np.uint8(e4m3_of_f32(bits_f32(bits)))

    return fill_table


def make_decode_unit(table_at: int) -> Callable[..., Any]:
    """``decode_unit(words, at, out)``: A's registers of the unit at word ``at``, four steps."""
    first_entry = table_at // 4

    @device_function
    def decode_word(words, word, power, out, first):
        entry = np.uint32(np.uint32(first_entry) + np.uint32(power << np.uint32(1)))
        low, high = load_shared_v2(words, entry)
        magnitudes = np.uint32(word & _MAGNITUDES)
        signs = np.uint32(np.uint32(word << np.uint32(4)) & _SIGNS)
        out[first] = np.uint32(permute_bytes(low, high, magnitudes) | signs)
        upper = permute_bytes(low, high, np.uint32(magnitudes >> np.uint32(16)))
        out[first + 2] = np.uint32(upper | np.uint32(word & _SIGNS))

    @device_function
    def decode_unit(words, at, out):
        thread = np.uint32(np.uint32(cuda.threadIdx.x) & np.uint32(127))
        powers_at = np.uint32(at + np.uint32(2 * _PLANE_WORDS))
        powers = load_shared_v2(
            words,
            np.uint32(powers_at + np.uint32(np.uint32(thread >> np.uint32(2)) << np.uint32(1))),
        )
        low_powers, high_powers = powers
        place = np.uint32(at + np.uint32(thread << np.uint32(2)))
        w0, w1, w2, w3 = load_shared_v4(words, place)
        decode_step(words, w0, w1, low_powers, out, 0)
        decode_step(words, w2, w3, np.uint32(low_powers >> np.uint32(16)), out, 4)
        w0, w1, w2, w3 = load_shared_v4(words, np.uint32(place + np.uint32(_PLANE_WORDS)))
        decode_step(words, w0, w1, high_powers, out, 8)
        decode_step(words, w2, w3, np.uint32(high_powers >> np.uint32(16)), out, 12)

    @device_function
    def decode_step(words, first_row, second_row, powers, out, first):
        decode_word(words, first_row, np.uint32(powers & np.uint32(15)), out, first)
        second = np.uint32(np.uint32(powers >> np.uint32(8)) & np.uint32(15))
        decode_word(words, second_row, second, out, first + 1)

    return decode_unit
