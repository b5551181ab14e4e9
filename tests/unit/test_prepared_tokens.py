"""The prepared layout of tokens, against its description, element by element, and its inverse."""

from typing import Any

import numpy as np
import pytest

from nbmoe import codecs, layouts
from nbmoe.formats import FORMATS
from nbmoe.prepared import PreparedTokens, pack_tokens, unpack_tokens
from nbmoe.reference.matmul import decode_operand, in_steps
from nbmoe_kernels.prepared_tokens import prepared_token_bytes, token_panels, token_rows

STARTS = {
    "dense": None,
    "one row each": [0, 1, 2, 3],
    "empty slots": [0, 0, 7, 7, 8, 21, 21],
    "past a tile": [0, 3, 134, 140],
}
SIZES = (("nvfp4", 80), ("mxfp4", 96), ("mxfp8", 64), ("bf16", 72))


def tokens(format: str, k: int, starts: list[int] | None) -> tuple[Any, ...]:
    """The arguments of `pack_tokens`, and the scales in rows."""
    rng = np.random.default_rng(k)
    rows = 19 if starts is None else starts[-1]
    start = None if starts is None else np.array(starts, np.uint32)
    if format == "bf16":
        bits = rng.integers(0, 1 << 16, (rows, k), np.uint16)
        return (bits.view(codecs.BF16), None, start, None), None
    fmt = FORMATS[format]
    codes = rng.integers(0, 256, (rows, k // fmt.per_byte), np.uint8)
    scales = rng.integers(0, 256, (rows, k // fmt.block), np.uint8)
    offsets = layouts.scales_offset([0, rows] if start is None else start)
    ends = [0, rows] if starts is None else starts
    firsts = layouts.tile_starts(ends, offsets)
    columns = layouts.ceil_div(k, fmt.tile_columns)
    tiles = np.zeros((layouts.activation_tiles(rows, len(offsets)), columns, 32, 4, 4), np.uint8)
    for slot, first in enumerate(firsts):
        part = layouts.interleave_scales(scales[ends[slot] : ends[slot + 1]])
        tiles[first : first + len(part)] = part
    return (codes, tiles, start, None if start is None else offsets), scales


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize(("format", "k"), SIZES)
def test_every_element_lies_where_the_description_says(format, k, name):
    starts = STARTS[name]
    arguments, scales = tokens(format, k, starts)
    prepared = pack_tokens(*arguments, format=format)
    operand = operand_of(format, arguments[0], scales)
    rows = operand.shape[0]
    slots = 1 if starts is None else len(starts) - 1
    fields = (prepared.format, prepared.num_rows, prepared.num_slots, prepared.k)
    assert fields == (format, rows, slots, k)
    height = (rows + 8 * slots + 7) // 8 * 8
    assert token_rows(rows, slots) == height
    assert token_panels(k) == 2 - (k == 64)
    assert prepared_token_bytes(rows, slots, k) == prepared.data.nbytes
    expected = np.zeros((2 - (k == 64), height, 128), np.uint8)
    ends = [0, rows] if starts is None else starts
    for s in range(slots):
        base = (ends[s] + 8 * s) // 8 * 8
        for i in range(ends[s], ends[s + 1]):
            r = base + i - ends[s]
            for column in range(k):
                t, e = column % 64 // 16, column % 16
                j, h = e % 4, e // 4
                byte = 32 * j + 16 * (h // 2) + 4 * t + 2 * (h % 2)
                byte = 16 * (byte // 16 ^ (r % 8)) + byte % 16
                expected[column // 64, r, byte : byte + 2] = operand[i, column : column + 1].view(
                    np.uint8
                )
    np.testing.assert_array_equal(prepared.data, expected)


def operand_of(format: str, hidden: Any, scales: Any) -> Any:
    """Operands as the matmul's reference decodes them, in the order of K, with one kind of NaN."""
    if format == "bf16":
        return hidden.view(np.uint16)
    operand = decode_operand(hidden, scales, FORMATS[format])
    bits = layouts.ungroup_k(operand.reshape(len(operand), -1, 4, 16)).view(np.uint16)
    bits = bits[:, : scales.shape[1] * FORMATS[format].block].copy()
    infinity = 0x7C00 if format == "nvfp4" else 0x7F80
    bits[(bits & 0x7FFF) > infinity] = 0x7FFF
    return bits


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize(("format", "k"), SIZES)
def test_unpacking_gives_what_the_matmul_multiplies(format, k, name):
    arguments, scales = tokens(format, k, STARTS[name])
    prepared = pack_tokens(*arguments, format=format)
    operand = unpack_tokens(prepared, arguments[2])
    assert operand.dtype == (np.float16 if format == "nvfp4" else codecs.BF16)
    expected = operand_of(format, arguments[0], scales)
    np.testing.assert_array_equal(operand.view(np.uint16), expected)
    # The steps of the panels are those of the reference.
    steps = in_steps(operand).view(np.uint16).reshape(len(operand), -1, 4, 16)
    assert steps.shape[1] == prepared.data.shape[0]


def test_rows_of_no_slot_are_zero():
    data = np.full((1, token_rows(12, 1), 128), 0x11, np.uint8)
    unpacked = unpack_tokens(PreparedTokens(data, "bf16", 12, 1, 64), np.array([0, 9]))
    assert (unpacked[:9].view(np.uint16) == 0x1111).all()
    assert (unpacked[9:].view(np.uint16) == 0).all()
