"""Tile shapes are legal, and small experts get small tiles."""

import pytest

from nbmoe_kernels.heuristics import copy_bytes_for, grouped_matmul_config, grouped_matmul_configs


@pytest.mark.parametrize("k", [16, 32, 48, 64, 704, 720, 2880, 7168])
def test_every_shape_is_legal(k):
    for config in grouped_matmul_configs(k):
        assert 128 % config.block_m == 0
        assert config.row_tiles * config.warps_m * 16 == config.block_m
        assert config.column_tiles * config.warps_n * 8 == 128
        # The epilogue of SwiGLU quantizes four fragment columns together.
        assert config.column_tiles % 4 == 0
        # A copy never straddles the end of an aligned row.
        assert (k // 2) % 8 == 0 and (config.copy_bytes == 8 or (k // 2) % 16 == 0)
        # Shared memory of the smallest architecture, sm_89: 99 KiB a block.
        assert config.shared_bytes <= 99 * 1024


def test_copies_are_as_wide_as_rows_allow():
    assert copy_bytes_for(704) == 16
    assert copy_bytes_for(720) == 8


@pytest.mark.parametrize(
    ("total", "block_m"),
    [(0, 16), (1, 16), (128, 16), (129, 64), (512, 64), (513, 128), (None, 128)],
)
def test_tiles_grow_with_the_rows_of_an_expert(total, block_m):
    assert grouped_matmul_config(4096, 7168, 8, total).block_m == block_m
