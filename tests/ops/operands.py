"""Random operands of the grouped matmuls, as a quantizer would hand them over."""

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nbmoe import layouts
from nbmoe.formats import NVFP4, PAIRS, BlockFormat
from tests.strategies import MX_WIDTHS, WIDTHS, Slots, codes, scale_bytes

Bytes = NDArray[np.uint8]
PAIR_NAMES = tuple("x".join(fmt.name for fmt in pair) for pair in PAIRS)
NAN_SCALE = {"e4m3": 0x7F, "e8m0": 0xFF}


@dataclass(frozen=True)
class Product:
    """Operands of a grouped matmul."""

    slots: Slots
    hidden: Bytes
    weight: Bytes
    a_scales: Bytes
    b_scales: Bytes
    expert_scales: NDArray[np.float32]
    row_scales: NDArray[Any] | None = None
    bias: NDArray[Any] | None = None
    a_format: BlockFormat = NVFP4
    b_format: BlockFormat = NVFP4

    @property
    def n(self) -> int:
        """Weight rows of an expert."""
        return int(self.weight.shape[1])

    @property
    def blocks(self) -> int:
        """Scale blocks of a row."""
        return self.k // self.a_format.block

    @property
    def k(self) -> int:
        """Elements of a row."""
        return int(self.hidden.shape[1]) * self.a_format.per_byte

    @property
    def nan_scale(self) -> int:
        """A scale byte that is NaN."""
        return NAN_SCALE[self.a_format.scale]

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments that both matmuls share."""
        return {
            "format": self.a_format,
            "weight_format": self.b_format,
            "bias": self.bias,
            "a_row_scales": self.row_scales,
        }

    @property
    def operands(self) -> tuple[Any, ...]:
        """Positional arguments that both matmuls share."""
        s = self.slots
        return (
            *(self.hidden, self.weight, self.a_scales, self.b_scales),
            *(s.starts, s.offsets, s.ids),
        )

    def with_padding(self, rng: np.random.Generator, byte: int | None) -> "Product":
        """The same values, with every scale byte that belongs to none of them overwritten.

        Args:
            rng: Source of random bytes.
            byte: What to write, None for random bytes.
        """
        a_used = np.zeros((128 * len(self.a_scales), self.blocks), bool)
        for slot, count in enumerate(self.slots.counts):
            begin = 128 * self.slots.tile_of(slot)
            a_used[begin : begin + count] = True
        b_used = np.ones((len(self.weight), self.n, self.blocks), bool)
        return replace(
            self,
            a_scales=_overwrite(rng, self.a_scales, a_used, byte),
            b_scales=_overwrite(rng, self.b_scales, b_used, byte),
        )

    def slot_alone(self, slot: int, rows: slice) -> "Product":
        """Some rows of a slot, as a problem of their own."""
        s = self.slots
        own = s.rows_of(slot)
        counts = (rows.stop - rows.start,)
        alone = Slots(counts, (s.expert_ids[slot],), s.num_experts, spare_rows=0)
        plain = layouts.deinterleave_scales(self.a_scales, 128 * len(self.a_scales), self.blocks)
        begin = 128 * s.tile_of(slot)
        scales = plain[begin : begin + (own.stop - own.start)][rows]
        return replace(
            self,
            slots=alone,
            hidden=self.hidden[own][rows].copy(),
            a_scales=layouts.interleave_scales(scales),
            row_scales=None if self.row_scales is None else self.row_scales[own][rows].copy(),
        )


def _overwrite(
    rng: np.random.Generator, tiles: Bytes, used: NDArray[np.bool_], byte: int | None
) -> Bytes:
    unused = layouts.interleave_scales(used.astype(np.uint8)) == 0
    noise = rng.integers(0, 256, tiles.shape, dtype=np.uint8) if byte is None else np.uint8(byte)
    return np.where(unused, noise, tiles)


def make_product(
    seed: int,
    slots: Slots,
    n: int,
    k: int,
    *,
    row_scales: bool = False,
    bias: bool = False,
    pair: tuple[BlockFormat, BlockFormat] = (NVFP4, NVFP4),
) -> Product:
    """Random operands; scale padding is 0. Row scales are left out of formats without them."""
    rng = np.random.default_rng(seed)
    a_format, b_format = pair
    plain = np.zeros((128 * slots.tiles, k // a_format.block), np.uint8)
    for slot, count in enumerate(slots.counts):
        begin = 128 * slots.tile_of(slot)
        plain[begin : begin + count] = scale_bytes(rng, (count, k // a_format.block), a_format)
    experts = slots.num_experts
    b_scales = scale_bytes(rng, (experts, n, k // b_format.block), b_format)
    row_scales = row_scales and a_format is NVFP4
    return Product(
        slots=slots,
        hidden=codes(rng, (slots.rows, a_format.packed_k(k)), a_format),
        weight=codes(rng, (experts, n, b_format.packed_k(k)), b_format),
        a_scales=layouts.interleave_scales(plain),
        b_scales=layouts.interleave_scales(b_scales),
        expert_scales=rng.uniform(0.01, 2, experts).astype(np.float32),
        row_scales=rng.uniform(0.1, 2, slots.rows).astype(ml_dtypes.bfloat16)
        if row_scales
        else None,
        bias=rng.standard_normal((experts, n)).astype(ml_dtypes.bfloat16) if bias else None,
        a_format=a_format,
        b_format=b_format,
    )


def width_for(pair: tuple[BlockFormat, BlockFormat], choice: int) -> int:
    """A K from those of the pair's block size."""
    widths = WIDTHS if pair[0] is NVFP4 else MX_WIDTHS
    return widths[choice % len(widths)]
