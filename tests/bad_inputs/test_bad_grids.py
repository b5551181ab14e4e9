"""C21, P9: more blocks than a grid has, or more rows than kernels count, are refused."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from nbmoe import backend, ops
from nbmoe.errors import RangeError, ShapeError
from tests.bad_inputs.case import FakeDeviceArray, Recorder

MAX_BLOCKS_Y = 65_535
MAX_BLOCKS = 2**31 - 1
MAX_ROWS = 2**32 - 1
MANY_TILES = 2**16 + 1
MANY_ROWS = 128 * MANY_TILES
MX = {"sf_vector_size": 32, "scales_type": "float8_e8m0fnu", "out_type": "float8_e4m3fn"}
Fake = Callable[..., FakeDeviceArray]
Run = Callable[[Fake, int], Any]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Makes arrays of a GPU that are apart from each other."""
    monkeypatch.setattr(backend, "problem", lambda name: None)
    at = count(1)
    return lambda typestr, *shape: FakeDeviceArray(shape, typestr, pointer=next(at) << 50)


def slots(fake: Fake) -> tuple[FakeDeviceArray, ...]:
    return fake("<u4", 2), fake("<u4", 1), fake("<i4", 1)


def tiles(fake: Fake, rows: int, width: int, columns: int) -> FakeDeviceArray:
    return fake("|u1", rows, -(-width // columns), 32, 4, 4)


def interleave(fake: Fake, c: int) -> Any:
    scales = fake("|u1", 1, c)
    return ops.block_scales_interleave(scales, out=tiles(fake, 1, c, 4))


def grouped_nvfp4(fake: Fake, k: int) -> Any:
    out = (fake("|u1", MANY_ROWS, k // 2), tiles(fake, MANY_TILES + 1, k, 64))
    factors = fake("<f4", 1)
    return ops.grouped_quantize_dynamic_block_scaled(
        fake("<u2", MANY_ROWS, k), *slots(fake), factors, out=out
    )


def grouped_mxfp8(fake: Fake, k: int) -> Any:
    out = (fake("|u1", MANY_ROWS, k), tiles(fake, MANY_TILES + 1, k, 128))
    return ops.grouped_quantize_dynamic_block_scaled(
        fake("<u2", MANY_ROWS, k), *slots(fake), **MX, out=out
    )


def rows_nvfp4(fake: Fake, k: int) -> Any:
    out = (fake("|u1", MANY_ROWS, k // 2), tiles(fake, MANY_TILES, k, 64))
    return ops.quantize_dynamic_block_scaled(fake("<u2", MANY_ROWS, k), out=out)


def row_scaled(fake: Fake, k: int) -> Any:
    shapes = (fake("|u1", MANY_ROWS, k // 2), tiles(fake, MANY_TILES + 1, k, 64))
    out = (*shapes, fake("<u2", MANY_ROWS))
    return ops.grouped_quantize_nvfp4_row_scaled(fake("<u2", MANY_ROWS, k), *slots(fake), out=out)


def silu_mxfp8(fake: Fake, n: int) -> Any:
    out = (fake("|u1", MANY_ROWS, n // 2), tiles(fake, MANY_TILES + 1, n // 2, 128))
    return ops.fused_silu_quantize(fake("<u2", MANY_ROWS, n), *slots(fake), format="mxfp8", out=out)


def prepare(fake: Fake, k: int) -> Any:
    out = fake("|u1", -(-k // 64), MANY_ROWS + 8, 128)
    scales = tiles(fake, MANY_TILES, k, 64)
    return ops.prepare_tokens(fake("|u1", MANY_ROWS, k // 2), scales, format="nvfp4", out=out)


def gated(fake: Fake, n: int) -> Any:
    return ops.gated_activation(fake("<u2", 1, n), out=fake("<u2", 1, n // 2))


def finalize(fake: Fake, h: int) -> Any:
    operands = fake("<u2", 1, h), fake("<u4", 1), fake("<f4", 1, 1)
    return ops.moe_finalize(*operands, out=fake("<u2", 1, h))


def gather(fake: Fake, k: int) -> Any:
    return ops.gather_rows(fake("<u2", 1, k), fake("<u4", 1), out=fake("<u2", 1, k))


# The call, the argument, its size, the largest size and the step to the next.
WIDEST: dict[str, tuple[Run, str, str, int, int]] = {
    "interleave": (interleave, "scales", "C", 4 * MAX_BLOCKS_Y, 1),
    "gated": (gated, "gate_up", "2D", 4096 * MAX_BLOCKS_Y, 32),
    "finalize": (finalize, "down", "H", 1024 * MAX_BLOCKS_Y, 8),
    "gather": (gather, "input", "K", 1024 * MAX_BLOCKS_Y, 8),
}


@pytest.mark.parametrize("name", WIDEST)
def test_widest_rows(name: str, fake: Fake, recorder: Recorder) -> None:
    """The widest row that is legal needs the whole grid; the next is refused."""
    run, arg, symbol, widest, step = WIDEST[name]
    run(fake, widest)
    _, grid, _, _ = recorder.launches[-1]
    assert grid[1] == MAX_BLOCKS_Y
    recorder.launches.clear()
    got = f"{symbol} = {widest + step}"
    with pytest.raises(ShapeError, match=f"{arg}: expected {symbol} <= {widest}, got {got}$"):
        run(fake, widest + step)
    assert not recorder.launches


# Blocks of quantizers: 256 columns by a scale tile's rows. A slot may leave a tile partly used.
QUANTIZERS: dict[str, tuple[Run, str, str, int, int, int]] = {
    "grouped-nvfp4": (grouped_nvfp4, "input", "K", 256, MANY_TILES + 1, 16),
    "grouped-mxfp8": (grouped_mxfp8, "input", "K", 256, MANY_TILES + 1, 32),
    "rows-nvfp4": (rows_nvfp4, "input", "K", 256, MANY_TILES, 16),
    "row-scaled": (row_scaled, "input", "K", 256, MANY_TILES + 1, 16),
    "silu-mxfp8": (silu_mxfp8, "gate_up", "2D", 512, MANY_TILES + 1, 64),
    "prepare": (prepare, "hidden", "K", 256, MANY_TILES, 16),
}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_widest_rows_of_quantizers(name: str, fake: Fake, recorder: Recorder) -> None:
    """As many whole columns of blocks are legal as the grid has room for."""
    run, arg, symbol, columns, tiles_down, step = QUANTIZERS[name]
    widest = columns * (MAX_BLOCKS // tiles_down)
    run(fake, widest)
    _, grid, _, _ = recorder.launches[-1]
    assert grid == (tiles_down * (widest // columns), 1, 1)
    assert grid[0] + tiles_down > MAX_BLOCKS >= grid[0]
    recorder.launches.clear()
    got = f"{symbol} = {widest + step}"
    with pytest.raises(ShapeError, match=f"{arg}: expected {symbol} <= {widest}, got {got}$"):
        run(fake, widest + step)
    assert not recorder.launches


def batched(fake: Fake, batch: int, m: int) -> Any:
    a, b = fake("|u1", batch, m, 8), fake("|u1", batch, 8, 8)
    scales = (fake("<f4", batch, 1, m), fake("<f4", batch, 1, 1))
    return ops.batched_dynamic_scaled_fp8_matmul(a, b, *scales, out=fake("<u2", batch, m, 8))


def test_rows_of_a_batch(fake: Fake, recorder: Recorder) -> None:
    """Kernels count the rows of all matrices in 32 bits."""
    assert 65_535 * 65_537 == MAX_ROWS
    batched(fake, 65_535, 65_537)
    assert len(recorder.launches) == 1
    got = rf"B \* M = 65535 \* 65538 = {65_535 * 65_538}$"
    with pytest.raises(RangeError, match=rf"\(\): a: expected B \* M <= {MAX_ROWS}, got {got}"):
        batched(fake, 65_535, 65_538)
    assert len(recorder.launches) == 1
