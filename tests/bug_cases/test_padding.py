"""Stale bytes and neighbours: no valid result depends on padding or on another expert."""

import ml_dtypes
import numpy as np
import pytest

from nbmoe import ops, reference
from nbmoe.formats import FORMATS, MXFP4, MXFP8, NVFP4
from nbmoe.layouts import activation_tiles, ceil_div, deinterleave_scales, scales_offset
from tests.bug_cases.grouped import bf16, problem, starts_of, types
from tests.ops.compare import as_bytes, assert_same

STALE = (0x00, 0x7F, 0xFF)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("rows", [1, 33])
def test_prefilled_scale_buffers(kernels, fmt, rows):
    """vllm-project/vllm#38148, #37564, #37563, flashinfer-ai/flashinfer#2861: swizzled scales were
    allocated empty and only valid rows written; 0x7F in padding rows became NaN."""
    p = problem(fmt, [rows], n=64, k=64)
    tiles = activation_tiles(rows, 1)
    results = []
    for byte in STALE:
        codes = np.full((rows, fmt.packed_k(32)), byte, np.uint8)
        scales = np.full((tiles, ceil_div(32, fmt.tile_columns), 32, 4, 4), byte, np.uint8)
        codes, scales = p.swiglu(kernels, out=(codes, scales))
        down = problem(fmt, [rows], n=64, k=32, seed=1)
        down = down.change(hidden=codes, a_scales=scales)
        # The second tile belongs to nobody and keeps what it held.
        results.append((codes, scales[:1], down.product(kernels)))
    for other in results[1:]:
        assert_same(other, results[0])
    assert np.isfinite(results[0][2].view(ml_dtypes.bfloat16).astype(np.float32)).all()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_nan_scales_of_one_expert(kernels, fmt):
    """flashinfer-ai/flashinfer#3103: a NaN scale of expert 0 contaminated expert 1, whose rows
    shared a 128-row tile."""
    p = problem(fmt, [1, 127], n=16, k=64)
    clean = p.product(kernels, validate="shapes")
    nan = 0x7F if fmt is NVFP4 else 0xFF
    a_scales, b_scales = as_bytes(p.a_scales)[..., 0].copy(), as_bytes(p.b_scales)[..., 0].copy()
    a_scales[0], b_scales[0] = nan, nan
    dirty = p.change(a_scales=a_scales, b_scales=b_scales).product(kernels, validate="shapes")
    assert_same(dirty[1:], clean[1:])
    assert np.isnan(dirty[0].view(ml_dtypes.bfloat16).astype(np.float32)).all()


def test_nan_beyond_the_rows_of_fp8_blocks(kernels):
    """flashinfer-ai/flashinfer#3650: NaN in rows that exist only as padding reached valid rows."""
    rng = np.random.default_rng(0)
    x, w = bf16(rng, 1, 128), bf16(rng, 1, 16, 128)
    q, scales = reference.quantize_dynamic_scaled_float8(x, group_size_or_per_token=128)
    wq = w.astype(ml_dtypes.float8_e4m3fn)
    b_scales = np.ones((1, 1, 1), np.float32)
    one = np.array([0, 1], np.uint32), np.zeros(1, np.int32)
    clean = kernels(ops.grouped_dynamic_scaled_fp8_matmul, q, wq, scales, b_scales, *one)
    padded = np.full((32, 128), 0x7F, np.uint8)
    padded[:1] = q.view(np.uint8)
    wide = np.full((1, 32), np.nan, np.float32)
    wide[0, 0] = scales[0, 0]
    got = kernels(
        ops.grouped_dynamic_scaled_fp8_matmul,
        *(padded.view(ml_dtypes.float8_e4m3fn), wq, wide, b_scales, *one),
        validate="shapes",
    )
    assert_same(got[:1], clean)


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8], ids=str)
@pytest.mark.parametrize("k", [160, 288])
def test_k_that_is_no_multiple_of_256(kernels, fmt, k):
    """ROCm/aiter#2900: the scale row stride came from unpadded K, and pads were read as 127."""
    rng = np.random.default_rng(k)
    x, starts, ids = bf16(rng, 5, k), starts_of([5]), np.zeros(1, np.int32)
    args = (x, starts, scales_offset(starts), ids, None)
    codes, tiles = kernels(ops.grouped_quantize_dynamic_block_scaled, *args, **types(fmt))
    blocks = np.abs(x.astype(np.float32)).reshape(5, k // 32, 32).max(axis=2)
    exponents = np.ceil(np.log2(blocks / fmt.max_value)).astype(int) + 127
    found = deinterleave_scales(tiles.view(np.uint8), 5, k // 32)
    assert (found == exponents).all()
    assert codes.shape == (5, fmt.packed_k(k))
    p = problem(fmt, [5], n=16, k=k)
    expected = p.product(_Reference())
    assert_same(p.product(kernels), expected)


class _Reference:
    """Calls operations on the reference backend."""

    def __call__(self, op, *args, **kwargs):
        return op(*args, backend="reference", **kwargs)
