"""Which tile shape a fused Hopper matmul runs with: the plain one's, with room for its sums."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from nbmoe_kernels.heuristics_sm90 import hopper_matmul_config
from nbmoe_kernels.hopper_limits import lacks_memory
from nbmoe_kernels.matmul_sm90_config import RESULT_BYTES, HopperMatmulConfig

_REGISTERS = (72, 216)
"""Those that finish need more than those that only store."""
_NARROW, _FEW_BLOCKS = 32, 2
"""Above this width three blocks' registers do not hold the sums and the epilogue."""


@dataclass(frozen=True)
class FusedMatmulConfig(HopperMatmulConfig):
    """The tile shape of a fused matmul: every shape has room for a tile's sums."""

    @property
    def barriers_at(self) -> int:
        """First byte of the mbarriers."""
        return self.results_at + self.warpgroups * self.max_width * RESULT_BYTES


def fused_matmul_config(
    a_format: str,
    b_format: str,
    n: int,
    k: int,
    num_active: int,
    estimated_total_m: int | None,
) -> FusedMatmulConfig:
    """The shape of `hopper_matmul_config`, changed until it fits.

    Args:
        a_format: kind of the tokens.
        b_format: kind of the weights.
        n: weight rows of an expert.
        k: columns.
        num_active: expert slots.
        estimated_total_m: expected rows of all slots, a hint; None counts as many.
    """
    plain = hopper_matmul_config(a_format, b_format, n, k, num_active, estimated_total_m)
    config = FusedMatmulConfig(**{f.name: getattr(plain, f.name) for f in fields(plain)})
    if config.registers:
        config = replace(config, registers=_REGISTERS, stores_later=True)
    elif config.max_width > _NARROW:
        config = replace(config, blocks_per_sm=min(config.blocks_per_sm, _FEW_BLOCKS))
    return next(c for c in _smaller(config) if not lacks_memory(c))


def _smaller(config: FusedMatmulConfig) -> Iterator[FusedMatmulConfig]:
    """Configs that need less and less memory of an SM: blocks are worth more than stages."""
    for blocks in range(config.blocks_per_sm, 0, -1):
        for stages in range(config.stages, 1, -1):
            yield replace(config, stages=stages, blocks_per_sm=blocks)
