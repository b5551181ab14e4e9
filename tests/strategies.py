"""Hypothesis strategies: shapes and kinds are drawn, bulk data comes from a drawn seed.

So examples shrink to small shapes, and every failure is reproduced by its printed example.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from nbmoe import layouts
from nbmoe.backend import simulator_enabled
from nbmoe.formats import MXFP8, NVFP4, BlockFormat

TOKENS = (0, 1, 2, 16, 17, 127, 128, 129)
"""Around the edges of fragments (16) and scale tiles (128)."""

COUNTS = (0, 0, 1, 2, 15, 17, 33, 127, 128, 129)
"""Rows of a slot; empty ones twice as often."""

WIDTHS = (16, 48, 64, 80, 112, 144, 176)
"""Multiples of 16, few of them of 64; 176 is 704 / 4."""

MX_WIDTHS = (32, 96, 128, 160, 288)
"""Multiples of 32, few of them of 64 or 128."""

MANY = 17 if simulator_enabled() else 129
"""Rows of a large slot: one more than a scale tile, or than a fragment where Python interprets."""

MOST = 40 if simulator_enabled() else 300
"""Rows of all slots of a drawn problem, where a test multiplies them."""

VALUES = ("gauss", "ties", "zeros", "heavy", "nan rows", "tiny", "infinite")
ROUTINGS = ("uniform", "one expert", "zipf", "empty tail", "masked", "all masked")

seeds = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class Slots:
    """Who owns which rows: `counts[s]` rows for expert `expert_ids[s]` of `num_experts`."""

    counts: tuple[int, ...]
    expert_ids: tuple[int, ...]
    num_experts: int
    spare_rows: int

    @property
    def starts(self) -> NDArray[np.uint32]:
        """(S + 1,) row offsets."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.uint32)

    @property
    def offsets(self) -> NDArray[np.uint32]:
        """(S,) scale offsets."""
        return layouts.scales_offset(self.starts)

    @property
    def ids(self) -> NDArray[np.int32]:
        """(S,) expert ids."""
        return np.array(self.expert_ids, np.int32)

    @property
    def rows(self) -> int:
        """Rows to allocate, some of which no slot owns."""
        return sum(self.counts) + self.spare_rows

    @property
    def tiles(self) -> int:
        """Scale tiles to allocate."""
        return layouts.activation_tiles(self.rows, len(self.counts))

    def tile_of(self, slot: int) -> int:
        """First scale tile of a slot."""
        return int(layouts.tile_starts(self.starts, self.offsets)[slot])

    def rows_of(self, slot: int) -> slice:
        """Rows of a slot."""
        return slice(int(self.starts[slot]), int(self.starts[slot + 1]))


@st.composite
def slots(draw: st.DrawFn, max_slots: int = 4, max_rows: int = 300) -> Slots:
    """Slots with empty, partial and exactly full scale tiles, masked ones, ids in any order."""
    counts: list[int] = []
    for _ in range(draw(st.integers(1, max_slots))):
        room = max_rows - sum(counts)
        counts.append(draw(st.sampled_from([c for c in COUNTS if c <= room])))
    num_experts = draw(st.integers(len(counts), len(counts) + 2))
    ids = draw(st.permutations(range(num_experts)))[: len(counts)]
    masked = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    mask_any = draw(st.booleans())
    expert_ids = [-1 if mask_any and m else i for i, m in zip(ids, masked, strict=True)]
    return Slots(
        tuple(counts), tuple(expert_ids), num_experts, draw(st.sampled_from((0, 0, 1, 130)))
    )


