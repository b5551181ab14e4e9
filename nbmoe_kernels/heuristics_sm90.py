"""Which tile shape a Hopper matmul runs with: pure functions of the problem's host metadata.

A choice changes speed, never bytes. The measured table decides where it has a problem like the one
asked for; elsewhere the first candidate that nothing speaks against. The reasons against a
candidate are worded here, once, and `NBMOE_PRINT_CONFIGS=1` prints them.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nbmoe_kernels import hopper_table
from nbmoe_kernels.config_report import report_choice
from nbmoe_kernels.hopper_limits import cannot_run, lacks_memory
from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig

HOPPER_PAIRS = (
    ("nvfp4", "nvfp4"),
    ("mxfp4", "mxfp4"),
    ("mxfp8", "mxfp8"),
    ("mxfp8", "mxfp4"),
    ("bf16", "bf16"),
    ("bf16", "mxfp4"),
)
"""Kinds of (tokens, weights) of prepared operands that are multiplied."""

SLOT_LIMITS = (128, 256, 1024)
"""Sizes of the schedule's table that kernels are made for."""

_DECODE, _FEW, _SOME, _MIDDLE = (8,), (8, 16), (16, 32), (16, 32, 64)
_PREFILL = (
    (48, 56, 64, 72, 80),
    (80, 88, 96, 104, 112),
    (112, 120, 128, 136, 144),
    (128, 136, 144, 152, 160),
)
# Five widths in steps of 8 keep nearly all segments of a slot unpadded. These sets are within
# 2 % of the best set of their kind for every mean from 48 rows on; more sets would be more kernels
# to compile.
_WIDEST = (112, 120, 128, 136, 144)
_PREFILL_ROWS = 64
"""Above this mean the tensor cores are the limit, below it the weights' bytes are."""
_EVEN_ROWS = 512
"""From this mean on slots have so many segments that only half an eight of each is padding."""
_EIGHT = 8
_DECODE_COST = 8
"""Tokens of products that take as long as decoding a segment's weights."""

# warpgroups, 64-blocks of a stage, stages at most, blocks an SM, registers; the best first.
_Shape = tuple[int, int, int, int, tuple[int, int] | None]
_SHAPES: dict[tuple[int, ...], tuple[_Shape, ...]] = {
    # Bytes of weights are everything: many small blocks keep most loads in flight. Two and four
    # blocks of K a stage are within a few percent; the short stage fits wide formats.
    **{
        widths: (
            (1, 4, 3, 4, None),
            (1, 4, 4, 3, None),
            (2, 4, 3, 2, None),
            (1, 2, 5, 4, None),
            (2, 2, 5, 2, None),
        )
        for widths in (_DECODE, _FEW)
    },
    # Tokens take as much of a stage as weights; two warpgroups share them.
    _SOME: (
        (2, 4, 3, 2, None),
        (1, 2, 4, 4, None),
        (2, 2, 6, 2, None),
        (1, 4, 3, 3, None),
    ),
    # Registers allow three warpgroups on an SM, in blocks of one, or two with the producer's.
    _MIDDLE: (
        (1, 2, 4, 3, None),
        (2, 4, 4, 1, (40, 232)),
        (2, 2, 4, 2, None),
        (1, 2, 6, 2, None),
    ),
    # One block whose consumers have the producer's registers: 72 accumulators and two sets of A.
    **{
        widths: ((2, 2, 5, 1, (40, 232)), (2, 4, 2, 1, (40, 232)), (2, 2, 2, 2, None))
        for widths in _PREFILL
    },
}

# Shapes whose warps multiply by themselves, and the most rows that they are for. On an H200, us of
# DeepSeek-V3's gate/up: 17.5 against 19.3 at 1 row a busy slot, 75.2 against 76.6 at 1.2 and 144.3
# against 145.9 at 4; of Qwen3-30B's 12.0 against 12.9 at 1, and 79.1 against 76.2 at 8.
_BY_WARPS: dict[tuple[int, ...], tuple[_Shape, ...]] = {
    _DECODE: ((1, 4, 4, 4, None), (1, 8, 2, 4, None)),
    _FEW: ((1, 4, 3, 4, None),),
}
_BY_WARPS_ROWS = 4
_FEW_TILES = 2 * 132
"""Of an SM's warps so few have work that a tile's own time counts, not how many instructions all
take. MXFP4 by warps and by wgmma, gate/up + down, us on an H200: Qwen3-30B, 192 and 256 tiles, 18.2
and 19.6; DeepSeek-V3 EP8, 64 and 112, 25.2 and 30.5; gpt-oss-20b, 360 and 180 with K = 2,880, 36.4
and 30.5, gate/up by wgmma and down by warps 37.1; with more tiles 74.1 and 72.2, 115.8 and 114.8,
211 and 197."""


