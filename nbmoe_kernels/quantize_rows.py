"""The rows of a block quantizer's block: load, scale, encode, and hand over to a layout.

`quantize_tile` says which thread has which elements. In the packed layout codes go to their rows
and scales to the block's tiles in shared memory; in the prepared one codes are decoded and go to
their panel through shared memory (`token_store`).
"""

import functools

import numpy as np
from numba import cuda

from nbmoe_kernels.block_quantizer import DeviceFunction
from nbmoe_kernels.device.memory import load_shared_word, store_v4
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.warp import sync_warp
from nbmoe_kernels.quantize_tile import (
    PASS_ROWS,
    TILE_BYTES,
    QuantizeTile,
    amax_of_words,
    load_16,
    pair_max,
    place_of_scale,
    rescale_16,
)
from nbmoe_kernels.token_store import (
    PAIRS_OF,
    PASS_WORDS,
    ROW_WORDS,
    panel_word,
    stage_pairs,
    store_pass,
)

PASSES = 4
"""Passes whose loads are in flight together."""

STAGE_WORDS = 4 * PASSES * PASS_WORDS
"""Shared memory for prepared rows [words]."""

_ZERO, _ONE, _TWO, _THREE = (np.uint32(n) for n in range(4))


def reciprocal_of(divisor: int) -> int:
    """What `quotient` takes beside a divisor of at least 1."""
    return min(2**32 // divisor, 2**32 - 1)


@device_function
def quotient(n, divisor, reciprocal):
    """n // divisor in four instructions: n * reciprocal / 2^32 is at most 1 short of it."""
    q = np.uint32(np.uint64(n) * np.uint64(reciprocal) >> np.uint64(32))
    rest = np.uint32(n - np.uint32(q * divisor))
    return np.uint32(q + _ONE) if rest >= divisor else q


@functools.cache
def make_load_rows(passes: int = PASSES) -> DeviceFunction:
    """``(input, indices, words, lane, panel, first_row, rows, first, ...)``: loads of a group.

    A lane's words of the passes from row ``first`` on; of rows past the last it is the last. Lanes
    past K load what lies at column 0, for nobody.
    """

    @device_function
    def load_rows(
        input,
        indices,
        words,
        lane,
        panel,
        first_row,
        rows,
        first,
        num_cols,
        indices_divisor,
        indices_reciprocal,
        has_indices,
    ):
        t = np.uint32(lane & _THREE)
        column = np.uint32(np.uint32(panel << np.uint32(6)) + np.uint32(t << np.uint32(4)))
        if column >= num_cols:
            column = _ZERO
        last = np.uint32(rows - _ONE)
        row_in_pass = np.uint32(lane >> _TWO)
        for p in unroll(range(passes)):
            row = np.uint32(first + np.uint32(row_in_pass + np.uint32(PASS_ROWS * p)))
            source = np.uint32(first_row + min(row, last))
            if has_indices != _ZERO:
                index = indices[np.uint64(source)]
                source = quotient(index, indices_divisor, indices_reciprocal)
            at = np.uint64(source) * np.uint64(num_cols >> _ONE) + np.uint64(column >> _ONE)
            load_16(input, at, words, 8 * p)

    return load_rows


@functools.cache
def make_quantize_rows(
    tile: QuantizeTile, is_prepared: bool, rescales: bool, passes: int = PASSES
) -> DeviceFunction:
    """``(output, input, indices, row_scales, tiles, stage, table, words, ...)``: rows
    from ``first`` to ``rows`` of a panel.

    The first group's words are loaded by the caller, as early as it can.

    Args:
        tile: the format's functions.
        is_prepared: whether the output is prepared tokens; else codes, with scales in ``tiles``.
        rescales: whether each row is divided by its row scale first.
        passes: passes in flight, at most PASSES.
    """
    scale_of, encode_words = tile.scale_of, tile.encode_words
    store_codes, word_shift = tile.store_codes, np.uint32(tile.word_shift)
    shares_block = tile.shares_block
    pair_log = np.uint32(shares_block)
    pairs_of = PAIRS_OF[tile.quantizer.format]
    load_rows = make_load_rows(passes)

    @device_function
    def quantize_rows(
        output,
        input,
        indices,
        row_scales,
        tiles,
        stage,
        table,
        words,
        lane,
        warp,
        in_block,
        panel,
        panel_rows,
        panel_row,
        first_row,
        first,
        rows,
        num_cols,
        indices_divisor,
        indices_reciprocal,
        has_indices,
        relu2,
        tensor_scale,
        inverse,
    ):
        row_in_pass, t = np.uint32(lane >> _TWO), np.uint32(lane & _THREE)
        column = np.uint32(np.uint32(panel << np.uint32(6)) + np.uint32(t << np.uint32(4)))
        is_column = column < num_cols
        tile_at = np.uint32(np.uint32(in_block >> pair_log) * np.uint32(TILE_BYTES))
        tile_at = np.uint32(tile_at + np.uint32(np.uint32(in_block & pair_log) << _ONE))
        tile_at = np.uint32(tile_at + np.uint32(t >> pair_log))
        panel_at = panel_word(panel, panel_rows, panel_row)
        staged = np.uint32(warp * np.uint32(PASSES * PASS_WORDS))
        has_scale = is_column and (not shares_block or t & _ONE == _ZERO)
        pairs = cuda.local.array(8, np.uint32)
        last = np.uint32(rows - _ONE)
        while first < rows:
            place = np.uint32(tile_at + place_of_scale(first, row_in_pass))
            for p in unroll(range(passes)):
                if np.uint32(first + np.uint32(PASS_ROWS * p)) < rows:
                    row = np.uint32(first + np.uint32(row_in_pass + np.uint32(PASS_ROWS * p)))
                    if rescales:
                        scale_row = np.uint64(np.uint32(first_row + min(row, last)))
                        rescale_16(words, 8 * p, np.uint32(row_scales[scale_row]), relu2)
                    amax = amax_of_words(words, 8 * p)
                    if shares_block:
                        amax = pair_max(amax)
                    byte, factor = scale_of(amax, tensor_scale, inverse, table)
                    w0, w1, w2, w3 = encode_words(words, 8 * p, byte, factor)
                    if is_prepared:
                        if not is_column:
                            byte, w0, w1, w2, w3 = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
                        pairs_of(w0, w1, w2, w3, byte, pairs)
                        stage_pairs(
                            stage, np.uint32(staged + np.uint32(p * PASS_WORDS)), lane, pairs
                        )
                    elif is_column and row < rows:
                        at = np.uint64(np.uint32(first_row + row)) * np.uint64(
                            num_cols >> word_shift
                        )
                        store_codes(output, at + np.uint64(column >> word_shift), w0, w1, w2, w3)
                        if has_scale:
                            tiles[np.uint32(place + np.uint32(16 * PASS_ROWS * p))] = np.uint8(byte)
            if is_prepared:
                sync_warp()
                for p in unroll(range(passes)):
                    row = np.uint32(first + np.uint32(PASS_ROWS * p))
                    if row < rows:
                        at = panel_at + np.uint64(np.uint32(row * np.uint32(ROW_WORDS)))
                        source = np.uint32(staged + np.uint32(p * PASS_WORDS))
                        store_pass(output, at, stage, source, lane, np.uint32(rows - row))
                sync_warp()
            first = np.uint32(first + np.uint32(passes * PASS_ROWS))
            if first < rows:
                load_rows(
                    input,
                    indices,
                    words,
                    lane,
                    panel,
                    first_row,
                    rows,
                    first,
                    num_cols,
                    indices_divisor,
                    indices_reciprocal,
                    has_indices,
                )

    return quantize_rows


@functools.cache
def make_zero_rows(tile: QuantizeTile, is_prepared: bool) -> DeviceFunction:
    """``(output, lane, panel, panel_rows, panel_row, first_row, first, rows, num_cols)``: zeros."""
    store_codes, word_shift = tile.store_codes, np.uint32(tile.word_shift)

    @device_function
    def zero_rows(output, lane, panel, panel_rows, panel_row, first_row, first, rows, num_cols):
        t = np.uint32(lane & _THREE)
        column = np.uint32(np.uint32(panel << np.uint32(6)) + np.uint32(t << np.uint32(4)))
        row = np.uint32(first + np.uint32(lane >> _TWO))
        while row < rows:
            if is_prepared:
                at = panel_word(panel, panel_rows, np.uint32(panel_row + row))
                at = at + np.uint64(np.uint32(t << _THREE))
                store_v4(output, at, _ZERO, _ZERO, _ZERO, _ZERO)
                store_v4(output, at + np.uint64(4), _ZERO, _ZERO, _ZERO, _ZERO)
            elif column < num_cols:
                at = np.uint64(np.uint32(first_row + row)) * np.uint64(num_cols >> word_shift)
                store_codes(
                    output, at + np.uint64(column >> word_shift), _ZERO, _ZERO, _ZERO, _ZERO
                )
            row = np.uint32(row + np.uint32(PASS_ROWS))

    return zero_rows


@device_function
def clear_tiles(tiles, thread):
    """Thread i of 128 zeroes bytes [16 i, 16 i + 16) of the block's tiles."""
    for i in unroll(range(16)):
        tiles[np.uint32(np.uint32(thread << np.uint32(4)) + np.uint32(i))] = np.uint8(0)


@device_function
def store_tiles(scales, tiles, thread, tile, column_tiles, first_column_tile, count):
    """Store the block's ``count`` tiles: row ``tile``, columns from ``first_column_tile`` on."""
    tile_of_block = np.uint32(thread >> np.uint32(5))
    column_tile = np.uint32(first_column_tile + tile_of_block)
    if tile_of_block < count and column_tile < column_tiles:
        byte = np.uint32(thread << np.uint32(4))
        at = np.uint64(tile) * np.uint64(column_tiles) + np.uint64(column_tile)
        at = at * np.uint64(TILE_BYTES // 4)
        at = at + np.uint64(np.uint32(np.uint32(thread & np.uint32(31)) << _TWO))
        a = load_shared_word(tiles, byte)
        b = load_shared_word(tiles, np.uint32(byte + np.uint32(4)))
        c = load_shared_word(tiles, np.uint32(byte + np.uint32(8)))
        d = load_shared_word(tiles, np.uint32(byte + np.uint32(12)))
        store_v4(scales, at, a, b, c, d)
