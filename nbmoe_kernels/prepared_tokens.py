"""Prepared tokens: what lies where in the rows that the sm_90 matmuls copy to shared memory.

Tokens are 16-bit operands of the tensor core: float16 code * scale * 2^-14 for nvfp4, exactly;
bfloat16 code * scale, rounded once, for mxfp4 and mxfp8; bf16 rows as they are. They lie in panels
of 64 elements of K, (ceil(K/64), R, 128) bytes with R = `token_rows(M, S)`; elements past K are 0.

* Row i of slot s is row `token_base`(row_offsets[s], s) + i of every panel, so that a slot starts
  at a multiple of 8 rows whatever the slots before it have. Rows between the slots are open.
  Without slots S is 1 and row i is row i.
* A row's 64 elements are four steps of 16, those with equal k % 4. Of element 16 t + e let
  j = e % 4 and h = e / 4; its step is j and its logical byte 32 j + 16 (h / 2) + 4 t + 2 (h % 2).
  So the 16-block t has one word, a pair of elements, in each of the eight 16-byte chunks.
* Logical chunk c of row r of a panel lies at chunk c ^ (r % 8): the 128-byte swizzle of `wgmma`.
"""

import numpy as np

from nbmoe_kernels.device.op import device_function

PANEL_K = 64
ROW_BYTES = 128
ROW_GROUP = 8
"""Slots start at multiples of this many rows, the period of the swizzle."""

PREPARED_CC = (9, 0)
"""First compute capability of the kernels that make prepared tokens."""

TOKEN_FORMATS = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32, "bf16": 8}
"""Formats, and what K must be a multiple of: the block, or 16 bytes of bf16."""


def token_rows(num_rows: int, num_slots: int) -> int:
    """Rows of a panel for ``num_rows`` rows in ``num_slots`` slots, whatever the routing."""
    return -(-num_rows // ROW_GROUP) * ROW_GROUP + ROW_GROUP * num_slots


def token_panels(k: int) -> int:
    """Panels of rows of ``k`` elements."""
    return -(-k // PANEL_K)


def prepared_token_bytes(num_rows: int, num_slots: int, k: int) -> int:
    """Size of prepared tokens [bytes]."""
    return token_panels(k) * token_rows(num_rows, num_slots) * ROW_BYTES


@device_function
def token_base(start, slot):
    """The panel row of the first row of a slot that starts at row ``start`` of the tokens."""
    return np.uint32(np.uint32(start + np.uint32(slot << np.uint32(3))) & np.uint32(0xFFFFFFF8))