def activations(rng: np.random.Generator, rows: int, columns: int, kind: str) -> NDArray[Any]:
    """bfloat16 rows of a kind of values.

    Args:
        rng: Source of the data.
        rows: Rows.
        columns: Columns, a multiple of 16.
        kind: One of `VALUES`. "ties" puts every element on or next to a rounding boundary of e2m1
            at a power-of-two scale; "nan rows" has NaN, of either sign, in some rows.
    """
    x = rng.standard_normal((rows, columns), dtype=np.float32)
    if kind == "ties":
        boundaries = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 0, 0.5, 3])
        step = rng.choice(np.float32([1, 1, 1, 1 - 2**-7, 1 + 2**-7]), x.shape)
        x = rng.choice(boundaries, x.shape) * step * np.sign(x)
        x[:, ::16] = 6
        x *= np.float32(2) ** rng.integers(-8, 8, (rows, 1)).astype(np.float32)
    elif kind == "zeros":
        x[:, rng.random(columns) < 0.8] = 0
        x[rng.random(rows) < 0.3] = -0.0
    elif kind == "heavy":
        x = x**5 * np.float32(100)
    elif kind == "tiny":
        x *= np.float32(2.0) ** rng.integers(-140, -60, x.shape).astype(np.float32)
    elif kind == "infinite":
        x[rng.random(x.shape) < 0.01] = np.inf
        x[rng.random(x.shape) < 0.01] = -np.inf
    elif kind == "nan rows":
        hit = (rng.random((rows, 1)) < 0.3) & (rng.random(x.shape) < 0.1)
        x[hit] = np.nan
        x[hit & (rng.random(x.shape) < 0.5)] *= -1
    return x.astype(ml_dtypes.bfloat16)


def expert_choice(
    rng: np.random.Generator, tokens: int, top_k: int, experts: int, kind: str
) -> NDArray[np.int32]:
    """(T, k) different expert ids a token.

    Args:
        rng: Source of the data.
        tokens: T.
        top_k: k <= experts.
        experts: E.
        kind: One of `ROUTINGS`.
    """
    weights = np.ones(experts)
    if kind == "zipf":
        weights = 1 / np.arange(1, experts + 1) ** 1.5
    elif kind == "one expert":
        weights = np.full(experts, 1e-9)
        weights[rng.integers(experts)] = 1
    elif kind == "empty tail":
        weights[max(top_k, experts // 2) :] = 0
    gumbel = rng.gumbel(size=(tokens, experts)) + np.log(np.maximum(weights, 1e-300))
    ids = np.argsort(-gumbel, axis=1)[:, :top_k].astype(np.int32)
    if kind == "masked":
        ids[rng.random(ids.shape) < 0.3] = -1
    elif kind == "all masked":
        ids[:] = -1
    return ids


def scale_bytes(
    rng: np.random.Generator, shape: tuple[int, ...], fmt: BlockFormat = NVFP4
) -> NDArray[np.uint8]:
    """Block scales: mostly near 1, some the smallest or the largest that are no NaN.

    Of e8m0 the far ends stay out: products of two of them overflow, and tests of those want them
    on purpose.
    """
    low, high, ends = 0x28, 0x48, [0x00, 0x01, 0x07, 0x08, 0x7E]
    if fmt is not NVFP4:
        low, high, ends = 0x7B, 0x83, [0x7F - 50, 0x7F - 20, 0x7F + 20]
    usual = rng.integers(low, high, shape, dtype=np.uint8)
    return np.where(rng.random(shape) < 0.05, rng.choice(np.uint8(ends), shape), usual)


def factors(rng: np.random.Generator, count: int) -> NDArray[np.float32]:
    """Positive float32 factors: mostly ordinary, some whose inverse or product leaves the range."""
    usual = np.float32(2) ** rng.uniform(-6, 12, count).astype(np.float32)
    odd = rng.choice(np.float32([1e-45, 1e-39, 1e-30, 1e30, 3.4e38]), count)
    return np.where(rng.random(count) < 0.15, odd, usual)


def codes(
    rng: np.random.Generator, shape: tuple[int, ...], fmt: BlockFormat = NVFP4
) -> NDArray[np.uint8]:
    """Bytes of codes, every code equally likely; for MXFP8 the largest takes the place of NaN."""
    values = rng.integers(0, 256, shape, dtype=np.uint8)
    return np.where(values & 0x7F == 0x7F, values - np.uint8(1), values) if fmt is MXFP8 else values
