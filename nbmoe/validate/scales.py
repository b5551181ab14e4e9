"""Checks of scales that read them: a missing one often arrives as 0, infinity or NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbmoe.codecs import E8M0_NAN
from nbmoe.errors import ScaleError
from nbmoe.formats import NVFP4, BlockFormat
from nbmoe.layouts import deinterleave_scales
from nbmoe.validate.call import Call
from nbmoe.validate.routing import first

E4M3_NAN = 0x7F


def check_factors(call: Call, arg: str, values: NDArray[Any], per: str) -> None:
    """Refuses float32 factors that are not finite and positive.

    Args:
        call: The call.
        arg: Argument name.
        values: (E,) or (S,).
        per: What an entry belongs to, "expert" or "slot".

    Raises:
        ScaleError: an entry is 0, negative, infinite or NaN.
    """
    bad = ~(np.isfinite(values) & (values > 0))
    if bad.any():
        i = first(bad)
        got = f"{arg}[{i}] = {values[i]} for {per} {i}"
        hint = "is its scale missing from the checkpoint?"
        raise ScaleError(call.message(arg, "finite factors above 0", got, hint))


def check_weight_scales(
    call: Call, arg: str, tiles: NDArray[Any], n: int, k: int, fmt: BlockFormat = NVFP4
) -> None:
    """Refuses weight scales that are NaN or negative; padding bytes are not looked at.

    Args:
        call: The call.
        arg: Argument name.
        tiles: (E, ceil(N/128), ceil(K/(4 * block)), 32, 4, 4) scale bytes.
        n: Rows of an expert's weight.
        k: Elements of a row.
        fmt: The format of the weight.

    Raises:
        ScaleError: a scale is NaN, or e4m3 with its sign bit set.
    """
    is_e4m3 = fmt.scale == "e4m3"
    worst = E4M3_NAN if is_e4m3 else E8M0_NAN
    codes = tiles.view(np.uint8)
    if codes.max(initial=0) < worst:
        return
    scales = deinterleave_scales(codes, n, k // fmt.block)
    bad = scales >= worst
    if bad.any():
        expert, row, block = (int(i) for i in np.argwhere(bad)[0])
        byte = scales[expert, row, block]
        is_negative = is_e4m3 and byte & E4M3_NAN != E4M3_NAN
        kind = "negative" if is_negative else "NaN"
        got = f"{kind} byte {byte:#04x} for expert {expert}, row {row}, block {block}"
        rule = "finite e4m3 scales >= 0" if is_e4m3 else "e8m0 scales below 0xff"
        raise ScaleError(call.message(arg, rule, got))


def check_row_scales(call: Call, arg: str, values: NDArray[Any]) -> None:
    """Refuses bfloat16 row scales that are NaN or infinite.

    Raises:
        ScaleError: there is one.
    """
    bits = values.view(np.uint16)
    bad = (bits & 0x7F80) == 0x7F80
    if bad.any():
        m = first(bad)
        got = f"{arg}[{m}] = bits {int(bits[m]):#06x}"
        raise ScaleError(call.message(arg, "finite row scales", got))
