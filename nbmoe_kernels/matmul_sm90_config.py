"""The tile shape of a Hopper matmul kernel, and what of its layout follows from it.

Shared memory: a ring of stages, the results of a tile that wait to be stored, the stages' mbarriers
(`full`, then `empty`), the ring of tiles, and the schedule's table. A stage holds ``stage_blocks``
64-blocks of K:

    tokens   [64-block][token of the widest tile][128 bytes], swizzled
    weights  [warpgroup][64-block][unit]                       `nbmoe_kernels.prepared_weights`
"""

from dataclasses import dataclass

from nbmoe_kernels.matmul_sm90_operands import PREPARED, PreparedOperand

UNIT_ROWS = 64
"""Weight rows of a warpgroup, the M of its wgmma."""
RESULT_BYTES = 144
"""A warpgroup's results of a token, 64 bf16, and 16 bytes by which no two banks collide."""
_TOKEN_BYTES = 128
_ALIGNMENT = 1024
_BARRIER_BYTES = 8
_TILES_BYTES = 64
"""Two places: a tile of 4 words and two mbarriers each."""


@dataclass(frozen=True)
class HopperMatmulConfig:
    """Operands and tile shape of a Hopper matmul. The shape changes speed, never bytes.

    Attributes:
        a_format: kind of the tokens: "nvfp4", "mxfp4", "mxfp8" or "bf16".
        b_format: kind of the weights.
        widths: tokens of a tile, ascending multiples of 8 up to 256: a segment of a slot's rows
            takes the narrowest that holds it.
        warpgroups: of consumers, 64 weight rows each: 1 or 2.
        stage_blocks: 64-blocks of K in a stage, at least 2: an iteration that decodes into two
            sets of registers never writes one that a wgmma still reads.
        stages: depth of the ring.
        blocks_per_sm: persistent blocks of an SM.
        registers: of a producer's and of a consumer's thread, by reallocation; None: as compiled.
        max_slots: slots that the table holds, a multiple of 32.
        stores_later: whether spare warps of the producer's warpgroup finish a tile while the next
            one is multiplied, for the fused matmul; needs ``registers``, and shared memory for the
            results.
        warp_products: whether each warp multiplies its 16 weight rows by itself
            (`matmul_sm90_multiply_few`), not a warpgroup its 64 by wgmma; needs an even
            ``stage_blocks``.
    """

    a_format: str
    b_format: str
    widths: tuple[int, ...]
    warpgroups: int
    stage_blocks: int
    stages: int
    blocks_per_sm: int
    registers: tuple[int, int] | None
    max_slots: int = 256
    stores_later: bool = False
    warp_products: bool = False

    @property
    def a(self) -> PreparedOperand:
        return PREPARED[self.a_format]

    @property
    def b(self) -> PreparedOperand:
        return PREPARED[self.b_format]

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
        """Of a block; registers are handed over by whole warpgroups."""
        return self.consumers + (128 if self.registers else 32)

    @property
    def block_rows(self) -> int:
        """Weight rows of a tile."""
        return UNIT_ROWS * self.warpgroups

    @property
    def panel_bytes(self) -> int:
        """Tokens of a 64-block in a stage."""
        return self.max_width * _TOKEN_BYTES

    @property
    def weights_at(self) -> int:
        """First byte of a stage's weights."""
        return self.stage_blocks * self.panel_bytes

    @property
    def stage_bytes(self) -> int:
        needed = self.weights_at + self.warpgroups * self.stage_blocks * self.b.unit_bytes
        return -(-needed // _ALIGNMENT) * _ALIGNMENT

    @property
    def results_at(self) -> int:
        """First byte of the results that wait."""
        return self.stages * self.stage_bytes

    @property
    def barriers_at(self) -> int:
        """First byte of the mbarriers."""
        waiting = self.warpgroups * self.max_width * RESULT_BYTES if self.stores_later else 0
        return self.results_at + waiting

    @property
    def kept_at(self) -> int:
        """First byte of the mbarriers of the results that wait."""
        return self.barriers_at + 2 * self.stages * _BARRIER_BYTES

    @property
    def tiles_at(self) -> int:
        """First byte of the ring of tiles, its mbarriers first."""
        kept = 2 * self.warpgroups * _BARRIER_BYTES if self.stores_later else 0
        return -(-(self.kept_at + kept) // 16) * 16

    @property
    def tile_readers(self) -> int:
        """Warps that read the ring of tiles."""
        return 4 * self.warpgroups + (3 if self.stores_later else 0)

    @property
    def table_at(self) -> int:
        """First byte of the schedule's table."""
        return self.tiles_at + _TILES_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.table_at + 4 * (3 * self.max_slots + 2)

    @property
    def name(self) -> str:
        pair = (
            self.a_format if self.a_format == self.b_format else f"{self.a_format}_{self.b_format}"
        )
        widths = "_".join(map(str, self.widths))
        registers = "_r{}_{}".format(*self.registers) if self.registers else ""
        return (
            f"{pair}_sm90_n{widths}_w{self.warpgroups}_k{self.stage_blocks}_s{self.stages}"
            f"_b{self.blocks_per_sm}_e{self.max_slots}{registers}"
            + ("_later" if self.stores_later else "")
            + ("_mma" if self.warp_products else "")
        )
