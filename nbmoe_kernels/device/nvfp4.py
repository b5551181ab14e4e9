"""NVFP4 blocks in registers: the scale rule, e2m1 rounding and packing.

Scale of a block with maximum amax under the tensor's inverse scale tsf:

    s8 = e4m3(tsf * (amax * (1/6)))
    r  = 0 if s8 is zero else min(1 / (s8 * (1/tsf)), FLT_MAX)

and an element's code is e2m1(x * r).
"""

import numpy as np

from nbmoe_kernels.device.convert import (
    e4m3_of_f32,
    f32_of_e4m3,
    f32_of_low_bf16,
    permute_bytes,
    permute_signs,
)
from nbmoe_kernels.device.math import bits_f32, div_rn, f32_bits, fma_rn, mul_abs_sat, mul_rn
from nbmoe_kernels.device.op import device_function

_SIXTH = np.float32(1.0 / 6.0)
_ZERO, _EIGHTH, _ONE, _FOUR, _EIGHT = (np.float32(v) for v in (0.0, 0.125, 1.0, 4.0, 8.0))
_SIXTEEN = np.float32(16.0)
_EIGHTS = np.uint32(0x88888888)
_LARGEST = np.float32(3.4028234663852886e38)
NAN_SCALE = np.uint32(0x7F)


@device_function
def scale_code(amax, tensor_scale):
    """The e4m3 scale code of a block whose largest magnitude is amax."""
    return e4m3_of_f32(mul_rn(tensor_scale, mul_rn(amax, _SIXTH)))


@device_function
def block_scale(amax, tensor_scale, inverse_tensor_scale):
    """(e4m3 scale code, element multiplier) of a block whose largest magnitude is amax."""
    code = scale_code(amax, tensor_scale)
    multiplier = _ZERO
    if code != np.uint32(0):
        multiplier = div_rn(_ONE, mul_rn(f32_of_e4m3(code), inverse_tensor_scale))
        if multiplier > _LARGEST:
            multiplier = _LARGEST
    return code, multiplier


# At 2^23 the f32 grid is 1, so adding it rounds to an integer, ties to even.
_INTEGER = np.float32(2.0**23)
_INTEGER_2 = np.float32(2.0**23 + 2)
_INTEGER_4 = np.float32(2.0**23 + 4)
INTEGER_BITS = np.uint32(0x4B000000)


@device_function
def e2m1_count(eighth):
    """INTEGER_BITS plus the e2m1 code of v = 8 * eighth in [0, 8], or plus 8 where that is past 7.

    The code is round(min(2v, v + 2, v/2 + 4)): one line for each binade, the smallest is the right
    one, and codes have the parity of mantissas, so ties agree. Rounding is monotone, so it may come
    before the minimum; then each line is rounded once. Positive floats order as their bits do.
    """
    below_2 = f32_bits(fma_rn(eighth, _SIXTEEN, _INTEGER))
    below_4 = f32_bits(fma_rn(eighth, _EIGHT, _INTEGER_2))
    from_4 = f32_bits(fma_rn(eighth, _FOUR, _INTEGER_4))
    return min(min(below_2, below_4), from_4)


@device_function
def sevens_for_eights(word):
    """Replaces the nibbles 8 by 7, the largest code; the others are below 8."""
    return np.uint32(word - np.uint32(np.uint32(word & _EIGHTS) >> np.uint32(3)))


@device_function
def with_signs(word, w0, w1, w2, w3):
    """Sets bit 3 of each nibble of a word to the sign of one of 8 bf16, pairs in four words."""
    front = permute_bytes(w0, w1, np.uint32(0x7351))
    back = permute_bytes(w2, w3, np.uint32(0x7351))
    even = permute_signs(front, back, np.uint32(0x5410))
    odd = permute_signs(front, back, np.uint32(0x7632))
    signs = np.uint32((even & np.uint32(0x0F0F0F0F)) | (odd & np.uint32(0xF0F0F0F0)))
    return np.uint32(word | np.uint32(signs & _EIGHTS))


# The sum of shifted counts carries INTEGER_BITS twice: at shifts 0 and 4; at 8 and more its bits
# leave the word.
INTEGER_SUM = np.uint32((0x4B000000 + 0xB0000000) & 0xFFFFFFFF)


@device_function
def _low_count(word, multiplier):
    return e2m1_count(mul_abs_sat(f32_of_low_bf16(word), multiplier))


@device_function
def _high_count(word, multiplier):
    return e2m1_count(mul_abs_sat(bits_f32(np.uint32(word & np.uint32(0xFFFF0000))), multiplier))


@device_function
def quantize_8(w0, w1, w2, w3, eighth):
    """Eight bf16 in four words to eight codes in one, the first in the lowest nibble.

    ``eighth`` is the block's multiplier / 8, exactly. A NaN gives an open code.
    """
    word = _low_count(w0, eighth)
    word = np.uint32(word + np.uint32(_high_count(w0, eighth) << np.uint32(4)))
    word = np.uint32(word + np.uint32(_low_count(w1, eighth) << np.uint32(8)))
    word = np.uint32(word + np.uint32(_high_count(w1, eighth) << np.uint32(12)))
    word = np.uint32(word + np.uint32(_low_count(w2, eighth) << np.uint32(16)))
    word = np.uint32(word + np.uint32(_high_count(w2, eighth) << np.uint32(20)))
    word = np.uint32(word + np.uint32(_low_count(w3, eighth) << np.uint32(24)))
    word = np.uint32(word + np.uint32(_high_count(w3, eighth) << np.uint32(28)))
    return with_signs(sevens_for_eights(np.uint32(word - INTEGER_SUM)), w0, w1, w2, w3)


@device_function
def code_of_f32(v):
    """The e2m1 code of an f32: nearest even, saturating, sign of zero kept; NaN gives 7."""
    count = np.uint32(e2m1_count(mul_abs_sat(v, _EIGHTH)) - INTEGER_BITS)
    sign = np.uint32(np.uint32(f32_bits(v) >> np.uint32(28)) & np.uint32(8))
    return np.uint32(min(count, np.uint32(7)) | sign) if v == v else np.uint32(7)
