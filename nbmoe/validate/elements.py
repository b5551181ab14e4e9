"""Element types that operands may have, and the alignment of their memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Elements:
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

    def __str__(self) -> str:
        return f"{self.storage} ({self.meaning})" if self.meaning else self.storage


CODES = Elements(("uint8",), "packed e2m1 codes", 16)
SCALES = Elements(("uint8", "float8_e4m3fn"), "e4m3 scale bytes", 16)
BF16 = Elements(("bfloat16", "uint16"), "or its bit patterns in uint16", 16)
ROW_SCALES = Elements(("bfloat16", "uint16"), "or its bit patterns in uint16", 2)
F32 = Elements(("float32",), "", 4)
U32 = Elements(("uint32",), "", 4)
I32 = Elements(("int32",), "", 4)


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
    numbers = ("float", "bfloat", "int", "uint")
    if expected not in (CODES, SCALES) and got.startswith(numbers):
        return f"convert with .astype('{expected.storage}')"
    return ""
