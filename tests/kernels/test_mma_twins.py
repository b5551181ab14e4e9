"""Twins of mma and wgmma against bytes recorded on an H200."""

import time
from pathlib import Path

import numpy as np
import pytest
from numba import njit

from nbmoe_kernels.device import mma
from nbmoe_kernels.device.wgmma import wgmma
from tests.kernels.tiles import column_fragments, places, row_fragments, swizzled

VECTORS = Path(__file__).parent.parent / "golden" / "tensor_core"
FORMATS = ("f16", "bf16", "e4m3")
MMA = {
    "f16": (mma.mma_m16n8k16_f16, 16),
    "bf16": (mma.mma_m16n8k16_bf16, 16),
    "e4m3": (mma.mma_m16n8k32_e4m3, 32),
    "k8_f16": (mma.mma_m16n8k8_f16, 8),
    "k8_bf16": (mma.mma_m16n8k8_bf16, 8),
}
_compiled = {}


def compiled(stub):
    # numpy's scalar rules are not numba's; compiled twins are what the engines run.
    if stub not in _compiled:
        _compiled[stub] = njit(error_model="numpy")(stub.op.twin)
    return _compiled[stub]


def load(name):
    return np.load(VECTORS / f"{name}.npz")


def mma_tile(form, a, b, c):
    """D of 16 rows (M, K), 8 columns (8, K) and f32 bits (M, 8), K any number of steps."""
    stub, k = MMA[form]
    twin = compiled(stub)
    d = np.empty_like(c)
    row, column = places(32, 8)
    for first in range(0, len(a), 16):
        rows = slice(first, first + 16)
        acc = np.ascontiguousarray(c[rows][row, column]).view(np.float32)
        for start in range(0, a.shape[1], k):
            step = slice(start, start + k)
            twin(acc, *row_fragments(a[rows, step]), *column_fragments(b[:, step]))
        d[rows][row, column] = acc.view(np.uint32)
    return d


