"""The tile shape of Hopper's FP8 matmul, and what of its layout follows from it.

Shared memory: a ring of stages of one or two 128-blocks of K; the tokens' scales of each stage, and
their products with the weights' scales; a note of 8 words for each stage that begins a tile; the
mbarriers (`full`, `empty`, `scaled`); the schedule's table. A stage holds

    weights  [warpgroup][block][unit]               `nbmoe.prepared.fp8` or `nbmoe.prepared.w4a8`
    tokens   [block][token of the widest tile][128 bytes]                            swizzled
"""

from dataclasses import dataclass

from nbmoe_kernels.prepared_w4a8 import UNIT_BYTES as FOLDED_BYTES

UNIT_ROWS = 64
"""Weight rows of a warpgroup, the M of its wgmma."""
BLOCK_BYTES = 128
"""Of a row in a 128-block of K."""
UNIT_BYTES = {"e4m3": UNIT_ROWS * BLOCK_BYTES, "mxfp4": FOLDED_BYTES}
"""Of a unit of weights: 64 rows by a 128-block of K."""
_ALIGNMENT = 1024
NOTE_WORDS = 8
SMS = 132
"""Of an H100 SXM and an H200. Another number only changes which block does which tile."""
_BARRIER_BYTES = 8


@dataclass(frozen=True)
class Fp8HopperConfig:
    """A tile shape. It changes speed, never bytes.

    Attributes:
        widths: tokens of a tile, ascending multiples of 8 up to 256: a segment of a slot's rows
            takes the narrowest that holds it.
        warpgroups: of consumers, 64 weight rows each: 1 or 2, which share the weights' scales.
        stages: depth of the ring.
        blocks_per_sm: persistent blocks of an SM.
        registers: of a producer's and of a consumer's thread, by reallocation; None: as compiled.
        max_slots: slots that the table holds, a multiple of 32.
        b_format: kind of the weights, "e4m3" or "mxfp4".
    """

    widths: tuple[int, ...]
    warpgroups: int
    stages: int
    blocks_per_sm: int
    registers: tuple[int, int] | None
    max_slots: int = 256
    b_format: str = "e4m3"

    @property
    def stage_blocks(self) -> int:
        """128-blocks of K in a stage: of MXFP4 weights two have the bytes of one of e4m3."""
        return 2 if self.b_format == "mxfp4" else 1

    @property
    def unit_bytes(self) -> int:
        """Of a warpgroup's weights in a 128-block."""
        return UNIT_BYTES[self.b_format]

    @property
    def panel_bytes(self) -> int:
        """Of a stage's tokens in a 128-block."""
        return self.max_width * BLOCK_BYTES

    @property
    def max_width(self) -> int:
        """Tokens of the widest tile."""
        return self.widths[-1]

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return 128 * self.warpgroups

    @property
    def threads(self) -> int:
        """Of a block with row scales; registers are handed over by whole warpgroups."""
        return self.consumers + (128 if self.registers else 32)

    @property
    def threads_with_scaler(self) -> int:
        """Of a block with block scales, whose second producers' warp multiplies them."""
        return self.consumers + (128 if self.registers else 64)

    @property
    def tokens_at(self) -> int:
        """First byte of a stage's tokens."""
        weights = self.warpgroups * self.stage_blocks * self.unit_bytes
        return -(-weights // _ALIGNMENT) * _ALIGNMENT

    @property
    def stage_bytes(self) -> int:
        """A multiple of 1024, as the swizzle wants it."""
        return self.tokens_at + self.stage_blocks * self.panel_bytes

    @property
    def scales_at(self) -> int:
        """First byte of the tokens' scales, f32 [stage][max_width]."""
        return self.stages * self.stage_bytes

    @property
    def products_at(self) -> int:
        """First byte of the scales' products, f32 [stage][max_width]."""
        return self.scales_at + 4 * self.stages * self.max_width

    @property
    def notes_at(self) -> int:
        """First byte of the notes."""
        return self.products_at + 4 * self.stages * self.max_width

    @property
    def barriers_at(self) -> int:
        """First byte of the mbarriers."""
        return self.notes_at + 4 * NOTE_WORDS * self.stages

    @property
    def table_at(self) -> int:
        """First byte of the schedule's table."""
        return self.barriers_at + 3 * self.stages * _BARRIER_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.table_at + 4 * (3 * self.max_slots + 2)

    @property
    def name(self) -> str:
        widths = "_".join(map(str, self.widths))
        registers = "_r{}_{}".format(*self.registers) if self.registers else ""
        weights = "" if self.b_format == "e4m3" else f"{self.b_format}_"
        return (
            f"{weights}sm90_n{widths}_w{self.warpgroups}_s{self.stages}_b{self.blocks_per_sm}"
            f"_e{self.max_slots}{registers}"
        )
