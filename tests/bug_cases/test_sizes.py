"""Sizes that do not divide, and offsets beyond 32 bits."""

import ml_dtypes
import numpy as np
import pytest

from nbmoe import ops, reference
from nbmoe.backend import simulator_enabled
from nbmoe.formats import MXFP4, MXFP8, NVFP4
from nbmoe.layouts import scales_offset
from tests.bug_cases.grouped import bf16, problem, starts_of, types
from tests.ops.compare import assert_same

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize("moe_dim", [192, 64])
def test_fp8_blocks_that_do_not_divide(kernels, moe_dim):
    """vllm-project/vllm#48173, #39046, ROCm/ATOM#442, #1488, #1944: moe dims of 1.5 and 0.5 blocks
    were refused or read wrongly. Each 128-block here has a scale of its own power of two, so that
    a wrong one shows."""
    rng = np.random.default_rng(moe_dim)
    blocks = -(-moe_dim // 128)
    q = rng.integers(-4, 5, (3, moe_dim)).astype(np.float32).astype(E4M3)
    weight = rng.integers(-4, 5, (1, 136, moe_dim)).astype(np.float32).astype(E4M3)
    a_scales = np.zeros((blocks, 4), np.float32)
    a_scales[:, :3] = 2.0 ** rng.integers(-2, 3, (blocks, 3))
    b_scales = (2.0 ** rng.integers(-2, 3, (1, 2, blocks))).astype(np.float32)
    slots = starts_of([3]), np.zeros(1, np.int32)
    y = kernels(ops.grouped_dynamic_scaled_fp8_matmul, q, weight, a_scales, b_scales, *slots)
    of_k, of_n = np.arange(moe_dim) // 128, np.arange(136) // 128
    a = q.astype(np.float64) * a_scales[of_k, :3].T
    b = weight[0].astype(np.float64) * b_scales[0][of_n][:, of_k]
    assert_same(y.view(BF16), (a @ b.T).astype(np.float32).astype(BF16))


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8], ids=str)
def test_one_block_of_k(kernels, fmt):
    """triton-lang/triton#10343: K = 32 alone."""
    p = problem(fmt, [3], n=8, k=32)
    expected = ops.grouped_matmul_block_scaled(*p._operands(), format=fmt.name, backend="reference")
    assert_same(p.product(kernels), expected)


def sparse(folder, shape, dtype):
    """Zeros that take no memory until they are touched."""
    return np.memmap(folder / "zeros", dtype, "w+", shape=shape).view(np.ndarray)


@pytest.mark.skipif(simulator_enabled(), reason="the simulator copies arrays: 17 GB of zeros")
def test_row_offsets_beyond_32_bits(tmp_path):
    """sgl-project/sglang#4727, linkedin/Liger-Kernel#1248, #1296, flashinfer-ai/flashinfer#2642,
    vllm-project/vllm#50220, #45884, #34279: rows times K passed 2^31. Here the last row, the only
    one that is touched, begins past 2^32 even in the 4-byte words that the kernel counts in."""
    rows, k = 1_200_001, 7168
    assert (rows - 1) * (k // 2) >= 2**32
    x = sparse(tmp_path, (rows, k), BF16)
    x[-1] = bf16(np.random.default_rng(0), k)
    starts, ids = starts_of([1]), np.zeros(1, np.int32)
    one = np.ones(1, np.float32)
    keys = {"indices": np.array([rows - 1], np.uint32), "indices_divisor": 1, **types(NVFP4)}
    args = (starts, scales_offset(starts), ids, one)
    got = ops.grouped_quantize_dynamic_block_scaled(x, *args, **keys, backend="emulate")
    keys["indices"] = np.zeros(1, np.uint32)
    alone = reference.grouped_quantize_dynamic_block_scaled(x[-1:].copy(), *args, **keys)
    assert_same(got, alone)


@pytest.mark.skipif(simulator_enabled(), reason="the simulator copies arrays: 5 GB of zeros")
def test_expert_strides_beyond_32_bits(tmp_path):
    """The same with the weights of expert 159, which begin past 2^32 bytes."""
    experts, n, k = 160, 8192, 7168
    assert (experts - 1) * n * (k // 2) >= 2**32
    small = problem(NVFP4, [1], n=8, k=k)
    weight = sparse(tmp_path, (experts, n, k // 2), np.uint8)
    b_scales = np.zeros((experts, n // 128, k // 64, 32, 4, 4), np.uint8)
    weight[-1, :8], b_scales[-1, 0] = small.weight[0], small.b_scales[0, 0]
    p = small.change(weight=weight, b_scales=b_scales, ids=np.array([experts - 1], np.int32))
    y = ops.grouped_matmul_block_scaled(
        *p._operands(),
        np.ones(experts, np.float32),
        backend="emulate",
        validate="shapes",
        estimated_total_m=1,
    )
    expected = ops.grouped_matmul_block_scaled(
        *small._operands(), np.ones(1, np.float32), backend="reference"
    )
    assert_same(y[:, :8], expected)
