"""Random quantized grouped problems, made without the code under test."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from nbmoe import layouts
from nbmoe.formats import MXFP8, NVFP4, BlockFormat


@dataclass
class Problem:
    """Operands of a grouped matmul, and the same as row-major scales."""

    counts: list[int]
    hidden: np.ndarray
    hidden_scales: np.ndarray  # (M, K/block) row-major
    weight: np.ndarray
    weight_scales: np.ndarray  # (E, N, K/block) row-major
    expert_ids: np.ndarray
    expert_scales: np.ndarray
    a_format: BlockFormat = NVFP4
    b_format: BlockFormat = NVFP4

    @property
    def start(self):
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.uint32)

    @property
    def offsets(self):
        return layouts.scales_offset(self.start)

    @property
    def slot_of_row(self):
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def a_tiles(self, padding=0):
        """Scale tiles of `hidden`, every byte that is not a row's scale set to `padding`."""
        columns = self.hidden_scales.shape[1]
        across = -(-columns // 4)
        count = -(-len(self.hidden) // 128) + min(len(self.counts), len(self.hidden))
        flat = np.full(count * across * 512, padding, np.uint8)
        first = self.start[:-1].astype(int) // 128 + self.offsets
        for row, slot in enumerate(self.slot_of_row):
            r = row - int(self.start[slot])
            c = np.arange(columns)
            tile = (first[slot] + r // 128) * across + c // 4
            flat[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = self.hidden_scales[row]
        return flat.reshape(count, across, 32, 4, 4)

    def b_tiles(self, padding=0):
        """Scale tiles of `weight`, padding as in `a_tiles`."""
        experts, n, columns = self.weight_scales.shape
        down, across = -(-n // 128), -(-columns // 4)
        flat = np.full((experts, down * across * 512), padding, np.uint8)
        r, c = np.indices((n, columns))
        offset = (r // 128 * across + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        flat[:, offset] = self.weight_scales
        return flat.reshape(experts, down, across, 32, 4, 4)

    @property
    def formats(self):
        """Keyword arguments that name the formats."""
        return {"format": self.a_format, "weight_format": self.b_format}

    def arguments(self, padding=0):
        """hidden, weight, a_scales, b_scales, expert_start, a_scale_offsets, expert_ids."""
        tiles = self.a_tiles(padding), self.b_tiles(padding)
        return self.hidden, self.weight, *tiles, self.start, self.offsets, self.expert_ids


def make_problem(counts, n, k, *, expert_ids=None, seed=0, wild_scales=False, pair=(NVFP4, NVFP4)):
    """Codes uniform over all but NaN; scales near 1, or over all but NaN."""
    rng = np.random.default_rng(seed)
    ids = np.arange(len(counts)) if expert_ids is None else np.asarray(expert_ids)
    experts = max([0, *ids]) + 1
    a_format, b_format = pair

    def codes(fmt, *shape):
        values = rng.integers(0, 256, (*shape, k // fmt.per_byte)).astype(np.uint8)
        return np.where(values & 0x7F == 0x7F, 0x7E, values) if fmt is MXFP8 else values

    def scales(fmt, *shape):
        low, high = (0x28, 0x48) if fmt is NVFP4 else (0x7B, 0x83)
        if wild_scales:
            # Of the product of two, an exponent of 90 keeps float64 exact for the checks.
            low, high = (0, 0x7F) if fmt is NVFP4 else (0x7F - 45, 0x7F + 45)
        return rng.integers(low, high, (*shape, k // fmt.block)).astype(np.uint8)

    return Problem(
        counts=list(counts),
        hidden=codes(a_format, sum(counts)),
        hidden_scales=scales(a_format, sum(counts)),
        weight=codes(b_format, experts, n),
        weight_scales=scales(b_format, experts, n),
        expert_ids=ids.astype(np.int32),
        expert_scales=rng.uniform(0.01, 0.1, experts).astype(np.float32),
        a_format=a_format,
        b_format=b_format,
    )


@pytest.fixture(name="make_problem")
def _make_problem():
    return make_problem
