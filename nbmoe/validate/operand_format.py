"""Which block format an operand has: said by the caller, or by the types of its arrays."""

from __future__ import annotations

from nbmoe.arrays import Array
from nbmoe.errors import ConfigError
from nbmoe.formats import MXFP4, MXFP8, NVFP4, BlockFormat, block_format
from nbmoe.validate.call import Call
from nbmoe.validate.elements import codes_of, scales_of


def operand_format(
    call: Call, arg: str, fmt: str | BlockFormat | None, codes: str, scales: str
) -> BlockFormat:
    """Decides the format of an operand whose codes and scales the call has taken.

    Args:
        call: The call; it holds both arrays as inputs.
        arg: Name of the argument that says the format, for messages.
        fmt: What the caller said, None to look at the element types: e8m0 scales or e4m3 codes are
            an MX format, anything else is NVFP4. Plain uint8 arrays of an MX format need a name.
        codes: Name of the input with the codes.
        scales: Name of the input with the block scales.

    Raises:
        ConfigError: `fmt` is unknown, or contradicts the element types.
    """
    values, factors = call.taken(codes), call.taken(scales)
    found = _of_types(values, factors) if fmt is None else block_format(fmt, call.api, arg)
    for name, array, elements in (
        (codes, values, codes_of(found)),
        (scales, factors, scales_of(found)),
    ):
        if array.dtype not in elements.names:
            rule = f"{found.name} with {name} of {elements}"
            hint = f"name another format with {arg}=" if fmt is None else ""
            raise ConfigError(call.message(arg, rule, f"{name} of {array.dtype}", hint))
    return found


def _of_types(codes: Array, scales: Array) -> BlockFormat:
    if codes.dtype == "float8_e4m3fn":
        return MXFP8
    return MXFP4 if scales.dtype == "float8_e8m0fnu" else NVFP4
