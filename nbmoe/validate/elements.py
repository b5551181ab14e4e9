"""Element types that operands may have, and the alignment of their memory."""

from __future__ import annotations

from typing import NamedTuple

from nbmoe.formats import BlockFormat


class Elements(NamedTuple):
    """What an operand's elements may be.

    Attributes:
        names: Accepted element types; the first is the one that messages name.
        meaning: What the elements are, for messages.
        align: Alignment of the first element [bytes]. Payloads need 16, the width of a vector load.
    """

    names: tuple[str, ...]
    meaning: str
    align: int

    @property
    def storage(self) -> str:
        """The element type that outputs are allocated with."""
        return self.names[0]

    @property
    def are_bytes(self) -> bool:
        """Whether they are codes or scale bytes, which no conversion of values gives."""
        return "uint8" in self.names

    def __str__(self) -> str:
        return f"{self.storage} ({self.meaning})" if self.meaning else self.storage


BF16 = Elements(("bfloat16", "uint16"), "or its bit patterns in uint16", 16)
BLOCK_CODES = Elements(
    ("uint8", "float8_e4m3fn", "float4_e2m1fn_x2"), "codes of a block format", 16
)
BLOCK_SCALES = Elements(("uint8", "float8_e4m3fn", "float8_e8m0fnu"), "block scale bytes", 16)
FP8 = Elements(("float8_e4m3fn", "uint8"), "e4m3 codes", 16)
ROW_SCALES = Elements(("bfloat16", "uint16"), "or its bit patterns in uint16", 2)
PREPARED = Elements(("uint8",), "prepared operands", 16)
F32 = Elements(("float32",), "", 4)
U32 = Elements(("uint32",), "", 4)
I32 = Elements(("int32",), "", 4)


def codes_of(fmt: BlockFormat) -> Elements:
    """What holds the codes of a format; results are allocated with the first."""
    if fmt.per_byte == 2:
        return Elements(("uint8", "float4_e2m1fn_x2"), f"packed e2m1 codes of {fmt.name}", 16)
    return Elements((fmt.codes_dtype, "uint8"), f"e4m3 codes of {fmt.name}", 16)


def scales_of(fmt: BlockFormat) -> Elements:
    """What holds the block scales of a format; results are allocated with the first."""
    typed = "float8_e4m3fn" if fmt.scale == "e4m3" else "float8_e8m0fnu"
    names = dict.fromkeys((fmt.scales_dtype, "uint8", typed))
    return Elements(tuple(names), f"{fmt.scale} scale bytes", 16)


def dtype_hint(expected: Elements, got: str) -> str:
    """How to turn an array of type `got` into one of an accepted type, empty if nothing fits."""
    if got.startswith("byte-swapped"):
        return f"convert with .astype('{expected.storage}')"
    signed_twin = {"int8": "uint8", "int16": "uint16", "int32": "uint32"}.get(got)
    if signed_twin in expected.names:
        return f"reinterpret with .view('{signed_twin}')"
    if got == "uint32" and expected is I32:
        return "reinterpret with .view('int32'), in which -1 masks a slot"
    if expected is BF16 and got == "uint8":
        return "this looks quantized already: dequantize it first"
    if got.startswith(("float", "bfloat", "int", "uint")):
        if expected.are_bytes:
            return "values have to be quantized, not converted"
        return f"convert with .astype('{expected.storage}')"
    return ""
