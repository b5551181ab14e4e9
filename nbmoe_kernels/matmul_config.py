"""The tile shape of a portable matmul kernel, and what of its layout follows from it.

Shared memory of a stage (u32 words), q the 64-block in the stage:

    a codes   [q][row of BLOCK_M][words of a's 64-block]     a scales  [word][row of BLOCK_M]
    b codes   [q][row of BLOCK_N][words of b's 64-block]     b scales  [word][row of BLOCK_N]
"""

from dataclasses import dataclass

from nbmoe_kernels.matmul_operands import OPERANDS, Operand

BLOCK_N = 128


@dataclass(frozen=True)
class MatmulConfig:
    """Operands and tile shape of a portable matmul. The shape changes speed, never bytes.

    Attributes:
        a_format: kind of the rows, a name of `nbmoe_kernels.matmul_operands.OPERANDS`.
        b_format: kind of the weights.
        block_m: rows of a block's tile; divides 128.
        warps_m: warps along the rows.
        warps_n: warps along the columns.
        stages: depth of the copy pipeline.
        copy_bytes: width of a copy; 16 where rows allow it, else 8.
    """

    a_format: str
    b_format: str
    block_m: int
    warps_m: int
    warps_n: int
    stages: int
    copy_bytes: int

    @property
    def a(self) -> Operand:
        return OPERANDS[self.a_format]

    @property
    def b(self) -> Operand:
        return OPERANDS[self.b_format]

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def row_tiles(self) -> int:
        """m16 fragments of a warp."""
        return self.block_m // self.warps_m // 16

    @property
    def column_tiles(self) -> int:
        """n8 fragments of a warp."""
        return BLOCK_N // self.warps_n // 8

    @property
    def fragments(self) -> int:
        """m16n8 fragments of a warp."""
        return self.row_tiles * self.column_tiles

    @property
    def stage_blocks(self) -> int:
        """64-blocks of K in a stage: 2, or 1 where three stages of 2 need too much memory."""
        return 2 if self.a.block_bytes + self.b.block_bytes <= 160 else 1

    @property
    def a_scales_at(self) -> int:
        return self.stage_blocks * self.block_m * self.a.block_words

    @property
    def b_codes_at(self) -> int:
        return self.a_scales_at + self.a.scale_words(self.stage_blocks) * self.block_m

    @property
    def b_scales_at(self) -> int:
        return self.b_codes_at + self.stage_blocks * BLOCK_N * self.b.block_words

    @property
    def stage_words(self) -> int:
        return self.b_scales_at + self.b.scale_words(self.stage_blocks) * BLOCK_N

    @property
    def shared_bytes(self) -> int:
        return 4 * self.stages * self.stage_words

    @property
    def name(self) -> str:
        pair = (
            self.a_format if self.a_format == self.b_format else f"{self.a_format}_{self.b_format}"
        )
        return (
            f"{pair}_sm80_m{self.block_m}n{BLOCK_N}_w{self.warps_m}x{self.warps_n}"
            f"_s{self.stages}_c{self.copy_bytes}"
        )
