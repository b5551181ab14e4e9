"""Where the fused Hopper matmul puts codes and scales: in the documented arrays, or as prepared
tokens.

A unit is a warpgroup's 64 weight rows, 32 z of a token. A lane has four of them, from column
32 unit + 4 chunk on; chunks 0 to 7 of a token are neighbouring lanes. Stores are three functions:

    begin(out, row, place, unit, chunk, z_count) -> at, pitch
        where a lane's words of a token go, and how far on those of tokens 8, 16, ... further are
        for each of these tokens
    store(out, at, word, byte, is_stored, place, first_tile, unit, chunk, z_count)
        a lane's codes and its block's scale; all lanes of a warp come together
    clear(out, end, first_tile, unit, z_count, thread, threads)
        what lies behind the last row of a slot of ``end`` rows, by ``threads`` threads

``row`` is the row in the output, ``place`` that in the slot or, for prepared tokens, in the panels.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.convert import f16x2_of_e4m3x2, permute_bytes
from nbmoe_kernels.device.decode import bf16x2_of_e8m0, e2m1_to_bf16, e2m1_to_f16, e4m3_to_bf16
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.device.warp import shuffle_xor
from nbmoe_kernels.token_store import ROW_WORDS, panel_word

UNIT_Z = 32
"""z of a token in a unit."""
_TILE_BYTES = 512
Stores = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]
_ZERO, _ONE, _TWO, _THREE = (np.uint32(n) for n in range(4))


def make_packed_stores(block: int) -> Stores:
    """The stores of codes and scale tiles, for blocks of 16 or 32.

    ``out`` begins with the codes, words of four, and the scale bytes. A tile's scales past the last
    column, and those of the last tile's rows past the last row, become 0.
    """
    unit_bytes = UNIT_Z // block
    units_log = 1 if block == 16 else 2
    tile_up, in_tile = UNIT_Z * (1 << units_log) - 1, (1 << units_log) - 1
    block_mask, block_log = block // 4 - 1, 2 if block == 16 else 3

    @device_function
    def scale_place(place, first_tile, unit, z_count):
        """Where the unit's first scale of a row lies."""
        tile = np.uint32(first_tile + np.uint32(place >> np.uint32(7)))
        across = np.uint32(np.uint32(z_count + np.uint32(tile_up)) >> np.uint32(5 + units_log))
        at = np.uint64(tile) * np.uint64(across) + np.uint64(
            np.uint32(unit >> np.uint32(units_log))
        )
        row = np.uint32(np.uint32(place & np.uint32(31)) << np.uint32(4))
        part = np.uint32(np.uint32(np.uint32(place & np.uint32(127)) >> np.uint32(5)) << _TWO)
        column = np.uint32(np.uint32(unit & np.uint32(in_tile)) * np.uint32(unit_bytes))
        return at * np.uint64(_TILE_BYTES) + np.uint64(np.uint32(np.uint32(row + part) + column))

    @device_function
    def bytes_left(unit, z_count):
        """Scale bytes of a row that the unit writes: its own, and the last one's to the end."""
        if np.uint32(np.uint32(unit + _ONE) << np.uint32(5)) < z_count:
            return np.uint32(unit_bytes)
        before = np.uint32(np.uint32(unit & np.uint32(in_tile)) * np.uint32(unit_bytes))
        return np.uint32(np.uint32(4) - before)

    @device_function
    def begin(out, row, place, unit, chunk, z_count):
        pitch = np.uint64(np.uint32(z_count >> _TWO))
        return np.uint64(row) * pitch + np.uint64(
            np.uint32(np.uint32(unit << _THREE) + chunk)
        ), pitch

    @device_function
    def store(out, at, word, byte, is_stored, place, first_tile, unit, chunk, z_count):
        codes, scales = out[0], out[1]
        column = np.uint32(np.uint32(unit << _THREE) + chunk)
        if is_stored and np.uint32(column << _TWO) < z_count:
            codes[at] = word
        if is_stored and np.uint32(chunk & np.uint32(block_mask)) == _ZERO:
            index = np.uint32(chunk >> np.uint32(block_log))
            scale_at = scale_place(place, first_tile, unit, z_count)
            scales[scale_at + np.uint64(index)] = byte
            index = np.uint32(index + np.uint32(unit_bytes))
            count = bytes_left(unit, z_count)
            while index < count:
                scales[scale_at + np.uint64(index)] = _ZERO
                index = np.uint32(index + np.uint32(unit_bytes))

    @device_function
    def clear(out, end, first_tile, unit, z_count, thread, threads):
        scales = out[1]
        row = np.uint32(end + thread)
        last = np.uint32(np.uint32(end + np.uint32(127)) & np.uint32(0xFFFFFF80))
        while row < last:
            at = scale_place(row, first_tile, unit, z_count)
            count, index = bytes_left(unit, z_count), _ZERO
            while index < count:
                scales[at + np.uint64(index)] = _ZERO
                index = np.uint32(index + _ONE)
            row = np.uint32(row + threads)

    return begin, store, clear


