"""Which tile shape Hopper's FP8 matmul runs with: a pure function of the problem's metadata.

A choice changes speed, never bytes. `NBMOE_PRINT_CONFIGS=1` prints it with what speaks against the
other shapes. A tile is some units of 64 weight rows times a segment of a slot's rows.

Few rows an expert: time is that of the weights' bytes, so blocks are small, many and deep in
copies. Many: the tensor core is the limit, and padding and the number of segments decide. Measured
on an H200, gate/up + down, in microseconds, with the shapes' names below and scales of 128-blocks:

    rows a slot                           _DEEP          _DECODE
    DeepSeek EP8, 1 token                 19.3 + 12.2    22.9 + 12.8
    Qwen3-30B, 1 token                    15.6 + 11.7    15.5 + 11.4
    gpt-oss-20b, 1 token                  29.1 + 18.6    28.1 + 18.7
    DeepSeek EP8, 128 tokens             214.5 + 113.6  205.4 + 114.3
                                          _MANY          112 to 144     96 to 160
    128 (DeepSeek EP8, 4096 tokens)      285.0 + 159.6  300.6 + 168.3  290.6 + 160.0
    256 (Qwen3-30B, 4096 tokens)         237.1 + 147.4  241.7 + 147.5  240.9 + 149.4
    512 (gpt-oss-20b, 4096 tokens)       573.8 + 297.5  574.5 + 299.8  584.2 + 304.6

    MXFP4 weights                         _DECODE        16 tokens      2 blocks an SM
    DeepSeek EP8, 1 token                 21.5 + 12.0    21.3 + 12.0    21.6 + 12.5
    Qwen3-30B, 16 tokens                  48.5 + 30.9    50.0 + 31.4    50.5 + 32.2
    gpt-oss-20b, 128 tokens               90.6 + 55.2   119.5 + 65.0   105.6 + 62.4
"""

import functools
from dataclasses import replace

from nbmoe_kernels.config_report import report_choice
from nbmoe_kernels.heuristics_sm90 import padded_rows
from nbmoe_kernels.hopper_limits import (
    BLOCK_SHARED_BYTES,
    RESERVED_SHARED_BYTES,
    SM_SHARED_BYTES,
)
from nbmoe_kernels.matmul_fp8_sm90_config import SMS, Fp8HopperConfig

MAX_SLOTS = 1024

_TWO = (56, 224)
"""Registers by reallocation: the scaler needs more than 40."""

_DEEP = Fp8HopperConfig((8, 16, 32), 1, 8, 2, None)
_DECODE = Fp8HopperConfig((8, 16, 32), 1, 4, 4, None)
_SOME = Fp8HopperConfig((64, 96, 112, 128, 144), 2, 6, 1, _TWO)
_MANY = Fp8HopperConfig((120, 128, 136, 144, 152), 2, 5, 1, _TWO)

# Left out, and why:
# * 168 tokens: 288.0 + 161.9, 246.7 + 153.7 and 592.5 + 307.6 us at 128, 256 and 512 rows.
# * 176 tokens and more: two sets of 88 registers and the scales of 44 tokens spill.
# * three warpgroups: 561 + 302 us at 512 rows with the scales' products for nothing, but two
#   128-blocks of weights, and so two sets of products, would meet in a tile.
# * 8 and 16 tokens alone, with five stages: together at most 2 % faster than _DECODE (Qwen3-30B, 1
#   token), and 163 + 89 us against 140 + 79 at gpt-oss-20b's 128 tokens, 16 rows a slot.
# * one block of an SM with 20 stages: 19.9 + 13.9 us at 1 token of DeepSeek, no faster elsewhere.
# * two sets of sums, one scaled while the tensor core makes the other, or the tokens in two halves
#   that take turns: the warpgroups disturb each other, 30 % slower.
# * one warpgroup of 64 rows with wide tiles: nobody multiplies while it adds up its sums.

_DECODE_ROWS = 32
"""Rows of a slot on average, up to which the weights' bytes are the cost."""
_MANY_ROWS = 384
"""Padding is reckoned up to here: more rows are cut into more tiles."""
_FEW_TILES = 2 * SMS
"""Up to here four blocks of an SM would not all have tiles: two with deeper rings are as many."""


