"""MXFP4 back to wider elements, for matmuls that multiply bf16 or e4m3."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nbmoe import codecs
from nbmoe.arrays import named_dtype
from nbmoe.errors import ConfigError, ShapeError, message
from nbmoe.formats import MXFP4

OUT_TYPES: Final = ("bfloat16", "float8_e4m3fn")
"""Element types that `mxfp4_dequant` makes."""


def mxfp4_dequant(
    packed: npt.NDArray[np.uint8], scales: npt.NDArray[Any], *, out_type: str = "bfloat16"
) -> npt.NDArray[Any]:
    """Multiplies e2m1 codes by their block's e8m0 scale.

    The product is exact in float32 except past its largest value, and is rounded once: to bf16,
    where only the ends of the exponents are not exact, or to e4m3, where it saturates at 448. A
    scale of 255 makes its block NaN.

    Args:
        packed: (N, K/2) or (E, N, K/2) packed codes.
        scales: (N, K/32) or (E, N, K/32) e8m0 bytes, row-major.
        out_type: "bfloat16" or "float8_e4m3fn".

    Returns:
        (N, K) or (E, N, K) of `out_type`.

    Raises:
        ConfigError: `out_type` is neither.
        ShapeError: The scales do not fit the codes.
    """
    api = "mxfp4_dequant"
    if out_type not in OUT_TYPES:
        raise ConfigError(message(api, "out_type", f"one of {OUT_TYPES}", repr(out_type)))
    k = 2 * packed.shape[-1]
    expected = (*packed.shape[:-1], MXFP4.scale_columns(k))
    if scales.shape != expected:
        raise ShapeError(message(api, "scales", f"(..., K/32) = {expected}", scales.shape))
    factors = codecs.decode_e8m0(scales.view(np.uint8))
    values = codecs.decode_e2m1(codecs.unpack_nibbles(packed.view(np.uint8)))
    blocks = values.reshape(*expected, MXFP4.block)
    with np.errstate(over="ignore", invalid="ignore"):
        product = (blocks * factors[..., np.newaxis]).reshape(values.shape)
    if out_type == "bfloat16":
        return codecs.encode_bf16(product)
    return codecs.encode_e4m3(product).view(named_dtype(out_type))
