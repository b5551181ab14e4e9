"""Tile shapes are legal, and small experts get small tiles."""

import pytest

from nbmoe_kernels.block_quantizer import make_block_quantizer
from nbmoe_kernels.heuristics import (
    MATMUL_PAIRS,
    SHARED_BYTES,
    copy_bytes_for,
    grouped_matmul_config,
    grouped_matmul_configs,
)
from nbmoe_kernels.matmul_operands import OPERANDS

PAIRS = pytest.mark.parametrize("pair", MATMUL_PAIRS, ids="x".join)


@PAIRS
@pytest.mark.parametrize("k", [16, 32, 48, 64, 72, 704, 720, 2880, 7168])
def test_every_shape_is_legal(pair, k):
    step = max(8, *(OPERANDS[name].scale_block for name in pair))
    k = -(-k // step) * step
    for config in grouped_matmul_configs(*pair, k):
        assert 128 % config.block_m == 0
        assert config.row_tiles * config.warps_m * 16 == config.block_m
        assert config.column_tiles * config.warps_n * 8 == 128
        assert config.stages >= 2
        assert config.a.tensor_core == config.b.tensor_core
        for operand in (config.a, config.b):
            # A stage holds whole scale words.
            assert operand.scale_block in (0, 16, 16 * config.stage_blocks)
            # A copy starts where it may.
            assert operand.row_bytes(k) % config.copy_bytes == 0
            assert config.copy_bytes == 16 or not operand.is_swizzled
        # Shared memory with SwiGLU's scale bytes, on the smallest architectures.
        assert config.shared_bytes + 16 * config.block_m <= SHARED_BYTES


@PAIRS
def test_blocks_of_swiglu_lie_inside_a_warp(pair):
    if grouped_matmul_configs(*pair, 64)[0].a.scale_block:
        quantizer = make_block_quantizer(pair[0])
        for config in grouped_matmul_configs(*pair, 64):
            assert config.column_tiles * 8 % (2 * quantizer.block) == 0


def test_copies_are_as_wide_as_rows_allow():
    assert copy_bytes_for("nvfp4", "nvfp4", 704) == 16
    assert copy_bytes_for("nvfp4", "nvfp4", 720) == 8
    assert copy_bytes_for("mxfp8", "mxfp4", 96) == 16
    assert copy_bytes_for("e4m3", "e4m3", 72) == 8
    assert copy_bytes_for("bf16", "bf16", 72) == 16


@pytest.mark.parametrize(
    ("total", "block_m"),
    [(0, 16), (1, 16), (128, 16), (129, 64), (512, 64), (513, 128), (None, 128)],
)
@pytest.mark.parametrize("kind", ["nvfp4", "e4m3", "bf16"])
def test_tiles_grow_with_the_rows_of_an_expert(kind, total, block_m):
    assert grouped_matmul_config(kind, kind, 4096, 7168, 8, total).block_m == block_m


@pytest.mark.parametrize(("total", "block_m"), [(0, 32), (256, 32), (257, 64), (None, 128)])
def test_tiles_of_mx_formats_start_at_32_rows(total, block_m):
    assert grouped_matmul_config("mxfp8", "mxfp4", 4096, 7168, 8, total).block_m == block_m
