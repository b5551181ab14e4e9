"""The prepared layout of weights, against its description, element by element, and its inverse."""

from typing import Any

import numpy as np
import pytest

from nbmoe import codecs
from nbmoe.formats import FORMATS
from nbmoe.layouts import interleave_scales
from nbmoe.prepared import PreparedWeights, pack_weights, unpack_weights
from nbmoe_kernels.prepared_weights import UNIT_KINDS, k64_count, n64_count, prepared_bytes

SIZES = (
    ("nvfp4", 2, 72, 80),
    ("nvfp4", 1, 128, 64),
    ("mxfp4", 2, 136, 96),
    ("mxfp8", 2, 72, 96),
    ("bf16", 2, 72, 72),
    ("bf16", 1, 8, 8),
)


def operands(format: str, experts: int, n: int, k: int) -> tuple[Any, Any, Any, Any]:
    """Elements (E, N, K) and scales (E, N, K/block), and the weight and tiles that they make."""
    rng = np.random.default_rng(n * k)
    if format == "bf16":
        bits = rng.integers(0, 1 << 16, (experts, n, k), np.uint16)
        return bits, None, bits.view(codecs.BF16), None
    fmt = FORMATS[format]
    elements = rng.integers(0, 1 << fmt.element.bits, (experts, n, k), np.uint8)
    if format == "mxfp8":
        elements[(elements & 0x7F) == 0x7F] = 0
    scales = rng.integers(0, 256, (experts, n, k // fmt.block), np.uint8)
    weight = codecs.pack_nibbles(elements) if fmt.per_byte == 2 else elements
    return elements, scales, weight, interleave_scales(scales)


def fp4_half(values: list[int], format: str) -> int:
    """Four codes v0..v3 in 16 bits."""
    lowest, signs = {
        "nvfp4": ((9, 6, 3, 0), (15, 12, 14, 13)),
        "mxfp4": ((6, 3, 0, 9), (15, 12, 14, 13)),
    }[format]
    return sum(
        ((v & 7) << low) | ((v >> 3) << sign)
        for v, low, sign in zip(values, lowest, signs, strict=True)
    )


def unit(format: str, element: Any, scale: Any) -> bytes:
    """The bytes of a unit, from functions of row and column, as the layout says."""
    size = UNIT_KINDS[format].unit_bytes
    out = bytearray(size)

    def put(at: int, value: int, nbytes: int) -> None:
        out[at : at + nbytes] = int(value).to_bytes(nbytes, "little")

    for i in range(128):
        w, g, t = i // 32, i % 32 // 4, i % 4
        rows = (16 * w + 2 * g, 16 * w + 2 * g + 1)
        if format in ("nvfp4", "mxfp4"):
            for which, r in enumerate(rows):
                for half in range(4):
                    first = 16 * t + 4 * half
                    values = [element(r, first + v) for v in range(4)]
                    put(16 * i + 8 * which + 2 * half, fp4_half(values, format), 2)
        for j in range(4) if format in ("mxfp8", "bf16") else ():
            for word, (r, e) in enumerate((row, j + up) for up in (0, 8) for row in rows):
                pair = element(r, 16 * t + e), element(r, 16 * t + e + 4)
                if format == "bf16":
                    put(2048 * j + 16 * i + 4 * word, pair[0] | (pair[1] << 16), 4)
                else:
                    at = 2048 * (j // 2) + 16 * i + 4 * word + (1 - j % 2)
                    put(at, pair[0], 1)
                    put(at + 2, pair[1], 1)
        for which, r in enumerate(rows):
            if format == "nvfp4":
                put(2048 + 2 * i + which, scale(r, t), 1)
            elif format in ("mxfp4", "mxfp8"):
                codes = UNIT_KINDS[format].code_bytes
                put(codes + 2 * (2 * (8 * w + g) + t // 2) + which, scale(r, t // 2), 1)
    return bytes(out)


@pytest.mark.parametrize(("format", "experts", "n", "k"), SIZES)
def test_every_byte_lies_where_the_layout_says(format: str, experts: int, n: int, k: int) -> None:
    elements, scales, weight, tiles = operands(format, experts, n, k)
    packed = pack_weights(weight, tiles, format=format)
    down, across = n64_count(n), k64_count(k)
    blocks = 0 if scales is None else 64 // FORMATS[format].block
    expected = b""
    for expert in range(experts):
        for u in range(down):
            for q in range(across):

                def element(r: int, c: int, e: int = expert, u: int = u, q: int = q) -> int:
                    row, column = 64 * u + r, 64 * q + c
                    return int(elements[e, row, column]) if row < n and column < k else 0

                def scale(r: int, c: int, e: int = expert, u: int = u, q: int = q) -> int:
                    row, column = 64 * u + r, blocks * q + c
                    inside = row < n and column < scales.shape[2]
                    return int(scales[e, row, column]) if inside else 0

                expected += unit(format, element, scale)
    assert packed.data.tobytes() == expected
    assert packed.data.size == prepared_bytes(format, experts, n, k)


@pytest.mark.parametrize(("format", "experts", "n", "k"), SIZES)
def test_unpacking_gives_every_bit_back(format: str, experts: int, n: int, k: int) -> None:
    _, _, weight, tiles = operands(format, experts, n, k)
    packed = pack_weights(weight, tiles, format=format)
    assert (packed.format, packed.num_experts, packed.n, packed.k) == (format, experts, n, k)
    back, back_tiles = unpack_weights(packed)
    assert back.shape == weight.shape
    assert back.tobytes() == weight.tobytes()
    assert (back_tiles is None) == (tiles is None)
    if tiles is not None:
        assert np.array_equal(back_tiles, tiles)


def test_rows_past_n_are_zero_whatever_the_tiles_hold() -> None:
    _, _, weight, tiles = operands("nvfp4", 1, 72, 80)
    dirty = tiles.copy()
    dirty[0, 0, :, 31, 3] = 0xEE  # row 127
    dirty[0, 0, 1, :, :, 1:] = 0xEE  # columns past 80 / 16
    assert np.array_equal(
        pack_weights(weight, dirty, format="nvfp4").data,
        pack_weights(weight, tiles, format="nvfp4").data,
    )


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_block_of_mxfp8_with_a_nan_becomes_a_scale_of_nan(code: int) -> None:
    _, _, weight, tiles = operands("mxfp8", 2, 72, 96)
    weight[1, 70, 45] = code
    back, back_tiles = unpack_weights(pack_weights(weight, tiles, format="mxfp8"))
    assert weight[1, 70, 45] == code, "the caller's weight is left alone"
    expected = weight.copy()
    expected[1, 70, 32:64] = 0
    scales = tiles.copy()
    scales[1, 0, 0, 70 % 32, 70 // 32, 1] = 0xFF
    assert np.array_equal(back, expected)
    assert np.array_equal(back_tiles, scales)


def test_prepared_weights_are_frozen() -> None:
    prepared = PreparedWeights(np.zeros(0, np.uint8), "nvfp4", 1, 8, 16)
    with pytest.raises(AttributeError):
        prepared.k = 32  # type: ignore[misc]