def wgmma_tile(form, where, a, b, c):
    """D of 64 rows (64, K), n columns (n, K) and f32 bits (64, n), or of zero if c is None."""
    n, k = len(b), 32 if form == "e4m3" else 16
    twin = compiled(wgmma(n, form, a_in_registers=where == "registers"))
    row, column = places(128, n)
    garbage = np.full((128, n // 2), np.nan, np.float32)
    acc = garbage if c is None else np.ascontiguousarray(c[row, column]).view(np.float32)
    for i, start in enumerate(range(0, a.shape[1], k)):
        step = slice(start, start + k)
        # As in a K-major tile of 128 bytes: each step 32 bytes further.
        place = 1024 + 32 * (i % 4)
        index = np.full(128, place, np.int64)
        memory_b = swizzled(b[:, step], place, 1024 + 128 * n)
        left = row_fragments(a[:, step])
        if where == "shared":
            left = [swizzled(a[:, step], place, 1024 + 128 * 64), index]
        twin(acc, *left, memory_b, index, np.uint32(c is not None or i > 0))
    d = np.empty((64, n), np.uint32)
    d[row, column] = acc.view(np.uint32)
    return d


@pytest.mark.parametrize("form", FORMATS)
def test_mma_equals_recorded_random_tiles(form):
    v = load(f"random_{form}")
    for a, b, c, d in zip(v["A"], v["B"], v["C"], v["D_mma" if form == "e4m3" else "D"]):
        np.testing.assert_array_equal(mma_tile(form, a, b, c), d)


@pytest.mark.parametrize("form", ["f16", "bf16"])
def test_two_short_mma_equal_recorded_tiles_and_dots(form):
    v, k8 = load(f"random_{form}"), load(f"k8_{form}")
    for a, b, c, d in zip(v["A"][::2], v["B"][::2], v["C"][::2], k8["D"], strict=True):
        np.testing.assert_array_equal(mma_tile(f"k8_{form}", a, b, c), d)
    v = load(f"targeted_{form}")
    every = slice(None, None, 4)
    dots(f"k8_{form}", v["a"][every], v["b"][every], v["c"][every], k8["d"])


def dots(form, a, b, c, d):
    """Single dots, 8 at a time on the diagonal of an mma."""
    assert len(d) > 500
    for first in range(0, len(d) - 7, 8):
        part = slice(first, first + 8)
        a_tile, c_tile = np.zeros((16, a.shape[1]), a.dtype), np.zeros((16, 8), np.uint32)
        a_tile[:8] = a[part]
        c_tile[np.arange(8), np.arange(8)] = c[part]
        got = mma_tile(form, a_tile, b[part], c_tile)
        np.testing.assert_array_equal(got[np.arange(8), np.arange(8)], d[part])


@pytest.mark.parametrize("form", FORMATS)
def test_mma_equals_recorded_targeted_dots(form):
    v = load(f"targeted_{form}")
    dots(form, v["a"], v["b"], v["c"], v["d_mma" if form == "e4m3" else "d"])


def test_mma_equals_recorded_dots_at_the_floor():
    v = load("clamp_bf16")
    dots("bf16", v["a"], v["b"], v["c"], v["d"])


@pytest.mark.parametrize("form", FORMATS)
def test_mma_equals_recorded_chains(form):
    v = load(f"chain1024_{form}")
    for a, b, c, d in zip(v["A"], v["B"], v["C"], v["D_mma" if form == "e4m3" else "D"]):
        np.testing.assert_array_equal(mma_tile(form, a, b, c), d)


@pytest.mark.parametrize("where", ["shared", "registers"])
@pytest.mark.parametrize("form", FORMATS)
def test_wgmma_equals_recorded_random_tiles(form, where):
    v = load(f"random_{form}")
    for a, b, c, d, zero in zip(v["A"], v["B"], v["C"], v["D"], v["D_from_zero"]):
        np.testing.assert_array_equal(wgmma_tile(form, where, a, b, c), d)
        np.testing.assert_array_equal(wgmma_tile(form, where, a, b, None), zero)


@pytest.mark.parametrize("form", FORMATS)
def test_wgmma_equals_recorded_targeted_dots(form):
    v = load(f"targeted_{form}")
    for first in range(0, len(v["d"]) - 7, 8):
        part = slice(first, first + 8)
        a, c = np.zeros((64, v["a"].shape[1]), v["a"].dtype), np.zeros((64, 8), np.uint32)
        # Rows of every warp and both halves of a fragment.
        rows = 8 * np.arange(8) + np.arange(8)
        a[rows] = v["a"][part]
        c[rows, np.arange(8)] = v["c"][part]
        d = wgmma_tile(form, "shared", a, v["b"][part], c)
        np.testing.assert_array_equal(d[rows, np.arange(8)], v["d"][part])


@pytest.mark.parametrize("form", FORMATS)
def test_wgmma_equals_recorded_chains(form):
    v = load(f"chain1024_{form}")
    for a, b, c, d in zip(v["A"], v["B"], v["C"], v["D"]):
        a, c = (np.tile(x, (4, 1)) for x in (a, c))
        np.testing.assert_array_equal(wgmma_tile(form, "shared", a, b, c), np.tile(d, (4, 1)))


@pytest.mark.parametrize("where", ["shared", "registers"])
@pytest.mark.parametrize("form", FORMATS)
def test_columns_of_a_wide_wgmma_are_those_of_narrow_ones(form, where):
    v = load(f"random_{form}")
    a, c = v["A"][8], np.concatenate(v["C"][:32], axis=1)
    wide = wgmma_tile(form, where, a, v["B"][:32].reshape(256, -1), c)
    for i, b in enumerate(v["B"][:32]):
        columns = slice(8 * i, 8 * i + 8)
        narrow = wgmma_tile(form, where, a, b, c[:, columns])
        np.testing.assert_array_equal(wide[:, columns], narrow)


def product_operands(form):
    kind, ones = (np.uint8, 0x38) if form == "e4m3" else (np.uint16, 0x3C00)
    random = np.random.default_rng(0).integers(0, 1 << (3 if form == "e4m3" else 10), 64 * 1024)
    memory = (random + ones).astype(kind).view(np.uint8)
    return np.zeros((128, 128), np.float32), memory, np.zeros(128, np.int64)


@pytest.mark.parametrize(
    ("a_index", "b_index", "error", "match"),
    [
        (0, 8, ValueError, "multiple of 16"),
        (57345, 0, ValueError, "multiple of 16"),
        (0, 32768 + 128, IndexError, "past the end"),
        (65536 - 1024, 0, IndexError, "past the end"),
    ],
)
def test_wgmma_refuses_bad_operands(a_index, b_index, error, match):
    acc, memory, index = product_operands("e4m3")
    memory = memory[:65536]
    with pytest.raises(error, match=match):
        compiled(wgmma(256, "e4m3"))(
            acc, memory, index + a_index, memory, index + b_index, np.uint32(1)
        )


def test_wgmma_refuses_lanes_that_differ():
    acc, memory, index = product_operands("e4m3")
    other = index.copy()
    other[77] = 1024
    with pytest.raises(ValueError, match="lanes name different"):
        compiled(wgmma(256, "e4m3"))(acc, memory, index, memory, other, np.uint32(1))


@pytest.mark.parametrize("form", FORMATS)
def test_wgmma_twin_makes_a_billion_products_a_second(form):
    twin = compiled(wgmma(256, form))
    acc, memory, index = product_operands(form)
    twin(acc, memory, index, memory, index + 8192, np.uint32(1))
    best = np.inf
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(10):
            twin(acc, memory, index, memory, index + 8192, np.uint32(1))
        best = min(best, (time.perf_counter() - start) / 10)
    assert 64 * 256 * (32 if form == "e4m3" else 16) / best > 1e9
