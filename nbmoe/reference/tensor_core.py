"""What Hopper's tensor cores compute: fused dot products of 16 or 32, cut, never rounded.

`fused_dot` is the definition, in integers. `matmul` gives the same bits in float64 at speed; tests
hold the two together and hold both to outputs recorded on an H200. The model covers `mma.sync
m16n8k16` and `wgmma k16` with float16 or bfloat16 operands and float32 accumulators, which agree,
and `wgmma k32` with e4m3 operands, whose accumulator keeps 14 bits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import ml_dtypes
import numba
import numpy as np
import numpy.typing as npt

from nbmoe.codecs import BF16, F32Array
from nbmoe.errors import DTypeError, ShapeError, message
from nbmoe.layouts import K_STEP

MIN_EXPONENT: Final = -133  # the largest exponent never counts as less
NAN_BITS: Final = 0x7FFFFFFF
INF_BITS: Final = 0x7F800000


@dataclass(frozen=True)
class Operand:
    """A binary format of sign, exponent field and mantissa field, and how its products are summed.

    Attributes:
        bits: of a number.
        mantissa_bits: of its mantissa field.
        bias: of its exponent field.
        step: products that one step sums.
        fraction_bits: addends are cut this far below the largest exponent.
        result_bits: the sum is cut to this many significant bits.
        has_infinity: whether the largest exponent is IEEE's, of infinities and NaN; without it one
            magnitude, all ones, is NaN.
    """

    bits: int
    mantissa_bits: int
    bias: int
    step: int = K_STEP
    fraction_bits: int = 25
    result_bits: int = 24
    has_infinity: bool = True

    def split(self, bits: int) -> tuple[int, int, int, str]:
        """Sign 0 or 1, integer significand, exponent and "zero", "finite", "inf" or "nan".

        The value is (-1)**sign * significand * 2**(exponent - mantissa_bits). A subnormal has
        the smallest exponent and keeps its leading zeros; nothing is normalised.
        """
        exponent_mask = (1 << (self.bits - 1 - self.mantissa_bits)) - 1
        field = (bits >> self.mantissa_bits) & exponent_mask
        mantissa = bits & ((1 << self.mantissa_bits) - 1)
        significand = (field > 0) << self.mantissa_bits | mantissa
        if field == exponent_mask and (
            self.has_infinity or mantissa + 1 == 1 << self.mantissa_bits
        ):
            kind = "nan" if mantissa else "inf"
        else:
            kind = "finite" if significand else "zero"
        return bits >> (self.bits - 1), significand, max(field, 1) - self.bias, kind


F16: Final = Operand(bits=16, mantissa_bits=10, bias=15)
BFLOAT16: Final = Operand(bits=16, mantissa_bits=7, bias=127)
F32: Final = Operand(bits=32, mantissa_bits=23, bias=127)
E4M3: Final = Operand(
    bits=8,
    mantissa_bits=3,
    bias=7,
    step=32,
    fraction_bits=13,
    result_bits=14,
    has_infinity=False,
)
E4M3_CODES: Final = np.dtype(ml_dtypes.float8_e4m3fn)
_OPERANDS: Final = {np.dtype(np.float16): F16, BF16: BFLOAT16, E4M3_CODES: E4M3}


def fused_dot(a: Sequence[int], b: Sequence[int], c: int, operand: Operand) -> int:
    """One tensor-core step for one output: c + sum of a[i] * b[i], as the hardware cuts it.

    Every addend is cut toward zero to a multiple of 2**(emax - fraction_bits), where emax is the
    largest exponent among c and the products that are not zero. The cut addends are summed exactly,
    so their order cannot matter, and the sum is cut toward zero to result_bits.

    Args:
        a: Operand patterns.
        b: As many operand patterns.
        c: Bit pattern of the float32 accumulator.
        operand: Format of `a` and `b`.

    Returns:
        Bit pattern of the float32 result. Zero is always +0, NaN always 0x7FFFFFFF.
    """
    addends: list[tuple[int, int, int]] = []  # significand with sign, exponent, fraction bits
    nan, infinities = False, set()
    for x, y in zip(a, b, strict=True):
        sign_x, significand_x, exponent_x, kind_x = operand.split(int(x))
        sign_y, significand_y, exponent_y, kind_y = operand.split(int(y))
        sign = -1 if sign_x != sign_y else 1
        kinds = {kind_x, kind_y}
        if "nan" in kinds or kinds == {"inf", "zero"}:
            nan = True
        elif "inf" in kinds:
            infinities.add(sign)
        elif "zero" not in kinds:
            exponent = exponent_x + exponent_y
            product = sign * significand_x * significand_y
            addends.append((product, exponent, 2 * operand.mantissa_bits))
    sign_c, significand_c, exponent_c, kind_c = F32.split(c)
    if kind_c == "nan":
        nan = True
    elif kind_c == "inf":
        infinities.add(-1 if sign_c else 1)
    elif kind_c == "finite":
        addends.append(((-1) ** sign_c * significand_c, exponent_c, F32.mantissa_bits))
    if nan or len(infinities) == 2:
        return NAN_BITS
    if infinities:
        return INF_BITS | (0x80000000 if -1 in infinities else 0)

    emax = max([MIN_EXPONENT] + [exponent for _, exponent, _ in addends])
    grid = emax - operand.fraction_bits
    total = sum(_cut(s, exponent - fraction - grid) for s, exponent, fraction in addends)
    return _to_f32_bits(total, grid, operand.result_bits)


def _cut(significand: int, shift: int) -> int:
    """significand * 2**shift, cut toward zero to an integer."""
    magnitude = abs(significand) << shift if shift >= 0 else abs(significand) >> -shift
    return -magnitude if significand < 0 else magnitude


def _to_f32_bits(total: int, grid: int, result_bits: int) -> int:
    """The float32 pattern of total * 2**grid, cut toward zero to result_bits significant bits."""
    exponent = grid + abs(total).bit_length() - 1
    lsb = max(exponent, -126) - (result_bits - 1)
    magnitude = abs(_cut(total, grid - lsb)) << (F32.mantissa_bits + 1 - result_bits)
    sign = 0x80000000 if total < 0 else 0
    if magnitude == 0:
        return 0
    if exponent > 127:
        return sign | INF_BITS
    if exponent < -126:
        return sign | magnitude
    return sign | ((exponent + 127) << 23) | (magnitude & 0x7FFFFF)


def matmul(a: npt.NDArray[Any], b: npt.NDArray[Any], c: F32Array | None = None) -> F32Array:
    """a @ b.T as a chain of fused dots over K, ascending, 16 (e4m3: 32) elements a step.

    Every output equals a chain of `fused_dot`. Independent column blocks run on all cores.

    Args:
        a: (M, K) float16, bfloat16 or float8_e4m3fn, K a multiple of the step.
            `nbmoe.layouts.group_k` puts K in the order of the specification.
        b: (N, K) of the same dtype.
        c: (M, N) float32 initial accumulators, None for +0.

    Returns:
        (M, N) float32. NaN is always the pattern 0x7FFFFFFF.

    Raises:
        DTypeError: The operands are not of one of these types.
        ShapeError: The shapes do not match or K is no multiple of the step.
    """
    if a.dtype != b.dtype or a.dtype not in _OPERANDS:
        given = f"{a.dtype} and {b.dtype}"
        rule = "both float16, both bfloat16 or both float8_e4m3fn"
        raise DTypeError(message("matmul", "a, b", rule, given))
    operand = _OPERANDS[a.dtype]
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or a.shape[1] % operand.step:
        rule = f"(M, K) and (N, K) with K % {operand.step} == 0"
        raise ShapeError(message("matmul", "a, b", rule, f"{a.shape} and {b.shape}"))
    shape = (a.shape[0], b.shape[0])
    accumulator = np.zeros(shape, np.float32) if c is None else np.array(c, np.float32)
    if accumulator.shape != shape:
        raise ShapeError(message("matmul", "c", str(shape), accumulator.shape))

    values, exponents = _operand_tables(operand)
    steps = operand.step, operand.fraction_bits, operand.result_bits
    unsigned = np.dtype(f"u{a.itemsize}")
    a_bits = np.ascontiguousarray(a).view(unsigned).astype(np.uint16, copy=False)
    b_bits = np.ascontiguousarray(b).view(unsigned).astype(np.uint16, copy=False)

    def column_block(n: int) -> None:
        stop = n + _BLOCK_N
        block = np.ascontiguousarray(accumulator[:, n:stop])
        _chain(a_bits, b_bits[n:stop], block, block.view(np.int32), values, exponents, *steps)
        accumulator[:, n:stop] = block

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(column_block, range(0, shape[1], _BLOCK_N)))
    accumulator.view(np.uint32)[np.isnan(accumulator)] = NAN_BITS
    return accumulator


_BLOCK_N: Final = 256  # a step's 16 x 256 decoded operands stay in a core's cache
_NEVER: Final = -(1 << 20)  # exponent of a zero operand: no sum with it exceeds MIN_EXPONENT


@cache
def _operand_tables(operand: Operand) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int32]]:
    """Value and unnormalised exponent of each pattern; special values as IEEE ones."""
    values = np.empty(1 << operand.bits, np.float64)
    exponents = np.empty(1 << operand.bits, np.int32)
    for bits in range(1 << operand.bits):
        sign, significand, exponent, kind = operand.split(bits)
        magnitude = significand * 2.0 ** (exponent - operand.mantissa_bits)
        magnitude = {"inf": np.inf, "nan": np.nan}.get(kind, magnitude)
        values[bits] = -magnitude if sign else magnitude
        exponents[bits] = _NEVER if kind == "zero" else exponent
    return values, exponents


@numba.njit(nogil=True, cache=True)
def _chain(  # type: ignore[no-untyped-def]
    a_bits, b_bits, acc, acc_bits, values, exponents, k_step, fraction_bits, result_bits
):
    """`fused_dot` over all of K for one block of columns, in float64; updates `acc` in place.

    Why float64 is exact: a product has at most 22 significant bits and scaling by a power of two
    keeps them; a cut addend is an integer below 2**27, so the sum of 17 is one below 2**32.
    Infinity and NaN follow the model's rules by IEEE arithmetic, since the scale is finite and
    never zero.
    """
    rows, k_total = a_bits.shape
    subnormal = 2.0 ** (125 + result_bits)
    width = b_bits.shape[0]
    b_value = np.empty((k_step, width), np.float64)
    b_exponent = np.empty((k_step, width), np.int32)
    emax = np.empty(width, np.int32)
    scale = np.empty(width, np.float64)
    scale_bits = scale.view(np.int64)
    total = np.empty(width, np.float64)
    total_bits = total.view(np.int64)
    for k_start in range(0, k_total, k_step):
        for n in range(width):
            for k in range(k_step):
                code = b_bits[n, k_start + k]
                b_value[k, n] = values[code]
                b_exponent[k, n] = exponents[code]
        for m in range(rows):
            for n in range(width):
                bits = acc_bits[m, n] & 0x7FFFFFFF
                exponent = max(bits >> 23, 1) - 127
                emax[n] = exponent if bits else MIN_EXPONENT
            for k in range(k_step):
                exponent = exponents[a_bits[m, k_start + k]]
                for n in range(width):
                    emax[n] = max(emax[n], exponent + b_exponent[k, n])
            for n in range(width):
                # 2**(fraction_bits - emax), from its float64 bits.
                scale_bits[n] = np.int64(1023 + fraction_bits - emax[n]) << 52
                total[n] = np.trunc(acc[m, n] * scale[n])
            for k in range(k_step):
                value = values[a_bits[m, k_start + k]]
                for n in range(width):
                    total[n] += np.trunc(value * b_value[k, n] * scale[n])
            for n in range(width):
                # Clearing all but result_bits significant bits cuts toward zero.
                total_bits[n] &= ~np.int64((1 << (53 - result_bits)) - 1)
                scale_bits[n] = np.int64(1023 - fraction_bits + emax[n]) << 52
                result = total[n] * scale[n]
                if abs(result) < 2.0**-126:
                    result = np.trunc(result * subnormal) / subnormal
                acc[m, n] = result + 0.0  # a zero is +0