@device_function
def _pairs_nvfp4(word, byte, is_odd, out):
    other = shuffle_xor(word, _ONE)
    own = permute_bytes(word, other, np.uint32(0x0105) if is_odd else np.uint32(0x0400))
    scale = f16x2_of_e4m3x2(permute_bytes(byte, byte, np.uint32(0x0000)))
    e2m1_to_f16(own, scale, out, 0, 1)


@device_function
def _pairs_mxfp4(word, byte, is_odd, out):
    other = shuffle_xor(word, _ONE)
    own = permute_bytes(word, other, np.uint32(0x0105) if is_odd else np.uint32(0x0400))
    e2m1_to_bf16(own, bf16x2_of_e8m0(byte), out, 0, 1)


@device_function
def _pairs_mxfp8(word, byte, is_odd, out):
    other = shuffle_xor(word, _ONE)
    low = permute_bytes(word, other, np.uint32(0x0076) if is_odd else np.uint32(0x0010))
    high = permute_bytes(word, other, np.uint32(0x0032) if is_odd else np.uint32(0x0054))
    e4m3_to_bf16(low, high, bf16x2_of_e8m0(byte), out, 0, 1)


_PAIRS = {"nvfp4": _pairs_nvfp4, "mxfp4": _pairs_mxfp4, "mxfp8": _pairs_mxfp8}


def make_prepared_stores(format: str) -> Stores:
    """The stores of prepared tokens (`nbmoe_kernels.prepared_tokens`).

    ``out`` begins with the panels' words; scales are part of them, and the second element, the
    panels' rows. Lane h of a 16-block has its elements 4 h to 4 h + 3. Step j pairs elements j and
    j + 4 of eight, those of an even lane and the next: the even one makes the pairs of steps 0 and
    1, the odd one those of 2 and 3. A last panel with one unit gets zeros for the other.
    """
    pairs_of = _PAIRS[format]

    @device_function
    def begin(out, row, place, unit, chunk, z_count):
        first = panel_word(np.uint32(unit >> _ONE), out[2], place)
        sixteen = np.uint32(np.uint32(np.uint32(unit & _ONE) << _ONE) + np.uint32(chunk >> _TWO))
        piece = np.uint32(np.uint32(chunk & _TWO) >> _ONE)
        piece = np.uint32(piece + np.uint32(np.uint32(chunk & _ONE) << _TWO))
        # Of the two pieces, two apart, the lower one: a swizzle may change their order.
        piece = np.uint32(np.uint32(piece ^ place) & np.uint32(5))
        at = first + np.uint64(np.uint32(sixteen + np.uint32(piece << _TWO)))
        return at, np.uint64(ROW_WORDS)

    @device_function
    def store(out, at, word, byte, is_stored, place, first_tile, unit, chunk, z_count):
        tokens = out[0]
        pairs = cuda.local.array(4, np.uint32)
        pairs_of(word, byte, np.uint32(chunk & _ONE) != _ZERO, pairs)
        low, high = pairs[0], pairs[1]
        if np.uint32(place & _TWO) != _ZERO:
            low, high = pairs[1], pairs[0]
        if is_stored:
            tokens[at] = low
            tokens[at + np.uint64(8)] = high
            is_alone = np.uint32(unit & _ONE) == _ZERO
            if is_alone and np.uint32(np.uint32(unit + _ONE) << np.uint32(5)) >= z_count:
                tokens[at + np.uint64(2)] = _ZERO
                tokens[at + np.uint64(10)] = _ZERO

    @device_function
    def clear(out, end, first_tile, unit, z_count, thread, threads):
        pass

    return begin, store, clear
