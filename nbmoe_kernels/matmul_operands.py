"""The operands that a tensor-core matmul takes: how rows lie in memory and become fragments.

K is walked in 64-blocks, and a tensor-core step sums 16 of a 64-block's elements, step j those with
k % 4 == j (`nbmoe.layouts`). Lane t of a quad owns the 16-block t of its rows, so one contiguous
load gives its share of all four steps: of elements j, j + 4, j + 8, j + 12 the first two are the
halves of one register of step j and the last two those of another, in a and in b alike. The order
inside a step does not matter, so operands of any two kinds fit together.

To add a kind of operand, write its fetch function and an `Operand`; all else follows.

    kind    bytes of a 64-block   scale bytes             tensor core   registers hold
    nvfp4   32                    e4m3, of 16 elements    f16           value * 2^-14
    mxfp4   32                    e8m0, of 32             bf16          value
    mxfp8   64                    e8m0, of 32             bf16          value
    e4m3    64                    none                    f16           value
    bf16    128                   none                    bf16          value

Shared memory holds a row's 64-block in 16-byte chunks, in order but for the 128-byte ones, whose
chunks swap with their neighbour in odd rows: a lane's loads are then conflict-free, because the 8
lanes of a phase read 128 bytes that no two banks share.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbmoe_kernels.device.convert import f16x2_of_e4m3
from nbmoe_kernels.device.decode import (
    bf16x2_of_e8m0,
    e2m1_to_bf16,
    e2m1_to_f16,
    e4m3_to_bf16,
    e4m3_to_f16,
    pair_halves,
)
from nbmoe_kernels.device.memory import load_shared_v2, load_shared_v4
from nbmoe_kernels.device.op import device_function


@dataclass(frozen=True)
class Operand:
    """A kind of operand.

    Attributes:
        name: as in the names of kernels.
        block_bytes: of a row's 64-block.
        scale_block: elements that share a scale byte; 0 without scale tiles.
        tensor_core: "f16" or "bf16".
        exponent: registers hold values times 2^exponent.
        fetch: ``(smem, at, t, odd, scale, out, first, pair, stride)``: decode lane t's 16-block of
            the row that begins at word ``at`` (``odd``: 1 in odd rows). Of step j, elements j and
            j + 4 go to out[first + j * stride], the others ``pair`` registers behind.
        scale_of: the ``scale`` that ``fetch`` wants, of a scale byte.
    """

    name: str
    block_bytes: int
    scale_block: int
    tensor_core: str
    exponent: int
    fetch: Callable[..., Any]
    scale_of: Callable[..., Any]

    @property
    def block_words(self) -> int:
        """Words of a row's 64-block."""
        return self.block_bytes // 4

    @property
    def is_swizzled(self) -> bool:
        """Whether odd rows swap neighbouring 16-byte chunks."""
        return self.block_bytes == 128

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k elements."""
        return k * self.block_bytes // 64

    def scale_words(self, blocks: int) -> int:
        """Scale words (four scale bytes) of a row's ``blocks`` 64-blocks."""
        return blocks * 16 // self.scale_block if self.scale_block else 0


@device_function
def _fetch_nvfp4(smem, at, t, odd, scale, out, first, pair, stride):
    w0, w1 = load_shared_v2(smem, np.uint32(at + np.uint32(np.uint32(2) * t)))
    e2m1_to_f16(w0, scale, out, first, stride)
    e2m1_to_f16(w1, scale, out, first + pair, stride)


@device_function
def _fetch_mxfp4(smem, at, t, odd, scale, out, first, pair, stride):
    w0, w1 = load_shared_v2(smem, np.uint32(at + np.uint32(np.uint32(2) * t)))
    e2m1_to_bf16(w0, scale, out, first, stride)
    e2m1_to_bf16(w1, scale, out, first + pair, stride)


@device_function
def _fetch_mxfp8(smem, at, t, odd, scale, out, first, pair, stride):
    w0, w1, w2, w3 = load_shared_v4(smem, np.uint32(at + np.uint32(np.uint32(4) * t)))
    e4m3_to_bf16(w0, w1, scale, out, first, stride)
    e4m3_to_bf16(w2, w3, scale, out, first + pair, stride)


@device_function
def _fetch_e4m3(smem, at, t, odd, scale, out, first, pair, stride):
    w0, w1, w2, w3 = load_shared_v4(smem, np.uint32(at + np.uint32(np.uint32(4) * t)))
    e4m3_to_f16(w0, w1, out, first, stride)
    e4m3_to_f16(w2, w3, out, first + pair, stride)


@device_function
def _fetch_bf16(smem, at, t, odd, scale, out, first, pair, stride):
    front = np.uint32(np.uint32(np.uint32(2) * t) ^ odd)
    w0, w1, w2, w3 = load_shared_v4(smem, np.uint32(at + np.uint32(np.uint32(4) * front)))
    pair_halves(w0, w1, w2, w3, out, first, stride)
    back = np.uint32(front ^ np.uint32(1))
    w0, w1, w2, w3 = load_shared_v4(smem, np.uint32(at + np.uint32(np.uint32(4) * back)))
    pair_halves(w0, w1, w2, w3, out, first + pair, stride)


@device_function
def _no_scale(byte):
    return byte


OPERANDS = {
    operand.name: operand
    for operand in (
        Operand("nvfp4", 32, 16, "f16", -14, _fetch_nvfp4, f16x2_of_e4m3),
        Operand("mxfp4", 32, 32, "bf16", 0, _fetch_mxfp4, bf16x2_of_e8m0),
        Operand("mxfp8", 64, 32, "bf16", 0, _fetch_mxfp8, bf16x2_of_e8m0),
        Operand("e4m3", 64, 0, "f16", 0, _fetch_e4m3, _no_scale),
        Operand("bf16", 128, 0, "bf16", 0, _fetch_bf16, _no_scale),
    )
}
