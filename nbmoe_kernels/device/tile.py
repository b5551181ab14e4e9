"""Ops on a thread's whole share of a tile of accumulators: one op instead of a loop over registers.

They say the same as the loop; an interpreted engine runs them hundreds of times faster.
"""

import numpy as np

from nbmoe_kernels.device.convert import bf16_of_f32
from nbmoe_kernels.device.effects import writes
from nbmoe_kernels.device.op import device_op, op_factory


def _footprint(n: int):
    def offsets(operands):
        rows, columns, pitch = (int(operands[name]) for name in ("rows", "columns", "pitch"))
        groups = np.arange(min(n // 8, -(-columns // 8)))
        halves = np.arange(min(2, -(-rows // 8)))
        words = int(operands["out_index"]) + 8 * pitch * halves[:, None] + 4 * groups
        return (4 * words.reshape(-1, 1) + np.arange(4)).ravel()

    return offsets


def _store_text(n: int) -> str:
    lines = [
        "{ .reg .pred p, q, s; .reg .b32 t; .reg .b64 low, high;",
        "mov.b64 low, <out>; mul.wide.u32 high, <pitch>, 32; add.s64 high, high, low;",
        "setp.gt.u32 p, <rows>, 0; setp.gt.u32 q, <rows>, 8;",
    ]
    for group in range(n // 8):
        for first, rows, base in ((4 * group, "p", "low"), (4 * group + 2, "q", "high")):
            lines += [
                f"setp.gt.and.u32 s, <columns>, {8 * group}, {rows};",
                f"cvt.rn.bf16x2.f32 t, <acc[{first + 1}]>, <acc[{first}]>;",
                f"@s st.global.b32 [{base} + {16 * group}], t;",
            ]
    return " ".join([*lines, "}"])


@op_factory
def store_accumulators_bf16(n: int):
    """The op that rounds wgmma's accumulators to bf16 and stores them.

    The op's arguments are ``acc, out, out_index, pitch, rows, columns``: the word (two bf16) at
    ``out_index`` belongs to the lane's first row and first two columns; ``pitch`` is the words of
    an output row. What lies ``rows`` or more rows, or ``columns`` or more columns, from that place
    is left out.

    Args:
        n: columns of the tile, a multiple of 8 up to 256.
    """
    if n % 8 or not 8 <= n <= 256:
        raise ValueError(f"store_accumulators_bf16: n: expected a multiple of 8 in 8..256, got {n}")

    @device_op(
        f"void(f32[{n // 2}] acc, global u32* out, u32 pitch, u32 rows, u32 columns)",
        ptx=_store_text(n),
        effects=(writes("out", footprint=_footprint(n), align=4),),
        name=f"store_accumulators_bf16_{n}",
    )
    def store(acc, out, out_index, pitch, rows, columns):
        for half in range(2):
            for group in range(n // 8):
                if 8 * half < np.int64(rows) and 8 * group < np.int64(columns):
                    first = 4 * group + 2 * half
                    low, high = bf16_of_f32(acc[first]), bf16_of_f32(acc[first + 1])
                    at = np.int64(out_index) + 8 * half * np.int64(pitch) + 4 * group
                    out[at] = np.uint32(np.uint32(high << np.uint32(16)) | low)

    return store


def _pairs_text(n: int) -> str:
    lines = [
        "{ .reg .pred p; .reg .b32 t; .reg .f32 x, y; .reg .b64 even, odd, step;",
        "mov.b64 even, <out>; mul.wide.u32 step, <pitch>, 4; add.s64 odd, even, step;",
        "shl.b64 step, step, 3;",
    ]
    for group in range(n // 8):
        for c, place in enumerate(("even", "odd")):
            low, high = 4 * group + c, 4 * group + 2 + c
            lines += [
                f"mul.rn.f32 x, <acc[{low}]>, <factor>; mul.rn.f32 y, <acc[{high}]>, <factor>;",
                f"setp.gt.u32 p, <tokens>, {8 * group + c}; cvt.rn.bf16x2.f32 t, y, x;",
                f"@p st.global.b32 [{place}], t; add.s64 {place}, {place}, step;",
            ]
    return " ".join([*lines, "}"])


def _pairs_footprint(n: int):
    def offsets(operands):
        first, pitch, tokens = (int(operands[x]) for x in ("out_index", "pitch", "tokens"))
        steps = np.array([8 * j + c for j in range(n // 8) for c in range(2)])
        words = first + steps[steps < tokens] * pitch
        return (4 * words[:, None] + np.arange(4)).ravel()

    return offsets


@op_factory
def store_pairs_bf16(n: int):
    """The op that scales wgmma's accumulators, rounds them to bf16 and stores them by column.

    The op's arguments are ``acc, out, out_index, pitch, tokens, factor``: columns of the tile are
    tokens, and a lane's rows g and g + 8 of one are a word: the one at ``out_index`` for the lane's
    first column, ``pitch`` words further for the next. Columns ``tokens`` or more from the first
    are left out.

    Args:
        n: columns of the tile, a multiple of 8 up to 256.
    """

    @device_op(
        f"void(f32[{n // 2}] acc, global u32* out, u32 pitch, u32 tokens, f32 factor)",
        ptx=_pairs_text(n),
        effects=(writes("out", footprint=_pairs_footprint(n), align=4),),
        name=f"store_pairs_bf16_{n}",
    )
    def store(acc, out, out_index, pitch, tokens, factor):
        for group in range(n // 8):
            for c in range(2):
                if 8 * group + c < np.int64(tokens):
                    low = bf16_of_f32(np.float32(acc[4 * group + c] * factor))
                    high = bf16_of_f32(np.float32(acc[4 * group + 2 + c] * factor))
                    at = np.int64(out_index) + (8 * group + c) * np.int64(pitch)
                    out[at] = np.uint32(np.uint32(high << np.uint32(16)) | low)

    return store
