"""Sizes of the calls that tests spoil, and the arrays that every family of operations needs."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from nbmoe import layouts
from nbmoe.formats import BlockFormat
from nbmoe.operand import named_dtype

POISON = 0xAA

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call, small but with no two alike.

    Attributes:
        tokens: Rows before routing.
        top_k: Experts a token.
        experts: Experts, each with a slot.
        hidden_blocks: Blocks (or 16 elements where there are none) of the model's dimension.
        moe_blocks: Blocks of an expert's inner dimension.
        counts: Rows of each slot, empty for all rows in the last.
    """

    tokens: int = 65
    top_k: int = 2
    experts: int = 4
    hidden_blocks: int = 5
    moe_blocks: int = 3
    counts: tuple[int, ...] = (3, 0, 125, 2)

    @property
    def rows(self) -> int:
        """Rows after routing."""
        return self.tokens * self.top_k

    @property
    def tiles(self) -> int:
        """Scale tiles of the routed rows."""
        return layouts.activation_tiles(self.rows, self.experts)

    def starts(self) -> Any:
        """(S + 1,) row offsets."""
        counts = self.counts or (0,) * (self.experts - 1) + (self.rows,)
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)

    def groups(self) -> Arguments:
        """What grouped matmuls of plain rows call the routing."""
        ids = np.arange(self.experts, dtype=np.int32)
        return {"expert_start": self.starts(), "expert_ids": ids}

    def slots(self, starts: str = "expert_start", offsets: str = "a_scale_offsets") -> Arguments:
        """Routing of rows whose scales are tiled."""
        row_starts = self.starts()
        return {
            starts: row_starts,
            offsets: layouts.scales_offset(row_starts),
            "expert_ids": np.arange(self.experts, dtype=np.int32),
        }


NORMAL = Sizes()
TOKENS, TOP_K, EXPERTS = NORMAL.tokens, NORMAL.top_k, NORMAL.experts
ROWS, TILES = NORMAL.rows, NORMAL.tiles
HIDDEN, MOE_DIM = 16 * NORMAL.hidden_blocks, 16 * NORMAL.moe_blocks
"""Those of `NORMAL` in NVFP4."""
TINY = Sizes(tokens=3, hidden_blocks=1, moe_blocks=1, counts=(1, 0, 3, 2))
"""For tests that run kernels where they are slow."""
NO_TOKENS = Sizes(tokens=0, counts=(0, 0, 0, 0))
ONE_TOKEN = Sizes(tokens=1, counts=(0, 2, 0, 0))
ONE_EXPERT = Sizes(top_k=1, experts=1, counts=(65,))
ONE_BLOCK = Sizes(hidden_blocks=1, moe_blocks=1)
FULL_TILE = Sizes(tokens=128, counts=(0, 128, 0, 128))
UNOWNED_ROWS = Sizes(counts=(3, 0, 5, 2))


def poisoned(shape: tuple[int, ...], dtype: Any) -> Any:
    """A buffer whose every byte is the poison."""
    buffer = np.empty(shape, named_dtype(np.dtype(dtype).name))
    buffer.view(np.uint8)[...] = POISON
    return buffer


def bf16(seed: int, *shape: int) -> Any:
    """Random bfloat16."""
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return values.astype(ml_dtypes.bfloat16)


def factors(seed: int, *shape: int) -> Any:
    """Random float32 in [0.5, 2)."""
    return np.random.default_rng(seed).uniform(0.5, 2, shape).astype(np.float32)


def codes(seed: int, dtype: str, *shape: int) -> Any:
    """Random bytes, none of them a NaN of e4m3."""
    drawn = np.random.default_rng(seed).integers(0, 0x7F, shape, dtype=np.uint8)
    return drawn.view(named_dtype(dtype))


def scale_rows(seed: int, fmt: BlockFormat, *shape: int) -> Any:
    """Random scales of a format, plausible and none of them 0, as bytes."""
    low, high = (0x20, 0x40) if fmt.scale == "e4m3" else (0x78, 0x84)
    return np.random.default_rng(seed).integers(low, high, shape, dtype=np.uint8)


def scale_tiles(seed: int, fmt: BlockFormat, rows: int, k: int, *lead: int) -> Any:
    """Random scales of rows of k elements, tiled and of the format's element type."""
    scales = layouts.interleave_scales(scale_rows(seed, fmt, *lead, rows, k // fmt.block))
    return scales.view(named_dtype(fmt.scales_dtype))


def quantized_out(fmt: BlockFormat, rows: int, k: int, tiles: int) -> tuple[Any, Any]:
    """Buffers for the codes and scale tiles of rows of k elements."""
    columns = layouts.ceil_div(k, fmt.tile_columns)
    return (
        poisoned((rows, fmt.packed_k(k)), named_dtype(fmt.codes_dtype)),
        poisoned((tiles, columns, *layouts.TILE_SHAPE), named_dtype(fmt.scales_dtype)),
    )
