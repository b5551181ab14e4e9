"""NVFP4 blocks in registers: the scale rule, e2m1 rounding and packing.

Scale of a block with maximum amax under the tensor's inverse scale tsf:

    s8 = e4m3(tsf * (amax * (1/6)))
    r  = 0 if s8 is zero else min(1 / (s8 * (1/tsf)), FLT_MAX)

and an element's code is e2m1(x * r).
"""

import numpy as np

from nbmoe_kernels.device.convert import e4m3_of_f32, f32_of_e4m3, permute_bytes
from nbmoe_kernels.device.math import (
    add_rn,
    bits_f32,
    div_rn,
    f32_bits,
    fma_rn,
    min_abs,
    min_num,
    mul_rn,
)
from nbmoe_kernels.device.op import device_function

_SIXTH = np.float32(1.0 / 6.0)
_ZERO, _HALF, _ONE, _TWO, _SIX = (np.float32(v) for v in (0.0, 0.5, 1.0, 2.0, 6.0))
_LARGEST = np.float32(3.4028234663852886e38)
NAN_SCALE = np.uint32(0x7F)


@device_function
def block_scale(amax, tensor_scale, inverse_tensor_scale):
    """(e4m3 scale code, element multiplier) of a block whose largest magnitude is amax."""
    code = e4m3_of_f32(mul_rn(tensor_scale, mul_rn(amax, _SIXTH)))
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
def e2m1_magnitude(v):
    """INTEGER_BITS plus the e2m1 code of |v|: nearest even, saturating; 7 where v is NaN.

    With a = min(|v|, 6) the code is round(min(2a, a + 2, a/2 + 4)): one line for each binade, the
    smallest is the right one, and codes have the parity of mantissas, so ties agree. Rounding is
    monotone, so it may come before the minimum; then each line is rounded once.
    """
    a = min_abs(v, _SIX)
    below_2 = fma_rn(a, _TWO, _INTEGER)
    below_4 = add_rn(a, _INTEGER_2)
    below_6 = fma_rn(a, _HALF, _INTEGER_4)
    return f32_bits(min_num(min_num(below_2, below_4), below_6))


@device_function
def sign_nibbles(w0, w1, w2, w3):
    """Signs of 8 bf16, pairs in four words, as bit 3 of each nibble of a word."""
    front = permute_bytes(w0, w1, np.uint32(0x7351))
    back = permute_bytes(w2, w3, np.uint32(0x7351))
    even = permute_bytes(front, back, np.uint32(0x5410))
    odd = permute_bytes(front, back, np.uint32(0x7632))
    return np.uint32(
        (np.uint32(even >> np.uint32(4)) & np.uint32(0x08080808)) | (odd & np.uint32(0x80808080))
    )


@device_function
def _low_magnitude(word, multiplier):
    return e2m1_magnitude(mul_rn(bits_f32(np.uint32(word << np.uint32(16))), multiplier))


@device_function
def _high_magnitude(word, multiplier):
    return e2m1_magnitude(mul_rn(bits_f32(np.uint32(word & np.uint32(0xFFFF0000))), multiplier))


# The sum of shifted magnitudes carries INTEGER_BITS twice: at shifts 0 and 4; at 8 and more its
# bits leave the word.
_INTEGER_SUM = np.uint32((0x4B000000 + 0xB0000000) & 0xFFFFFFFF)


@device_function
def quantize_8(w0, w1, w2, w3, multiplier, sign_mask):
    """Eight bf16 in four words to eight codes in one, the first in the lowest nibble."""
    word = _low_magnitude(w0, multiplier)
    word = np.uint32(word + np.uint32(_high_magnitude(w0, multiplier) << np.uint32(4)))
    word = np.uint32(word + np.uint32(_low_magnitude(w1, multiplier) << np.uint32(8)))
    word = np.uint32(word + np.uint32(_high_magnitude(w1, multiplier) << np.uint32(12)))
    word = np.uint32(word + np.uint32(_low_magnitude(w2, multiplier) << np.uint32(16)))
    word = np.uint32(word + np.uint32(_high_magnitude(w2, multiplier) << np.uint32(20)))
    word = np.uint32(word + np.uint32(_low_magnitude(w3, multiplier) << np.uint32(24)))
    word = np.uint32(word + np.uint32(_high_magnitude(w3, multiplier) << np.uint32(28)))
    return np.uint32(np.uint32(word - _INTEGER_SUM) | (sign_nibbles(w0, w1, w2, w3) & sign_mask))


@device_function
def code_of_f32(v):
    """The e2m1 code of an f32: nearest even, saturating, sign of zero kept; NaN gives 7."""
    magnitude = np.uint32(e2m1_magnitude(v) - INTEGER_BITS)
    sign = np.uint32(np.uint32(f32_bits(v) >> np.uint32(28)) & np.uint32(8))
    return np.uint32(magnitude | sign) if v == v else np.uint32(7)
