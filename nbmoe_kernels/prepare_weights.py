"""Weights in the documented layout to prepared weights, bit for bit (`prepared_weights`).

Shapes: words and halves are one array, the prepared weights, as u32 and as u16; weight (E, N, K) in
packed codes of its kind or bf16; scales (E, ceil(N/128), ceil(K/X), 32, 4, 4) u8 with X the
elements of four scale bytes, not read for bf16. K is a multiple of the scale block, of 8 for bf16.

Thread map: a block makes a unit, in the order of the units; thread i makes the codes of its two
16-blocks and, if it is the first thread of their scale block, the two scales. Nobody else writes
there, and no thread needs another, so there is no synchronisation: to find a NaN in a 32-block of
mxfp8 both of its threads read it.

Padding: rows past N and elements past K are zero, scales included.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.convert import permute_bytes
from nbmoe_kernels.device.decode import pair_halves
from nbmoe_kernels.device.memory import load_v4, store_v4
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.prepared_weights import (
    UNIT_K,
    UNIT_KINDS,
    UNIT_ROWS,
    UNIT_THREADS,
    k64_count,
    n64_count,
)

_ZERO, _ONE, _TWO, _THREE = (np.uint32(n) for n in range(4))
_LOW_FIELDS, _SIGN_BITS = np.uint32(0x7F7F7F7F), np.uint32(0x80808080)
_ONE_EACH = np.uint32(0x01010101)
_NAN_SCALE = np.uint32(0xFF)


@device_function
def arrange_nvfp4(w):
    """Eight codes with their bits where `prepared_weights.FP4_BITS` has those of nvfp4."""
    m0 = np.uint32(w << np.uint32(9)) & np.uint32(0x0E000E00)
    m1 = np.uint32(w << np.uint32(2)) & np.uint32(0x01C001C0)
    m2 = np.uint32(w >> np.uint32(5)) & np.uint32(0x00380038)
    m3 = np.uint32(w >> np.uint32(12)) & np.uint32(0x00070007)
    return np.uint32(m0 | m1 | m2 | m3 | _signs(w))


@device_function
def arrange_mxfp4(w):
    """Eight codes with their bits where `prepared_weights.FP4_BITS` has those of mxfp4."""
    m0 = np.uint32(w << np.uint32(6)) & np.uint32(0x01C001C0)
    m1 = np.uint32(w >> np.uint32(1)) & np.uint32(0x00380038)
    m2 = np.uint32(w >> np.uint32(8)) & np.uint32(0x00070007)
    m3 = np.uint32(w >> np.uint32(3)) & np.uint32(0x0E000E00)
    return np.uint32(m0 | m1 | m2 | m3 | _signs(w))


@device_function
def _signs(w):
    s0 = np.uint32(w << np.uint32(12)) & np.uint32(0x80008000)
    s1 = np.uint32(w << np.uint32(5)) & np.uint32(0x10001000)
    s2 = np.uint32(w << np.uint32(3)) & np.uint32(0x40004000)
    s3 = np.uint32(w >> np.uint32(2)) & np.uint32(0x20002000)
    return np.uint32(s0 | s1 | s2 | s3)


@device_function
def _has_nan(word):
    """Whether one of four e4m3 codes is NaN."""
    carries = np.uint32(np.uint32(word & _LOW_FIELDS) + _ONE_EACH)
    return np.uint32(carries & _SIGN_BITS) != _ZERO


def _make_gather_fp4(arrange: Callable[..., Any]) -> Callable[..., Any]:
    @device_function
    def gather_fp4(weight, at_row, block, k, out, row):
        at = at_row * np.uint64(k >> _THREE) + np.uint64(block << _ONE)
        out[2 * row] = arrange(weight[at])
        out[2 * row + 1] = arrange(weight[at + np.uint64(1)])
        return False

    return gather_fp4


@device_function
def _gather_mxfp8(weight, at_row, block, k, out, row):
    at = at_row * np.uint64(k >> _TWO)
    a, b, c, d = load_v4(weight, at + np.uint64(block << _TWO))
    e, f, g, h = load_v4(weight, at + np.uint64(np.uint32(block ^ _ONE) << _TWO))
    nan = _has_nan(a) or _has_nan(b) or _has_nan(c) or _has_nan(d)
    nan = nan or _has_nan(e) or _has_nan(f) or _has_nan(g) or _has_nan(h)
    if not nan:
        out[row] = permute_bytes(a, b, np.uint32(0x4501))
        out[2 + row] = permute_bytes(c, d, np.uint32(0x4501))
        out[4 + row] = permute_bytes(a, b, np.uint32(0x6723))
        out[6 + row] = permute_bytes(c, d, np.uint32(0x6723))
    return nan


@device_function
def _gather_bf16(weight, at_row, block, k, out, row):
    at = at_row * np.uint64(k >> _ONE) + np.uint64(block << _THREE)
    a, b, c, d = load_v4(weight, at)
    pair_halves(a, b, c, d, out, row, 4)
    if np.uint32(np.uint32(block << np.uint32(4)) + np.uint32(8)) < k:
        a, b, c, d = load_v4(weight, at + np.uint64(4))
        pair_halves(a, b, c, d, out, 2 + row, 4)
    return False


_GATHERS = {
    "nvfp4": _make_gather_fp4(arrange_nvfp4),
    "mxfp4": _make_gather_fp4(arrange_mxfp4),
    "mxfp8": _gather_mxfp8,
    "bf16": _gather_bf16,
}
"""By kind: ``(weight, at_row, block, k, out, row)`` puts row's (0 or 1) 16-block into word
4 * plane + register of out. ``at_row``: rows of all experts before it. Whether a code is NaN."""


@functools.cache
def make_prepare_weights(format: str) -> Kernel:
    """The kernel for a kind of weights."""
    kind = UNIT_KINDS[format]
    gather = _GATHERS[format]
    planes = kind.code_bytes // (16 * UNIT_THREADS)
    num_words = 4 * planes
    unit_words, unit_halves = kind.unit_bytes // 4, kind.unit_bytes // 2
    code_halves = kind.code_bytes // 2
    # A unit has 64 / scale_block scale columns, a scale tile one or two units.
    has_scales = kind.scale_block > 0
    threads_log = 1 if kind.scale_block == 32 else 0
    columns = UNIT_K // (kind.scale_block or UNIT_K)

    @kernel(
        "global u32* words, global u16* halves, global u32* weight, global u8* scales, "
        "u32 n, u32 k, u32 units_down, u32 units_across",
        threads=UNIT_THREADS,
        name=f"prepare_weights_{format}",
    )
    def prepare_weights(words, halves, weight, scales, n, k, units_down, units_across):
        thread = np.uint32(cuda.threadIdx.x)
        unit = np.uint32(cuda.blockIdx.x)
        stack = np.uint32(unit // units_across)
        across = np.uint32(unit - np.uint32(stack * units_across))
        expert = np.uint32(stack // units_down)
        down = np.uint32(stack - np.uint32(expert * units_down))
        quad, t = np.uint32(thread >> _TWO), np.uint32(thread & _THREE)
        first_row = np.uint32(np.uint32(down * np.uint32(UNIT_ROWS)) + np.uint32(quad << _ONE))
        block = np.uint32(np.uint32(across << _TWO) + t)
        scale_in_unit = np.uint32(t >> np.uint32(threads_log))
        column = np.uint32(np.uint32(across * np.uint32(columns)) + scale_in_unit)
        tiles_across = np.uint32(
            np.uint32(units_across + np.uint32(threads_log)) >> np.uint32(threads_log)
        )
        out = cuda.local.array(num_words, np.uint32)
        for i in unroll(range(num_words)):
            out[i] = _ZERO
        pair = _ZERO
        for i in unroll(range(2)):
            row = np.uint32(first_row + np.uint32(i))
            if row < n and np.uint32(block << np.uint32(4)) < k:
                at_row = np.uint64(expert) * np.uint64(n) + np.uint64(row)
                nan = gather(weight, at_row, block, k, out, i)
                if has_scales:
                    byte = _NAN_SCALE
                    if not nan:
                        byte = np.uint32(scales[_scale_at(expert, row, column, n, tiles_across)])
                    pair = np.uint32(pair | np.uint32(byte << np.uint32(8 * i)))
        at = np.uint64(unit) * np.uint64(unit_words) + np.uint64(thread << _TWO)
        for p in unroll(range(planes)):
            plane = at + np.uint64(4 * UNIT_THREADS * p)
            store_v4(words, plane, out[4 * p], out[4 * p + 1], out[4 * p + 2], out[4 * p + 3])
        if has_scales and np.uint32(t & np.uint32(threads_log)) == _ZERO:
            at = np.uint64(unit) * np.uint64(unit_halves) + np.uint64(code_halves)
            place = np.uint32(np.uint32(quad * np.uint32(columns)) + scale_in_unit)
            halves[at + np.uint64(place)] = np.uint16(pair)

    return prepare_weights


@device_function
def _scale_at(expert, row, column, n, tiles_across):
    """Where the scale tiles (E, ceil(N/128), tiles_across, 32, 4, 4) have a scale."""
    tiles_down = np.uint32(np.uint32(n + np.uint32(127)) >> np.uint32(7))
    tile = np.uint64(expert) * np.uint64(tiles_down) + np.uint64(row >> np.uint32(7))
    tile = tile * np.uint64(tiles_across) + np.uint64(column >> _TWO)
    row_in_tile = np.uint32(row & np.uint32(127))
    low = np.uint32(np.uint32(row_in_tile & np.uint32(31)) << np.uint32(4))
    high = np.uint32(np.uint32(row_in_tile >> np.uint32(5)) << _TWO)
    return tile * np.uint64(512) + np.uint64(np.uint32(low + high) + (column & _THREE))


def launch_prepare_weights(
    executor: Executor,
    prepared: Any,
    weight: Any,
    scales: Any,
    *,
    format: str,
    num_experts: int,
    n: int,
    k: int,
    stream: Any = None,
) -> None:
    """Launch on flat arrays; the numbers are the sizes of ``weight`` in elements."""
    down, across = n64_count(n), k64_count(k)
    make_prepare_weights(format).launch(
        executor,
        (num_experts * down * across, 1, 1),
        prepared,
        prepared,
        weight,
        scales,
        n,
        k,
        down,
        across,
        stream=stream,
    )
