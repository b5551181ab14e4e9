"""Warp-level tensor-core products with Hopper's bits (`nbmoe_kernels.device.tensor_core`).

Fragments are those of `nbmoe_kernels.device.fragments`: with g = lane // 4 and t = lane % 4, word
a0 holds row g and the elements of k-word t (f16: k 2t and 2t+1; e4m3: 4t to 4t+3), a1 row g+8, a2
row g and k-word t+4, a3 both; b0 holds column g and k-word t, b1 k-word t+4; acc[0] and acc[1] are
row g, columns 2t and 2t+1, acc[2] and acc[3] row g+8.
"""

import numpy as np
from numba import njit

from nbmoe_kernels.device.fragments import (
    gather_accumulators,
    gather_columns,
    gather_rows,
    scatter_accumulators,
    transposed,
)
from nbmoe_kernels.device.op import Scope, device_op
from nbmoe_kernels.device.tensor_core import step_bf16, step_e4m3_as_f16, step_f16

_NAN_BITS = 0x7FFFFFFF


def _declare(shape_and_types: str, *, short: bool = False, min_cc: tuple[int, int] = (8, 0)):
    """Declares an mma with the operand words of its shape: 4 and 2, or 2 and 1 if ``short``."""
    a, b = (("a0", "a1"), ("b0",)) if short else (("a0", "a1", "a2", "a3"), ("b0", "b1"))
    words = ", ".join(f"u32 {name}" for name in a + b)
    listed = ["{" + ", ".join(f"<{name}>" for name in names) + "}" for names in (a, b)]
    return device_op(
        f"void(f32[4] acc, {words})",
        scope=Scope.WARP,
        ptx=f"mma.sync.aligned.{shape_and_types} <acc>, {listed[0]}, {listed[1]}, <acc>;",
        effects=(),
        min_cc=min_cc,
    )


# A tile is worked on as its transpose, 8 x 16: rows of 16 are faster, and the bits are the same.
@njit
def _load_transposed(acc):
    return transposed(gather_accumulators(acc))


@njit
def _store_transposed(tile, acc):
    scatter_accumulators(transposed(tile), acc)


@_declare("m16n8k16.row.col.f32.f16.f16.f32")
def mma_m16n8k16_f16(acc, a0, a1, a2, a3, b0, b1):
    """acc (16 x 8, f32) += a (16 x 16, f16) @ b (16 x 8, f16)."""
    tile = _load_transposed(acc)
    a, b = gather_rows(a0, a1, a2, a3), gather_columns(b0, b1)
    step_f16(b.view(np.uint16), a.view(np.uint16), tile)
    _store_transposed(tile, acc)


@_declare("m16n8k16.row.col.f32.bf16.bf16.f32")
def mma_m16n8k16_bf16(acc, a0, a1, a2, a3, b0, b1):
    """acc (16 x 8, f32) += a (16 x 16, bf16) @ b (16 x 8, bf16)."""
    tile = _load_transposed(acc)
    a, b = gather_rows(a0, a1, a2, a3), gather_columns(b0, b1)
    step_bf16(b.view(np.uint16), a.view(np.uint16), tile)
    _store_transposed(tile, acc)


MMA_M16N8K16 = {"f16": mma_m16n8k16_f16, "bf16": mma_m16n8k16_bf16}
"""By the type of both operands."""


@njit
def _first_half(words):
    """Words 0 to 3 of each row: an operand of k8."""
    half = np.empty((words.shape[0], 4), np.uint32)
    half[:] = words[:, :4]
    return half


@_declare("m16n8k8.row.col.f32.f16.f16.f32", short=True)
def mma_m16n8k8_f16(acc, a0, a1, b0):
    """acc (16 x 8, f32) += a (16 x 8, f16) @ b (8 x 8, f16); two of them are not one k16."""
    tile = _load_transposed(acc)
    a = _first_half(gather_rows(a0, a1, a0, a1))
    b = _first_half(gather_columns(b0, b0))
    step_f16(b.view(np.uint16), a.view(np.uint16), tile)
    _store_transposed(tile, acc)


@_declare("m16n8k8.row.col.f32.bf16.bf16.f32", short=True)
def mma_m16n8k8_bf16(acc, a0, a1, b0):
    """acc (16 x 8, f32) += a (16 x 8, bf16) @ b (8 x 8, bf16)."""
    tile = _load_transposed(acc)
    a = _first_half(gather_rows(a0, a1, a0, a1))
    b = _first_half(gather_columns(b0, b0))
    step_bf16(b.view(np.uint16), a.view(np.uint16), tile)
    _store_transposed(tile, acc)


@njit
def _byte_pairs(words, first):
    """Bytes ``first`` and ``first + 1`` of every word: half of an e4m3 operand."""
    half = np.empty((words.shape[0], 16), np.uint8)
    for row in range(words.shape[0]):
        for word in range(8):
            pair = words[row, word] >> np.uint32(8 * first)
            half[row, 2 * word] = pair & np.uint32(0xFF)
            half[row, 2 * word + 1] = (pair >> np.uint32(8)) & np.uint32(0xFF)
    return half


@_declare("m16n8k32.row.col.f32.e4m3.e4m3.f32", min_cc=(8, 9))
def mma_m16n8k32_e4m3(acc, a0, a1, a2, a3, b0, b1):
    """acc (16 x 8, f32) += a (16 x 32, e4m3) @ b (32 x 8, e4m3), as Hopper's assembler expands it.

    Two f16 steps from zero, over k % 4 in {0, 1} and {2, 3}, then one rounded f32 addition.
    """
    a, b = gather_rows(a0, a1, a2, a3), gather_columns(b0, b1)
    product = np.zeros((8, 16), np.float32)
    for first in range(0, 4, 2):
        step_e4m3_as_f16(_byte_pairs(b, first), _byte_pairs(a, first), product)
    tile = _load_transposed(acc)
    for row in range(8):
        for column in range(16):
            total = np.float32(tile[row, column] + product[row, column])
            if total != total:
                total = np.uint32(_NAN_BITS).view(np.float32)
            tile[row, column] = total
    _store_transposed(tile, acc)