def fp8_hopper_configs() -> tuple[Fp8HopperConfig, ...]:
    """Every tile shape that is ever chosen for e4m3 weights, with the smallest table."""
    return (_DEEP, _DECODE, _SOME, _MANY)


def fits(config: Fp8HopperConfig) -> bool:
    """Whether the blocks of an SM have the shared memory that they need."""
    together = config.blocks_per_sm * (config.shared_bytes + RESERVED_SHARED_BYTES)
    return together <= SM_SHARED_BYTES and config.shared_bytes <= BLOCK_SHARED_BYTES


@functools.lru_cache(maxsize=4096)
def fp8_hopper_config(
    n: int,
    k: int,
    num_active: int,
    estimated_total_m: int | None,
    b_format: str = "e4m3",
) -> Fp8HopperConfig:
    """The tile shape for a problem.

    Args:
        n: weight rows of an expert.
        k: columns.
        num_active: expert slots.
        estimated_total_m: expected rows of all slots, a hint; None counts as many.
        b_format: kind of the weights, "e4m3" or "mxfp4".
    """
    slots, rows = max(num_active, 1), _MANY_ROWS
    if estimated_total_m is not None:
        # Of few rows many slots have none: those that have some count.
        slots = max(min(slots, estimated_total_m), 1)
        rows = -(-estimated_total_m // slots)
    tiles = slots * -(-n // 64)
    objections = {c: _objection(c, rows, tiles, k, b_format) for c in fp8_hopper_configs()}
    shape = next(c for c, reason in objections.items() if not reason)
    chosen = _made_for(shape, num_active, b_format)
    total = "unknown" if estimated_total_m is None else str(estimated_total_m)
    report_choice(
        f"Hopper FP8 matmul e4m3 x {b_format}, n {n}, k {k}, {num_active} slots, rows {total}"
        f" ({rows} a busy slot)",
        f"{chosen.name} (first without an objection)",
        [
            (_made_for(other, num_active, b_format).name, reason)
            for other, reason in objections.items()
            if other != shape
        ],
    )
    return chosen


def _objection(config: Fp8HopperConfig, rows: int, tiles: int, k: int, b_format: str) -> str:
    """Why another shape is faster for ``tiles`` of 64 weight rows and slots of so many rows."""
    is_folded = b_format == "mxfp4"
    if config in (_DEEP, _DECODE):
        if rows > _DECODE_ROWS:
            return f"{rows} rows are several of its tiles"
        if config == _DEEP and is_folded:
            return "with mxfp4 weights it is as fast at best"
        if config == _DEEP and tiles > _FEW_TILES:
            return f"{tiles} tiles keep more blocks of an SM busy"
        if config == _DEEP and config.stages * 128 > k:
            return f"its ring is longer than K = {k}"
        return ""
    if rows <= _DECODE_ROWS:
        return f"its tiles are mostly padding at {rows} rows"
    # The measured order at 128, 256 and 512 rows is that of the expected padding.
    costs = {c: padded_rows(c.widths, min(rows, _MANY_ROWS)) for c in (_SOME, _MANY)}
    best = min(costs, key=costs.__getitem__)
    if config != best:
        more = 100 * (costs[config] / costs[best] - 1)
        return f"it has {more:.0f} % more padding than other widths at {rows} rows"
    return ""


def _made_for(config: Fp8HopperConfig, num_active: int, b_format: str) -> Fp8HopperConfig:
    """The shape for a kind of weights, with a table for the slots."""
    if b_format == "mxfp4":
        # Stages of two blocks, half as many, and as long a ring again as half the bytes leave room.
        config = replace(config, b_format=b_format, stages=config.stages // 2 + 1)
    if num_active > config.max_slots:
        # The warp that makes a large table holds 32 slots a lane: too many registers for 4 blocks.
        blocks = min(config.blocks_per_sm, 2)
        stages = config.stages * config.blocks_per_sm // blocks
        config = replace(config, max_slots=MAX_SLOTS, blocks_per_sm=blocks, stages=stages)
    while not fits(config):
        config = replace(config, stages=config.stages - 1)
    return config
