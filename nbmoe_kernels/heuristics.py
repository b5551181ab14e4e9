"""Which tile shape a grouped matmul runs with: pure functions of the problem's host metadata.

A choice changes speed, never bytes.
"""

from nbmoe_kernels.matmul_tile_sm80 import MatmulConfig

_SHAPES = (
    # rows an expert, up to; (block_m, warps_m, warps_n, stages)
    (16, (16, 1, 4, 4)),
    (64, (64, 2, 2, 3)),
    (None, (128, 4, 2, 3)),
)


def copy_bytes_for(k: int) -> int:
    """Widest cp.async that rows of K / 2 bytes keep aligned: 16, or 8 where K % 32 is 16."""
    return 16 if k % 32 == 0 else 8


def grouped_matmul_configs(k: int) -> tuple[MatmulConfig, ...]:
    """Every tile shape that is legal for a K."""
    return tuple(MatmulConfig(*shape, copy_bytes=copy_bytes_for(k)) for _, shape in _SHAPES)


def grouped_matmul_config(
    n: int, k: int, num_active: int, estimated_total_m: int | None
) -> MatmulConfig:
    """The tile shape for a problem.

    Small experts get small tiles: a tile's padded rows cost as much arithmetic as real ones. The
    average is rounded up, and an unknown total counts as large.

    Args:
        n: weight rows of an expert; every shape covers 128 of them.
        k: columns.
        num_active: expert slots.
        estimated_total_m: expected rows of all slots; a hint.
    """
    configs = grouped_matmul_configs(k)
    if estimated_total_m is None:
        return configs[-1]
    rows_per_slot = -(-estimated_total_m // max(num_active, 1))
    for (limit, _), config in zip(_SHAPES, configs, strict=True):
        if limit is None or rows_per_slot <= limit:
            return config
    raise AssertionError("the last shape has no limit")
