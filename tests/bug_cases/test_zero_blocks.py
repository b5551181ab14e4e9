"""Zeros, dead experts and empty experts."""

import ml_dtypes
import numpy as np
import pytest

from nbmoe import ops, reference
from nbmoe.formats import FORMATS, MXFP4, MXFP8
from nbmoe.layouts import deinterleave_scales, scales_offset
from tests.bug_cases.grouped import bf16, problem, starts_of, types
from tests.ops.compare import assert_same

E4M3 = ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_zero_block_and_zero_row(kernels, fmt):
    """huggingface/kernels-community#681, #680, pytorch/ao#4762, #4713: 0/0 gave NaN; and
    vllm-project/vllm#58089: byte 0 times its reciprocal did."""
    x = bf16(np.random.default_rng(0), 3, 128)
    x[0, fmt.block : 2 * fmt.block] = 0
    x[1] = 0
    starts, ids = starts_of([3]), np.zeros(1, np.int32)
    factor = np.ones(1, np.float32) if fmt.has_tensor_scale else None
    args = (x, starts, scales_offset(starts), ids, factor)
    codes, tiles = kernels(ops.grouped_quantize_dynamic_block_scaled, *args, **types(fmt))
    scales = deinterleave_scales(tiles.view(np.uint8), 3, 128 // fmt.block)
    zero = codes.view(np.uint8).reshape(3, 128 // fmt.block, -1)
    assert scales[0, 1] == 0 and (scales[1] == 0).all()
    assert (zero[0, 1] == 0).all() and (zero[1] == 0).all()
    assert (scales[2] != 0).all()


def test_zero_group_of_fp8(kernels):
    """The same of a 128-group."""
    x = bf16(np.random.default_rng(0), 2, 256)
    x[0, :128] = 0
    q, scales = kernels(ops.quantize_dynamic_scaled_float8, x, group_size_or_per_token=128)
    assert scales[0, 0] == 0 and (q[0, :128].view(np.uint8) == 0).all()
    assert (scales[:, 1] > 0).all()


@pytest.mark.parametrize("scale", [1e-23, 1e-39, 1e-45])
def test_dead_expert(kernels, scale):
    """flashinfer-ai/flashinfer#2595, vllm-project/vllm#34914: an expert that never trained has
    weight scales near 1e-23; a reciprocal or float16 made NaN of them."""
    rng = np.random.default_rng(0)
    x = bf16(rng, 4, 128)
    q, a_scales = reference.quantize_dynamic_scaled_float8(x, group_size_or_per_token=128)
    weight = bf16(rng, 2, 16, 128).astype(E4M3)
    b_scales = np.array([1.0, scale], np.float32).reshape(2, 1, 1)
    slots = starts_of([2, 2]), np.arange(2, dtype=np.int32)
    y = kernels(ops.grouped_dynamic_scaled_fp8_matmul, q, weight, a_scales, b_scales, *slots).view(
        ml_dtypes.bfloat16
    )
    y = y.astype(np.float32)
    assert np.isfinite(y).all() and (y[:2] != 0).any()
    assert np.abs(y[2:]).max() <= scale * 448 * 448 * 128


@pytest.mark.parametrize("counts", [[0, 40, 0, 1], [0, 0, 0, 3], [4, 0, 0, 0], [0, 0]], ids=str)
@pytest.mark.parametrize("fmt", [MXFP4, MXFP8], ids=str)
def test_empty_experts(kernels, fmt, counts):
    """deepseek-ai/DeepGEMM#20, vllm-project/vllm#39645, #27514, #21399, #19631: experts without
    rows gave NaN, hangs and illegal accesses."""
    p = problem(fmt, counts, n=16, k=32)
    y = p.product(kernels)
    assert y.shape == (sum(counts), 16)
    for slot, count in enumerate(counts):
        if count:
            alone = problem(fmt, [count], n=16, k=32).change(
                hidden=p.hidden[p.rows(slot)].copy(),
                weight=p.weight[slot : slot + 1].copy(),
                b_scales=p.b_scales[slot : slot + 1].copy(),
                a_scales=_scales_alone(p, slot),
            )
            assert_same(y[p.rows(slot)], alone.product(kernels))


def _scales_alone(p, slot):
    tile = int(p.starts[slot]) // 128 + int(scales_offset(p.starts)[slot])
    return p.a_scales[tile : tile + 2].copy()
