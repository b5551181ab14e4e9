"""Where a consumer's sums lie, and how the plain Hopper matmul stores them.

Thread i = 32 w + 4 g + t of a warpgroup holds weight rows r0 = 16 w + 2 g and r0 + 1 of its 64 for
tokens 8 j + 2 t + c: the pair is acc[4 j + c], acc[4 j + 2 + c], for j < width / 8 and c = 0, 1.

    v = acc * 2^28 (NVFP4 only) * expert_scale * row_scale + bias          f32, one rounding each
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.convert import bf16x2_of_f32, f32_of_bf16
from nbmoe_kernels.device.math import add_rn, mul_rn
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.tile import store_pairs_bf16
from nbmoe_kernels.matmul_epilogue import MINUS_ZERO, row_scale_of
from nbmoe_kernels.matmul_sm90_config import RESULT_BYTES, HopperMatmulConfig

_LARGEST_FOLDED = np.float32(2.0**99)
"""Factors up to here times 2^28 are finite, so that one product rounds as two would."""
_NAN = np.float32(np.nan)


def make_scaled(config: HopperMatmulConfig) -> Callable[..., Any]:
    """``scaled(acc, expert_scale, row_scale, bias)``, the formula of the module's docstring."""
    exponent = config.a.exponent + config.b.exponent
    decode_scale = np.float32(2.0**-exponent)

    @device_function
    def scaled(acc, expert_scale, row_scale, bias):
        if exponent:
            acc = mul_rn(acc, decode_scale)
        return add_rn(mul_rn(mul_rn(acc, expert_scale), row_scale), bias)

    return scaled


@device_function
def load_bias_pair(bias, has_bias, expert, column, n):
    """The bias of two neighbouring weight rows, -0 where there is none."""
    if has_bias == np.uint32(0) or expert < np.int32(0) or column >= n:
        return MINUS_ZERO, MINUS_ZERO
    at = np.uint64(expert) * np.uint64(n) + np.uint64(column)
    return f32_of_bf16(bias[at]), f32_of_bf16(bias[at + np.uint64(1)])


@device_function
def thread_row():
    """The first of the thread's two weight rows, in the tile."""
    thread = np.uint32(cuda.threadIdx.x)
    warp_row = np.uint32(np.uint32(thread >> np.uint32(5)) << np.uint32(4))
    return np.uint32(warp_row + np.uint32(np.uint32(thread & np.uint32(28)) >> np.uint32(1)))


