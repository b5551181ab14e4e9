"""Decoding of MXFP4 weights that are folded into e4m3 (`nbmoe_kernels.prepared_w4a8`).

The e4m3 codes of the 8 magnitudes times a power of two are 8 bytes, two words: four codes are one
permutation of them with their magnitudes as the selector. From 2^-5 on none of these codes is
subnormal, and from a power to the next every byte but that of 0 grows by 8: the words are a product
and a sum. Other powers are rare, and marked.

Decoding is limited by the logic unit, which takes a warp's mask, shift or permutation in two
cycles. So what the unit that multiplies can do is its.
"""

import numpy as np
from numba import cuda

from nbmoe_kernels.device.convert import permute_bytes
from nbmoe_kernels.device.memory import load_shared_v2, load_shared_v4
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.prepared_w4a8 import CODE_BYTES, NAN_POWER, POWER_BIAS, UNUSUAL

_PLANE_WORDS = CODE_BYTES // 8
_ANY_UNUSUAL = np.uint32(UNUSUAL * 0x01010101)
_MAGNITUDES, _SIGNS = np.uint32(0x77777777), np.uint32(0x80808080)
# Codes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6 times 2^-8, as they would be without subnormals.
_LOW_STEP, _HIGH_STEP = np.uint32(0x08080800), np.uint32(0x08080808)
_LOW_FIRST = np.uint32((0x3C383000 - POWER_BIAS * 0x08080800) % 2**32)
_HIGH_FIRST = np.uint32((0x4C484440 - POWER_BIAS * 0x08080808) % 2**32)
# As they are: multiples of 2^-9, the smallest e4m3.
_LOW_SUBNORMAL, _HIGH_SUBNORMAL = np.uint32(0x03020100), np.uint32(0x0C080604)
_NANS = np.uint32(0x7F7F7F7F)


@device_function
def _unusual_words(power, high):
    if power == np.uint32(NAN_POWER):
        return _NANS, _NANS
    if power == np.uint32(0):
        high = _HIGH_SUBNORMAL
    return np.uint32(_LOW_SUBNORMAL << power), high


@device_function
def _decode_words(codes, powers, is_usual, out, first):
    """Both rows' words of a step and of the next one, each with a byte of ``powers``."""
    for i in unroll(range(4)):
        byte = permute_bytes(powers, np.uint32(0), np.uint32(0x4440 + i))
        power = byte if is_usual else np.uint32(byte & np.uint32(15))
        low = np.uint32(np.uint32(power * _LOW_STEP) + _LOW_FIRST)
        high = np.uint32(np.uint32(power * _HIGH_STEP) + _HIGH_FIRST)
        if not is_usual and byte >= np.uint32(UNUSUAL):
            low, high = _unusual_words(power, high)
        at, word = first + 4 * (i // 2) + i % 2, codes[i]
        magnitudes = np.uint32(word & _MAGNITUDES)
        signs = np.uint32(np.uint32(word << np.uint32(4)) & _SIGNS)
        out[at] = np.uint32(permute_bytes(low, high, magnitudes) | signs)
        upper = permute_bytes(low, high, np.uint32(magnitudes >> np.uint32(16)))
        out[at + 2] = np.uint32(upper | np.uint32(word & _SIGNS))


@device_function
def decode_unit(words, at, first, out):
    """A's registers of a unit, for four steps; it begins at word ``at + first``, the latter a
    constant."""
    thread = np.uint32(np.uint32(cuda.threadIdx.x) & np.uint32(127))
    pair = np.uint32(np.uint32(thread >> np.uint32(2)) << np.uint32(1))
    powers_at = np.uint32(np.uint32(at + pair) + np.uint32(first + 2 * _PLANE_WORDS))
    low_powers, high_powers = load_shared_v2(words, powers_at)
    place = np.uint32(np.uint32(at + np.uint32(thread << np.uint32(2))) + np.uint32(first))
    low_codes = load_shared_v4(words, place)
    high_codes = load_shared_v4(words, np.uint32(place + np.uint32(_PLANE_WORDS)))
    if np.uint32(np.uint32(low_powers | high_powers) & _ANY_UNUSUAL) == np.uint32(0):
        _decode_words(low_codes, low_powers, True, out, 0)
        _decode_words(high_codes, high_powers, True, out, 8)
    else:
        _decode_words(low_codes, low_powers, False, out, 0)
        _decode_words(high_codes, high_powers, False, out, 8)
