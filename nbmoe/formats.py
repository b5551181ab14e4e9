"""Number formats as data: the element encodings and the block formats built from them.

Nothing here computes. `nbmoe.codecs` reads `Element` to encode and decode, `nbmoe.reference` and
the launchers read `BlockFormat` to size buffers. The encodings are those of OCP OFP8 1.0 and OCP
Microscaling 1.0; docs/formats.md draws them bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from nbmoe.errors import ArgTypeError, ConfigError, ShapeError, message


@dataclass(frozen=True)
class Element:
    """A binary floating-point encoding with a sign bit, an exponent and a mantissa.

    A code is `sign | exponent field | mantissa field`, most significant first. With exponent field
    `e` and mantissa field `m` its value is `(1 + m / 2**mantissa_bits) * 2**(e - bias)`, or
    `m / 2**mantissa_bits * 2**(1 - bias)` when `e` is 0.

    Attributes:
        name: Lower-case name used in messages and docs.
        exponent_bits: Width of the exponent field [bits].
        mantissa_bits: Width of the mantissa field [bits].
        bias: Exponent bias.
        max_code: Code of the largest finite value.
        max_value: The largest finite value.
        nan_code: The code that a NaN encodes to. It is `max_code` where the format has no NaN.
        inf_code: Code of +infinity, None where the format has none.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    max_value: float
    nan_code: int
    inf_code: int | None = None

    @property
    def bits(self) -> int:
        """Width of a code [bits]."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def has_nan(self) -> bool:
        """Whether some code decodes to NaN."""
        return self.nan_code != self.max_code

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value, shared by all subnormals."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value (OCP Microscaling calls it emax)."""
        return (self.max_code >> self.mantissa_bits) - self.bias


E2M1 = Element("e2m1", 2, 1, bias=1, max_code=0x7, max_value=6.0, nan_code=0x7)
E4M3 = Element("e4m3", 4, 3, bias=7, max_code=0x7E, max_value=448.0, nan_code=0x7F)
E5M2 = Element(
    "e5m2", 5, 2, bias=15, max_code=0x7B, max_value=57344.0, nan_code=0x7F, inf_code=0x7C
)


@dataclass(frozen=True)
class BlockFormat:
    """Elements of one encoding that share a scale byte per block of consecutive K.

    Attributes:
        name: Lower-case name used in messages, docs and on the command line.
        element: Encoding of the elements.
        block: Elements that share one scale byte [elements].
        scale: Encoding of the scale byte, "e4m3" or "e8m0".
        has_tensor_scale: Whether a float32 factor per expert multiplies the block scales.
        codes_dtype: Element type in which results hold codes; inputs may also be plain uint8.
        scales_dtype: Element type in which results hold scales; inputs may also be plain uint8.
        per_byte: Elements stored in one byte. With 2, the even element is the low nibble.
    """

    name: str
    element: Element
    block: int
    scale: str
    has_tensor_scale: bool
    codes_dtype: str
    scales_dtype: str
    per_byte: int

    def __str__(self) -> str:
        return self.name

    @property
    def max_value(self) -> float:
        """The largest finite element value."""
        return self.element.max_value

    @property
    def tile_columns(self) -> int:
        """Elements of K that one 4-column scale tile covers [elements]."""
        return 4 * self.block

    def packed_k(self, k: int) -> int:
        """Bytes that hold one row of `k` elements [bytes].

        Raises:
            ShapeError: `k` is not a multiple of the block.
        """
        return self._checked(k) // self.per_byte

    def scale_columns(self, k: int) -> int:
        """Scale bytes of one row of `k` elements [bytes].

        Raises:
            ShapeError: `k` is not a multiple of the block.
        """
        return self._checked(k) // self.block

    def _checked(self, k: int) -> int:
        if k < 0 or k % self.block:
            rule = f"a multiple of the {self.name} block of {self.block}"
            raise ShapeError(message("BlockFormat", "k", rule, k, "pad K with zeros"))
        return k


NVFP4 = BlockFormat("nvfp4", E2M1, 16, "e4m3", True, "uint8", "uint8", per_byte=2)
MXFP4 = BlockFormat("mxfp4", E2M1, 32, "e8m0", False, "uint8", "float8_e8m0fnu", per_byte=2)
MXFP8 = BlockFormat("mxfp8", E4M3, 32, "e8m0", False, "float8_e4m3fn", "float8_e8m0fnu", per_byte=1)
FORMATS: Final = {fmt.name: fmt for fmt in (NVFP4, MXFP4, MXFP8)}

SCALE_RULES: Final = ("rceil", "even", "floor")
"""Names of the rules that choose an e8m0 scale (`nbmoe.codecs.encode_e8m0`)."""

PAIRS: Final = ((NVFP4, NVFP4), (MXFP4, MXFP4), (MXFP8, MXFP8), (MXFP8, MXFP4))
"""Formats of activations and weights that the block-scaled matmuls multiply; the last is W4A8."""


def block_format(fmt: str | BlockFormat, api: str, arg: str = "format") -> BlockFormat:
    """The format of a name; a format is returned as it is.

    Raises:
        ArgTypeError: It is neither.
        ConfigError: There is no format of that name.
    """
    if isinstance(fmt, BlockFormat):
        return fmt
    if not isinstance(fmt, str):
        got = f"{type(fmt).__name__} {fmt!r}"
        raise ArgTypeError(message(api, arg, "a name or a BlockFormat", got))
    if fmt not in FORMATS:
        raise ConfigError(message(api, arg, f"one of {tuple(FORMATS)}", repr(fmt)))
    return FORMATS[fmt]