def _make_scaled_tile(
    config: HopperMatmulConfig, width: int, put: Callable[..., Any]
) -> Callable[..., Any]:
    """``scaled_tile(acc, to, at, pitch, expert, expert_scale, row, first, rows, column, n, args)``.

    Rounds a thread's sums to pairs and calls ``put(to, place, word)`` for each token of ``rows``;
    places are ``pitch`` apart, and ``at`` is that of the thread's first token, ``first``.
    """
    scaled = make_scaled(config)

    @device_function
    def scaled_tile(acc, to, at, pitch, expert, expert_scale, row, first, rows, column, n, args):
        _, a_row_scales, bias, has_row_scales, has_bias = args
        if expert < np.int32(0):
            has_row_scales = np.uint32(0)
        bias0, bias1 = load_bias_pair(bias, has_bias, expert, column, n)
        for j in unroll(range(width // 8)):
            for c in unroll(range(2)):
                token = np.uint32(first + np.uint32(8 * j + c))
                if token < rows:
                    row_scale = row_scale_of(a_row_scales, has_row_scales, np.uint32(row + token))
                    v0 = scaled(acc[4 * j + c], expert_scale, row_scale, bias0)
                    v1 = scaled(acc[4 * j + 2 + c], expert_scale, row_scale, bias1)
                    put(to, at + np.uint64(8 * j + c) * np.uint64(pitch), bf16x2_of_f32(v1, v0))

    return scaled_tile


def _make_plain_factor(config: HopperMatmulConfig) -> Callable[..., Any]:
    """``plain_factor(scale, args)``: the only factor of a tile's sums, or NaN if there is more."""
    decode_scale = np.float32(2.0 ** -(config.a.exponent + config.b.exponent))

    @device_function
    def plain_factor(scale, args):
        _, _, _, has_row_scales, has_bias = args
        is_plain = has_row_scales == np.uint32(0) and has_bias == np.uint32(0)
        if is_plain and scale >= -_LARGEST_FOLDED and scale <= _LARGEST_FOLDED:
            return mul_rn(scale, decode_scale)
        return _NAN

    return plain_factor


@device_function
def _first_token():
    """The first of the thread's tokens."""
    return np.uint32(np.uint32(np.uint32(cuda.threadIdx.x) & np.uint32(3)) << np.uint32(1))


@device_function
def _put_global(out, place, word):
    out[place] = word


@device_function
def _put_shared(words, place, word):
    words[np.uint32(place)] = word


@device_function
def prepare_nothing(expert, row, args):
    """Of an epilogue that asks for nothing before the products."""
    return np.uint32(0)


def make_store_tile(
    config: HopperMatmulConfig, width: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The epilogue that stores a thread's sums to out (M, n) bf16, u32 words of two columns.

    Its ``args`` are ``(out, a_row_scales, bias, has_row_scales, has_bias)``.
    """
    block_rows = config.block_rows
    plain_factor = _make_plain_factor(config)
    scaled_tile = _make_scaled_tile(config, width, _put_global)
    store_pairs = store_pairs_bf16(width)

    @device_function
    def store_tile(acc, smem, prepared, expert, expert_scale, row, rows, m_tile, n, args):
        out = args[0]
        column = np.uint32(np.uint32(m_tile * np.uint32(block_rows)) + thread_row())
        first = _first_token()
        if column < n:
            pitch = np.uint32(n >> np.uint32(1))
            at = np.uint64(np.uint32(row + first)) * np.uint64(pitch) + np.uint64(
                np.uint32(column >> np.uint32(1))
            )
            factor = plain_factor(expert_scale, args)
            if factor == factor:
                left = np.uint32(rows - first) if rows > first else np.uint32(0)
                store_pairs(acc, out, at, pitch, left, factor)
            else:
                scaled_tile(
                    acc, out, at, pitch, expert, expert_scale, row, first, rows, column, n, args
                )

    return prepare_nothing, store_tile


def make_kept_place(config: HopperMatmulConfig) -> Callable[..., Any]:
    """``kept_place(m_tile) -> column, first, at``: of a thread whose sums wait in shared memory.

    ``column`` is its first weight row, ``first`` its first token, ``at`` that token's word for its
    two rows. A token of a warpgroup has 32 words, weight rows in order, and 4 words of padding: the
    lanes of a store then meet 32 banks. The next token's word is RESULT_BYTES behind.
    """
    block_rows, results_at = config.block_rows, config.results_at // 4
    group_words, pitch = config.max_width * RESULT_BYTES // 4, RESULT_BYTES // 4

    @device_function
    def kept_place(m_tile):
        group = np.uint32(np.uint32(cuda.threadIdx.x) >> np.uint32(7))
        column = np.uint32(np.uint32(m_tile * np.uint32(block_rows)) + thread_row())
        first = _first_token()
        group_at = np.uint32(np.uint32(results_at) + np.uint32(group * np.uint32(group_words)))
        row_word = np.uint32(np.uint32(thread_row() & np.uint32(63)) >> np.uint32(1))
        at = np.uint32(np.uint32(group_at + row_word) + np.uint32(first * np.uint32(pitch)))
        return column, first, at

    return kept_place


def make_keep_tile(
    config: HopperMatmulConfig, width: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The epilogue that leaves rounded sums in shared memory, for others to take.

    Same ``args`` as `make_store_tile`.
    """
    pitch = RESULT_BYTES // 4
    kept_place, plain_factor = make_kept_place(config), _make_plain_factor(config)
    scaled_tile = _make_scaled_tile(config, width, _put_shared)

    @device_function
    def keep_tile(acc, smem, prepared, expert, expert_scale, row, rows, m_tile, n, args):
        words = cuda.shared.array(0, np.uint32, alignment=1024)
        column, first, at = kept_place(m_tile)
        factor = plain_factor(expert_scale, args)
        if factor == factor:
            for j in unroll(range(width // 8)):
                for c in unroll(range(2)):
                    v0 = mul_rn(acc[4 * j + c], factor)
                    v1 = mul_rn(acc[4 * j + 2 + c], factor)
                    place = np.uint32(at + np.uint32((8 * j + c) * pitch))
                    words[place] = bf16x2_of_f32(v1, v0)
        else:
            scaled_tile(
                acc, words, np.uint64(at), np.uint32(pitch), expert, expert_scale, row, first, rows,
                column, n, args,
            )  # fmt: skip

    return prepare_nothing, keep_tile
