"""Prepared weights: what lies where in the fragment-ordered layout of the sm_90 matmuls.

Weights are units of 64 rows by 64 of K, [E][N64][K64], without gaps: N64 is even, so that tiles of
128 rows are whole, and rows past N and elements past K are zero, scales included. A unit has the
codes of its 128 threads, then the scales. Thread i = 32 w + 4 g + t owns the 16-block t of rows
r0 = 16 w + 2 g and r1 = r0 + 1.

    kind    codes [bytes]                          scales [bytes]               unit
    nvfp4   2048: 16 i = words r0 (2), r1 (2)      256: 2 i = r0, r1            2304
    mxfp4   2048: the same                         128: 2 (2 (8 w + g) + t/2)   2176
    mxfp8   4096: plane p (2): 16 i = a0..a3       128: the same                4224
    bf16    8192: plane j (4): 16 i = a0..a3       -                            8192

The registers of step j are pairs of elements of the 16-block, the first in the low half: a0 = r0
(j, j + 4), a1 = r1 (j, j + 4), a2 = r0 (j + 8, j + 12), a3 = r1 (j + 8, j + 12).

* bf16: plane j holds the registers of step j.
* mxfp8: byte 1 and 3 of word a of plane p are the pair of step 2 p, bytes 0 and 2 that of step
  2 p + 1. A 32-block with a NaN code has codes 0 and scale 0xFF: its products are NaN either way.
* nvfp4, mxfp4: a word has the codes of 8 elements, a half those of 4, v0..v3, as `FP4_BITS` says.
  What one mask takes from the word is then a pair of operands but for a power of two.
"""

from dataclasses import dataclass

UNIT_ROWS = 64
UNIT_K = 64
UNIT_THREADS = 128


@dataclass(frozen=True)
class UnitKind:
    """A kind of prepared weights.

    Attributes:
        name: as in the names of formats.
        code_bytes: codes of a unit [bytes].
        scale_bytes: scales of a unit, behind its codes [bytes].
        scale_block: elements of K that share a scale byte; 0 without scales.
        k_multiple: what K must be a multiple of.
    """

    name: str
    code_bytes: int
    scale_bytes: int
    scale_block: int
    k_multiple: int

    @property
    def unit_bytes(self) -> int:
        """Size of a unit [bytes]."""
        return self.code_bytes + self.scale_bytes


UNIT_KINDS = {
    kind.name: kind
    for kind in (
        UnitKind("nvfp4", 2048, 256, 16, 16),
        UnitKind("mxfp4", 2048, 128, 32, 32),
        UnitKind("mxfp8", 4096, 128, 32, 32),
        UnitKind("bf16", 8192, 0, 0, 8),
    )
}

FP4_BITS = {
    "nvfp4": ((9, 15), (6, 12), (3, 14), (0, 13)),
    "mxfp4": ((6, 15), (3, 12), (0, 14), (9, 13)),
}
"""Of v0..v3 in a half: lowest bit of the three magnitude bits, and bit of the sign."""


def n64_count(n: int) -> int:
    """Units down a weight of n rows."""
    return 2 * -(-n // (2 * UNIT_ROWS))


def k64_count(k: int) -> int:
    """Units across a weight of k columns."""
    return -(-k // UNIT_K)


def prepared_bytes(format: str, num_experts: int, n: int, k: int) -> int:
    """Size of prepared weights [bytes]."""
    return num_experts * n64_count(n) * k64_count(k) * UNIT_KINDS[format].unit_bytes
