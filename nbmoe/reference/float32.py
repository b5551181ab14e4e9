"""Float32 operations that round once, and the functions that the specification builds from them.

`+ - * /` on numpy float32 arrays are IEEE operations rounded to nearest even, one at a time, so the
reference writes them plainly. What numpy lacks is here.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np

from nbmoe.codecs import F32Array

F32Like: TypeAlias = F32Array | np.float32
FLT_MAX: Final = np.finfo(np.float32).max
LOG2_E: Final = np.float32(1.4426950408889634)
LN2_HIGH: Final = np.float32(0.693359375)
LN2_LOW: Final = np.float32(-2.12194440e-4)
ROUND_TO_INTEGER: Final = np.float32(12582912.0)  # 1.5 * 2**23: its sums have no fraction bits
EXP_COEFFICIENTS: Final = tuple(
    np.float32(1) / np.float32(factorial) for factorial in (5040, 720, 120, 24, 6, 2, 1, 1)
)


def fma(a: F32Like, b: F32Like, c: F32Like) -> F32Array:
    """a * b + c with one rounding to nearest even, elementwise on float32.

    The product is exact in float64. The sum is rounded to odd there (S. Boldo, G. Melquiond,
    "Emulation of FMA and correctly rounded sums", IEEE Trans. Computers 57(4), 2008), which keeps
    the second rounding, to float32, from ever rounding a rounded tie.
    """
    with np.errstate(all="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        addend = np.asarray(c, np.float64)
        total = np.asarray(product + addend)
        # Knuth's two-sum: what `total` lost.
        back = total - product
        error = (product - (total - back)) + (addend - back)
        even = (total.view(np.int64) & 1) == 0
        inexact = np.isfinite(total) & (error != 0)
        odd = np.nextafter(total, np.copysign(np.inf, error))
        result: F32Array = np.where(inexact & even, odd, total).astype(np.float32)
        return result


def exp(x: F32Array) -> F32Array:
    """e**x as the specification defines it, so that every machine gives the same bits.

    n = round(x / ln 2); r = x - n ln 2 in two steps; the Taylor polynomial of degree 7 in r; times
    2**n in two halves, so that neither factor leaves the range of float32. Below -88 the result
    stays exp(-88), from 89 on it is infinity; in between the error is below 1 ulp.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        x = np.minimum(np.maximum(x, np.float32(-88)), np.float32(89))
        n = fma(x, LOG2_E, ROUND_TO_INTEGER) - ROUND_TO_INTEGER
        r = fma(n, -LN2_HIGH, x)
        r = fma(n, -LN2_LOW, r)
        p = np.full_like(r, EXP_COEFFICIENTS[0])
        for coefficient in EXP_COEFFICIENTS[1:]:
            p = fma(p, r, coefficient)
        half = np.floor(n * np.float32(0.5))
        result: F32Array = (p * np.exp2(half)) * np.exp2(n - half)
        return result


def sigmoid(x: F32Array) -> F32Array:
    """1 / (1 + exp(-x)), each operation rounded to float32."""
    return np.float32(1) / (np.float32(1) + exp(-x))
