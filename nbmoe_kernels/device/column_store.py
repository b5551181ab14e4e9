"""Stores wgmma's accumulators where weight rows are M: a lane's columns are tokens.

One op instead of a loop over registers: it says the same, and an interpreted engine runs it
hundreds of times faster.
"""

import numpy as np

from nbmoe_kernels.device.convert import bf16_of_f32
from nbmoe_kernels.device.effects import writes
from nbmoe_kernels.device.op import device_op, op_factory


def _footprint(n: int):
    def offsets(operands):
        tokens, pitch = int(operands["tokens"]), int(operands["pitch"])
        columns = (8 * np.arange(n // 8)[:, None] + np.arange(2)).ravel()
        words = int(operands["out_index"]) + pitch * columns[columns < tokens]
        return (4 * words[:, None] + np.arange(4)).ravel()

    return offsets


def _store_text(n: int) -> str:
    lines = [
        "{ .reg .pred p; .reg .b32 t; .reg .b64 even, odd, step; mov.b64 even, <out>; "
        "mul.wide.u32 step, <pitch>, 4; add.s64 odd, even, step; mul.wide.u32 step, <pitch>, 32;",
    ]
    for first in range(0, n // 2, 4):
        for i, at in enumerate(("even", "odd")):
            lines += [
                f"setp.gt.u32 p, <tokens>, {2 * first + i};",
                f"cvt.rn.bf16x2.f32 t, <acc[{first + i + 2}]>, <acc[{first + i}]>;",
                f"@p st.global.b32 [{at}], t;",
            ]
            if first + 4 < n // 2:
                lines.append(f"add.s64 {at}, {at}, step;")
    return " ".join([*lines, "}"])


@op_factory
def store_tokens_bf16(n: int):
    """The op that rounds the accumulators of ``n`` tokens to bf16 and stores them.

    The op's arguments are ``acc, out, out_index, pitch, tokens``. The lane's two rows of the
    fragment, g and g + 8, are neighbours in the output: the word (two bf16) at ``out_index``
    belongs to its first token, ``pitch`` words lie between tokens. Tokens ``tokens`` or more after
    the lane's first are left out.

    Args:
        n: columns of the tile, a multiple of 8 up to 256.
    """
    if n % 8 or not 8 <= n <= 256:
        raise ValueError(f"store_tokens_bf16: n: expected a multiple of 8 in 8..256, got {n}")

    @device_op(
        f"void(f32[{n // 2}] acc, global u32* out, u32 pitch, u32 tokens)",
        ptx=_store_text(n),
        effects=(writes("out", footprint=_footprint(n), align=4),),
        name=f"store_tokens_bf16_{n}",
    )
    def store(acc, out, out_index, pitch, tokens):
        for group in range(n // 8):
            for i in range(2):
                token = 8 * group + i
                if token < np.int64(tokens):
                    low, high = bf16_of_f32(acc[4 * group + i]), bf16_of_f32(acc[4 * group + i + 2])
                    at = np.int64(out_index) + np.int64(pitch) * token
                    out[at] = np.uint32(np.uint32(high << np.uint32(16)) | low)

    return store