@dataclass(frozen=True)
class Candidate:
    """A tile shape, and what speaks against it for a problem; empty if nothing does."""

    config: HopperMatmulConfig
    rejected: str = ""


def hopper_matmul_candidates(
    a_format: str,
    b_format: str,
    n: int,
    k: int,
    num_active: int,
    estimated_total_m: int | None,
) -> tuple[Candidate, ...]:
    """Every tile shape that is considered for a problem, the preferred ones first.

    Args:
        a_format: kind of the tokens.
        b_format: kind of the weights.
        n: weight rows of an expert.
        k: columns.
        num_active: expert slots.
        estimated_total_m: expected rows of all slots, a hint; None counts as many.
    """
    rows = rows_per_busy_slot(num_active, estimated_total_m)
    slots = max(num_active, 1)
    tiles = -(-n // 64) * (slots if estimated_total_m is None else min(slots, estimated_total_m))
    found = []
    for widths in _preferred_widths(rows):
        for config in _configs(a_format, b_format, widths, num_active):
            reason = cannot_run(config, num_active) or _is_slower(config, rows, tiles, k)
            found.append(Candidate(config, reason))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def hopper_matmul_config(
    a_format: str,
    b_format: str,
    n: int,
    k: int,
    num_active: int,
    estimated_total_m: int | None,
) -> HopperMatmulConfig:
    """The tile shape for a problem; arguments as of `hopper_matmul_candidates`.

    Raises:
        ValueError: no kernel can run the problem; the message has the reasons.
    """
    candidates = hopper_matmul_candidates(a_format, b_format, n, k, num_active, estimated_total_m)
    rows = rows_per_busy_slot(num_active, estimated_total_m)
    chosen = _measured(a_format, b_format, n, k, num_active, rows)
    why = "measured"
    if chosen is None:
        why = "first without an objection"
        chosen = next((c.config for c in candidates if not c.rejected), None)
    if chosen is None:
        # Nothing suits; slow is better than nothing.
        why = "all are slow"
        runs = (c.config for c in candidates if not cannot_run(c.config, num_active))
        chosen = next(runs, None)
    if chosen is None:
        reasons = "; ".join(sorted({c.rejected for c in candidates}))
        raise ValueError(f"no Hopper kernel for {a_format} x {b_format}: {reasons}")
    total = "unknown" if estimated_total_m is None else str(estimated_total_m)
    report_choice(
        f"Hopper matmul {a_format} x {b_format}, n {n}, k {k}, {num_active} slots, rows {total}"
        f" ({rows} a busy slot)",
        f"{chosen.name} ({why})",
        [(c.config.name, c.rejected) for c in candidates if c.config != chosen],
    )
    return chosen


def rows_per_busy_slot(num_active: int, estimated_total_m: int | None) -> int:
    """Expected rows of a slot that has any, rounded; many where the total is unknown.

    Rows that fall on slots at random leave some of them empty.
    """
    if estimated_total_m is None:
        return _EVEN_ROWS
    slots = max(num_active, 1)
    busy = slots * (1 - (1 - 1 / slots) ** estimated_total_m) if slots > 1 else 1.0
    return max(round(estimated_total_m / max(busy, 1.0)), 1)


_FUSED_ROWS = 32
"""Fused on an H200, Qwen3-30B, us, against a matmul and an activation: 14.6 and 13.5 + 6.9 at one
row a busy slot, 47.5 and 45.2 + 7.3 at 2, 73.7 and 69.7 + 10.5 at 8, 359.6 and 282.0 + 58.3 at 256.
"""


def fusing_pays(num_active: int, total_rows: int) -> bool:
    """Whether the matmul that also activates and quantizes is faster than two kernels."""
    return rows_per_busy_slot(num_active, total_rows) <= _FUSED_ROWS


def _slots(num_active: int) -> int:
    """The size of the table that holds so many slots."""
    return next((n for n in SLOT_LIMITS if num_active <= n), SLOT_LIMITS[-1])


def _preferred_widths(rows: int) -> tuple[tuple[int, ...], ...]:
    """All sets of widths, the ones for so many rows first."""
    by_padding = sorted(_PREFILL, key=lambda widths: padded_rows(widths, rows))
    if rows <= 3:
        order = [_DECODE, _FEW, _SOME, _MIDDLE, *by_padding]
    elif rows <= 10:
        # Routing makes a mean of 8 rows many slots of 9 to 16.
        order = [_FEW, _DECODE, _SOME, _MIDDLE, *by_padding]
    elif rows <= 24:
        # Nearly every slot is one segment of 16 or 32: its weights are decoded once.
        order = [_SOME, _FEW, _MIDDLE, _DECODE, *by_padding]
    elif rows <= _PREFILL_ROWS:
        order = [_MIDDLE, _SOME, *by_padding, _FEW, _DECODE]
    else:
        order = [*by_padding, _MIDDLE, _SOME, _FEW, _DECODE]
    return tuple(order)


def _configs(
    a_format: str, b_format: str, widths: tuple[int, ...], num_active: int
) -> Iterator[HopperMatmulConfig]:
    """The shapes of a set of widths, with as many of their stages as fit."""
    by_warps = [(shape, True) for shape in _BY_WARPS.get(widths, ())]
    for shape, warp_products in by_warps + [(shape, False) for shape in _SHAPES[widths]]:
        warpgroups, stage_blocks, most_stages, blocks, registers = shape
        deepest = HopperMatmulConfig(
            a_format,
            b_format,
            widths,
            warpgroups,
            stage_blocks,
            most_stages,
            blocks,
            registers,
            _slots(num_active),
            warp_products=warp_products,
        )
        depths = (replace(deepest, stages=n) for n in range(most_stages, 1, -1))
        yield next((c for c in depths if not lacks_memory(c)), replace(deepest, stages=2))


def _is_slower(config: HopperMatmulConfig, rows: int, tiles: int, k: int) -> str:
    """Why a config that runs is not worth its time for slots of so many rows.

    ``tiles`` of 64 weight rows are there to be multiplied.
    """
    narrowest, widest = config.widths[0], config.max_width
    if narrowest > max(16, 2 * rows):
        # Padding costs shared memory for tokens and products that nobody reads.
        return f"a tile of {narrowest} tokens or more is mostly padding at {rows} rows"
    if config.warp_products and rows > _BY_WARPS_ROWS:
        return f"wgmma multiplies {rows} rows as fast as one"
    if config.warp_products and config.b_format == "mxfp4":
        if tiles > _FEW_TILES:
            return f"wgmma's decoding of mxfp4 is shorter, which counts with {tiles} tiles"
        if k % (64 * config.stage_blocks):
            return f"K = {k} ends within a stage, after which warps begin anew"
    segments = -(-rows // widest)
    if segments > 3 and widest < _WIDEST[-1]:
        # Each segment reads and decodes the expert's weights again.
        return f"it decodes an expert's weights {segments} times at {rows} rows"
    if rows > _PREFILL_ROWS and config.widths in _PREFILL:
        best = min(padded_rows(widths, rows) for widths in _PREFILL)
        more = padded_rows(config.widths, rows) / best - 1
        if more > 0.03:
            return f"it has {100 * more:.0f} % more padding than other widths at {rows} rows"
    if config.stage_blocks > 2 and 64 * config.stage_blocks > k:
        return f"a stage of {64 * config.stage_blocks} columns is longer than K"
    return ""


@functools.cache
def padded_rows(widths: tuple[int, ...], rows: int) -> float:
    """Expected cost of a slot's tiles, in tokens, where slots have ``rows`` on average.

    Rows are dealt to equal segments, in eights, as the kernel does; routing spreads them as a
    Poisson distribution does. A segment's decoding is `_DECODE_COST` tokens.
    """
    if rows >= _EVEN_ROWS:
        return rows * (1 + (_EIGHT / 2 + _DECODE_COST) / widths[-1])
    spread = 5 * math.isqrt(rows) + 5
    total = 0.0
    for found in range(max(1, rows - spread), rows + spread):
        chance = math.exp(found * math.log(rows) - rows - math.lgamma(found + 1))
        segments = -(-found // widths[-1])
        share, rest = divmod(-(-found // 8), segments)
        for eights, count in ((share + 1, rest), (share, segments - rest)):
            width = next(w for w in widths if w >= 8 * eights) if count else 0
            total += chance * count * (width + _DECODE_COST)
    return total


def _measured(
    a_format: str, b_format: str, n: int, k: int, num_active: int, rows: int
) -> HopperMatmulConfig | None:
    """The fastest config of the measured problem most like this one, if it can run this one.

    A larger table of slots may take the room of a stage.
    """
    shape = hopper_table.lookup(a_format, b_format, n, k, num_active, rows)
    if shape is None:
        return None
    config = shape.config(a_format, b_format, _slots(num_active))
    depths = (replace(config, stages=n) for n in range(config.stages, 1, -1))
    return next((c for c in depths if not cannot_run(c, num_active)), None)
