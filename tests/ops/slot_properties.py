"""Promises of every operation that quantizes rows in slots: P3, P5, P6, P7 and P8."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbmoe import layouts
from nbmoe.backend import simulator_enabled
from tests.ops.compare import POISONS, Shapes, as_bytes, assert_same, poisoned
from tests.strategies import Slots, slots

Results = tuple[NDArray[Any], ...]
ALL = slice(None)

SIMULATED = simulator_enabled()
EDGES = Slots((2, 0, 1), (2, 3, -1), 4, 1)
"""A few rows, none, masked ones and rows of nobody, more of all where nobody interprets them."""

if not SIMULATED:
    EDGES = Slots((129, 0, 3, 1), (2, 3, -1, 0), 5, 130)

WIDE = 32 if SIMULATED else 160
"""Columns, where nobody interprets them more than two tiles of blocks of 16."""

groups = slots(2, 4) if SIMULATED else slots(max_rows=300)

SPOILS = np.float32([np.nan, -np.nan, np.inf, -np.inf, 3e38])
"""What neighbours must not notice."""


@dataclass(frozen=True)
class Quantizer:
    """An operation with all arguments but its rows.

    Its results are codes by row, scale tiles, and perhaps more by row.

    Attributes:
        run: `(x, slots, which, **kwargs) -> results`; `which` slots of the problem these are.
        shapes: Shapes of the results for x and slots.
        blocks: Scale columns that hold scales; the rest of the tiles' columns are padding.
    """

    run: Callable[..., Results]
    shapes: Callable[[int, Slots], Shapes]
    blocks: int

    def into(self, byte: int, x: NDArray[Any], slots: Slots) -> Results:
        """Results in buffers that held `byte`, with one scale tile more than needed."""
        shapes = list(self.shapes(len(x), slots))
        (tiles, *rest), dtype = shapes[1]
        shapes[1] = ((tiles + 1, *rest), dtype)
        return self.run(x, slots, ALL, out=poisoned(tuple(shapes), byte))


def spoil(rng: np.random.Generator, x: NDArray[Any], rows: Any) -> NDArray[Any]:
    """A copy whose `rows` hold NaN, infinity or the largest numbers, one kind a row."""
    x = x.copy()
    x[rows] = rng.choice(SPOILS, (len(x[rows]), 1)).astype(x.dtype)
    return x


def plain_scales(tiles: NDArray[Any]) -> NDArray[np.uint8]:
    """Scale bytes by row, those of padding columns too."""
    return layouts.deinterleave_scales(tiles.view(np.uint8), 128 * len(tiles), 4 * tiles.shape[1])


def by_row(results: Results) -> Results:
    """All results but the scale tiles."""
    return results[:1] + results[2:]


def tiles_of(slots: Slots, slot: int) -> NDArray[np.int64]:
    """The scale tiles of a slot."""
    count = layouts.ceil_div(slots.counts[slot], layouts.TILE_ROWS)
    return slots.tile_of(slot) + np.arange(count)


def check_rows_alone(
    quantizer: Quantizer, x: NDArray[Any], slots: Slots, rng: np.random.Generator
) -> None:
    """P3: a row of each slot alone gives its bytes in the batch, whatever its neighbours hold."""
    chosen = {
        slot: int(rng.integers(slots.starts[slot], slots.starts[slot + 1]))
        for slot, count in enumerate(slots.counts)
        if count and slots.expert_ids[slot] >= 0
    }
    others = np.delete(np.arange(len(x)), list(chosen.values()))
    batches = [quantizer.run(rows, slots, ALL) for rows in (x, spoil(rng, x, others))]
    for slot, at in chosen.items():
        one = Slots((1,), (slots.expert_ids[slot],), slots.num_experts, 0)
        alone = quantizer.run(x[at : at + 1], one, slice(slot, slot + 1))
        place = 128 * slots.tile_of(slot) + at - int(slots.starts[slot])
        for batch in batches:
            for got, want in zip(by_row(batch), by_row(alone), strict=True):
                assert_same(got[at], want[0], f"row {at}")
            assert_same(plain_scales(batch[1])[place], plain_scales(alone[1])[0], "scales")


def check_isolation(
    quantizer: Quantizer, x: NDArray[Any], slots: Slots, rng: np.random.Generator
) -> None:
    """P6: other rows of a slot, NaN too, change its bytes only; of a masked slot none."""
    before = quantizer.into(POISONS[0], x, slots)
    for victim, count in enumerate(slots.counts):
        if not count:
            continue
        own, tiles = slots.rows_of(victim), tiles_of(slots, victim)
        after = quantizer.into(POISONS[0], spoil(rng, x, own), slots)
        for got, want in zip(by_row(after), by_row(before), strict=True):
            rest = np.delete(got, own, axis=0), np.delete(want, own, axis=0)
            assert_same(*rest, "rows of others")
        rest = np.delete(after[1], tiles, axis=0), np.delete(before[1], tiles, axis=0)
        assert_same(*rest, "tiles of others")
        is_active = slots.expert_ids[victim] >= 0
        changed = as_bytes(after[0][own]) != as_bytes(before[0][own])
        assert changed.any() == is_active, "bytes of its own"
        padding = [plain_scales(r[1][tiles])[count:] for r in (after, before)]
        assert_same(*padding, "padding of its own")


def check_writes(
    quantizer: Quantizer, x: NDArray[Any], slots: Slots, rng: np.random.Generator
) -> None:
    """P5, P7, P8: all bytes of slots are written, none outside; padding and masked slots are 0.

    What buffers held, and what rows of no slot hold, changes no byte.
    """
    used = int(slots.starts[-1])
    noisy = spoil(rng, x, slice(used, None))
    first = quantizer.into(POISONS[0], x, slots)
    second = quantizer.into(POISONS[1], noisy, slots)
    owned = np.zeros(len(first[1]), bool)
    rows = np.zeros(128 * len(owned), bool)
    masked = np.zeros(used, bool)
    for slot, count in enumerate(slots.counts):
        owned[tiles_of(slots, slot)] = True
        is_active = slots.expert_ids[slot] >= 0
        rows[128 * slots.tile_of(slot) :][:count] = is_active
        masked[slots.rows_of(slot)] = not is_active
    for results, byte in ((first, POISONS[0]), (second, POISONS[1])):
        for result in by_row(results):
            assert (as_bytes(result[used:]) == byte).all(), "rows of no slot"
            assert not as_bytes(result[:used][masked]).any(), "rows of masked slots"
        assert (as_bytes(results[1][~owned]) == byte).all(), "tiles of no slot"
        scales = plain_scales(results[1])
        assert not scales[np.repeat(owned, 128) & ~rows].any(), "rows of padding"
        assert not scales[np.repeat(owned, 128), quantizer.blocks :].any(), "columns of padding"
    for got, want in zip(by_row(second), by_row(first), strict=True):
        assert_same(got[:used], want[:used], "rows")
    assert_same(second[1][owned], first[1][owned], "scales")


def check_masked(
    quantizer: Quantizer, x: NDArray[Any], all_masked: bool, rng: np.random.Generator
) -> None:
    """P8: rows of masked slots may be NaN, and the others do not notice them or empty slots.

    Args:
        quantizer: The operation, with four experts and slots if it has factors.
        x: Six rows.
        all_masked: Whether no slot has an expert.
        rng: Source of noise.
    """
    ids = (-1, -1, -1, -1) if all_masked else (-1, 1, 3, -1)
    slots = Slots((2, 0, 3, 0), ids, 4, 1)
    x = x.copy()
    x[:2] = np.nan
    check_writes(quantizer, x, slots, rng)
    if not all_masked:
        alone = quantizer.run(x[2:5], Slots((3,), (3,), 4, 0), slice(2, 3))
        together = quantizer.run(x, slots, ALL)
        for got, want in zip(by_row(together), by_row(alone), strict=True):
            assert_same(got[2:5], want, "rows")
        assert_same(together[1][1], alone[1][0], "scales")
