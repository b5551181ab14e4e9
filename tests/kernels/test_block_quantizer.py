"""The block formats' device functions against the codecs, where float32 and not bf16 decides."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nbmoe import codecs
from nbmoe.formats import FORMATS, SCALE_RULES
from nbmoe_kernels.block_quantizer import make_block_quantizer
from nbmoe_kernels.quantize_rows import quotient, reciprocal_of

MX = ("mxfp4", "mxfp8")


def neighbours(values: Any) -> NDArray[np.float32]:
    """The values and the float32 on both sides of each."""
    exact = np.asarray(values, np.float32).ravel()
    with np.errstate(over="ignore", under="ignore"):
        up = np.nextafter(exact, np.float32(np.inf))
        down = np.nextafter(exact, np.float32(-np.inf))
        return np.concatenate([exact, up, down]).astype(np.float32)


def maxima() -> NDArray[np.float32]:
    """Magnitudes at every threshold of every rule, at the ends and the middle of the exponents."""
    mantissas = np.array([1, 1.5, 1.75, 1.875, 1.9375, 1.96875])
    exponents = np.array([-149, -140, -127, -126, -125, -119, -118, -117, -3, 0, 2, 8, 120, 127])
    edges = neighbours(mantissas * np.exp2(exponents)[:, None])
    special = np.float32([0, 2.0**-149, np.inf, 3.4028235e38])
    canonical_nan = np.uint32([0x7FFFFFFF]).view(np.float32)
    return np.concatenate([np.abs(edges), special, canonical_nan])


@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_scale_and_factor_of_every_threshold(name: str, rule: str) -> None:
    """The byte is the codecs', the factor the exact inverse of its power of two."""
    amax = maxima()
    scale = make_block_quantizer(name, rule).block_scale
    results = [scale(a, np.float32(7), np.float32(7)) for a in amax]
    got = np.array([byte for byte, _ in results], np.uint8)
    np.testing.assert_array_equal(got, codecs.encode_e8m0(amax, FORMATS[name].element, rule))
    factors = np.array([factor for _, factor in results], np.float32).astype(np.float64)
    exact = np.where(got == 255, np.nan, np.exp2(127.0 - got))
    np.testing.assert_array_equal(factors, exact)


@pytest.mark.parametrize("name", FORMATS)
def test_code_of_every_float32_beside_a_boundary(name: str) -> None:
    """Ties, both neighbours of each, subnormals, both zeros, overflow, infinity and NaN."""
    element = FORMATS[name].element
    table = codecs.decode_table(element)[: element.max_code + 1].astype(np.float64)
    middles = (table[1:] + table[:-1]) / 2
    above = [element.max_value * f for f in (1.03, 1.0625, 1.3, 1e30)]
    edges = neighbours(np.concatenate([table, middles, above, [2.0**-149, 2.0**-127]]))
    special = np.float32([0.0, np.inf, np.nan])
    values = np.concatenate([edges, special])
    values = np.concatenate([values, -values])
    code_of_f32 = make_block_quantizer(name).code_of_f32
    got = np.array([code_of_f32(v) for v in values], np.uint8)
    np.testing.assert_array_equal(got, codecs.encode(values, element))


def test_unknown_names() -> None:
    for args in (("mxfp6",), ("mxfp8", "ceil")):
        with pytest.raises(ValueError, match="there is no"):
            make_block_quantizer(*args)


def test_quotient_of_every_divisor() -> None:
    """Of 32 bits by a reciprocal: around multiples of the divisor and at the ends."""
    divisors = [*range(1, 40), 2**16 - 1, 2**16, 2**31 - 1]
    for divisor in divisors:
        most = (2**32 - 1) // divisor
        multiples = divisor * np.unique([0, 1, 2, most // 3, most // 2, most - 1, most])
        values = np.unique(np.concatenate([multiples, multiples - 1, multiples + 1, [2**32 - 1]]))
        for n in values[(values >= 0) & (values < 2**32)].astype(np.uint32):
            got = quotient(n, np.uint32(divisor), np.uint32(reciprocal_of(divisor)))
            assert got == int(n) // divisor
