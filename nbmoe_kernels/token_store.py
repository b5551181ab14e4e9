"""Rows of codes to rows of prepared tokens: decoding, and the way through shared memory.

A warp has a pass of eight rows by 64 elements in its registers: lane 4 g + t the 16-block t of row
g, as eight pairs, pair c for the 16-byte chunk c of the row (`prepared_tokens`). `stage_pairs` puts
them into 1,024 bytes of shared memory as they lie in a panel, without bank conflicts, and
`store_pass` copies these bytes to the panel, 16 a lane and contiguous. Between the two, and before
the next pairs are staged, the caller has the warp meet.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from nbmoe_kernels.device.convert import f16x2_of_e4m3
from nbmoe_kernels.device.decode import bf16x2_of_e8m0, e2m1_to_bf16, e2m1_to_f16, e4m3_to_bf16
from nbmoe_kernels.device.memory import load_shared_v4, store_v4
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.prepared_tokens import ROW_BYTES, ROW_GROUP

ROW_WORDS = ROW_BYTES // 4
PASS_WORDS = ROW_GROUP * ROW_WORDS
"""Words of a pass in shared memory and in its panel."""

_TWO = np.uint32(2)


@device_function
def pairs_of_nvfp4(w0, w1, w2, w3, byte, pairs):
    """16 codes and their scale byte to pairs of float16, times 2^-14."""
    scale = f16x2_of_e4m3(byte)
    e2m1_to_f16(w0, scale, pairs, 0, 2)
    e2m1_to_f16(w1, scale, pairs, 1, 2)


@device_function
def pairs_of_mxfp4(w0, w1, w2, w3, byte, pairs):
    """16 codes and their scale byte to pairs of bfloat16."""
    scale = bf16x2_of_e8m0(byte)
    e2m1_to_bf16(w0, scale, pairs, 0, 2)
    e2m1_to_bf16(w1, scale, pairs, 1, 2)


@device_function
def pairs_of_mxfp8(w0, w1, w2, w3, byte, pairs):
    """16 codes and their scale byte to pairs of bfloat16."""
    scale = bf16x2_of_e8m0(byte)
    e4m3_to_bf16(w0, w1, scale, pairs, 0, 2)
    e4m3_to_bf16(w2, w3, scale, pairs, 1, 2)


PAIRS_OF: dict[str, Callable[..., Any]] = {
    "nvfp4": pairs_of_nvfp4,
    "mxfp4": pairs_of_mxfp4,
    "mxfp8": pairs_of_mxfp8,
}
"""By format: ``(w0, w1, w2, w3, byte, pairs)`` decodes 16 codes to pairs 0..7."""


@device_function
def stage_pairs(stage, first, lane, pairs):
    """Put a lane's pairs into the pass at word ``first`` of shared memory."""
    row, t = np.uint32(lane >> _TWO), np.uint32(lane & np.uint32(3))
    at = np.uint32(np.uint32(first + np.uint32(row << np.uint32(5))) + t)
    for c in unroll(range(8)):
        chunk = np.uint32(row ^ np.uint32(c))
        stage[np.uint32(at + np.uint32(chunk << _TWO))] = pairs[c]


@device_function
def store_pass(output, at, stage, first, lane, rows):
    """Copy the pass at word ``first`` of shared memory to word ``at`` of the output: ``rows`` rows.

    All of it, if they are eight or more.
    """
    row = np.uint32(lane >> np.uint32(3))
    for half in unroll(range(2)):
        if np.uint32(row + np.uint32(4 * half)) < rows:
            word = np.uint32(np.uint32(lane << _TWO) + np.uint32(PASS_WORDS // 2 * half))
            a, b, c, d = load_shared_v4(stage, np.uint32(first + word))
            store_v4(output, at + np.uint64(word), a, b, c, d)


@device_function
def panel_word(panel, panel_rows, row):
    """The first word of a row of a panel."""
    at = np.uint64(panel) * np.uint64(panel_rows) + np.uint64(row)
    return at * np.uint64(ROW_WORDS)
