"""How quantizers shape their grids: enough blocks, and no parts of tiles without rows."""

from nbmoe_kernels.quantize_tile import MANY_BLOCKS, column_blocks_of, split_of


def test_large_grids_keep_wide_blocks() -> None:
    assert split_of(65536, 64, 576, 4096, 2) == 0
    assert column_blocks_of(4096, 0) == 16


def test_small_grids_get_narrow_blocks() -> None:
    tiles = 384
    split = split_of(32768, 128, tiles, 2048, 2)
    assert split == 1
    assert tiles * column_blocks_of(2048, split) >= MANY_BLOCKS
    assert split_of(32768, 128, tiles, 768, 2) == 2
    assert split_of(32768, 128, tiles, 768, 1) == 1


def test_slots_of_few_rows_are_not_split() -> None:
    assert split_of(1024, 128, 136, 2048, 2) == 0
    assert split_of(8, 8, 9, 2048, 2) == 0


def test_blocks_cover_the_columns() -> None:
    for columns in (16, 64, 80, 256, 272, 2048):
        for split in range(3):
            width = 256 >> split
            assert (column_blocks_of(columns, split) - 1) * width < columns
            assert column_blocks_of(columns, split) * width >= columns
