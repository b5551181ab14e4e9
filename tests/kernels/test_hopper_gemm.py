"""The yardstick GEMM: it assembles as fast code, and computes Hopper's bits."""

import ml_dtypes
import numpy as np
import pytest
from numba import config

import emulate
from emulate.bench.hopper_gemm import THREADS, hopper_gemm, make_problem
from nbmoe.reference.tensor_core import matmul
from tests.kernels.assemble import assemble
from tests.kernels.test_mma_twins import wgmma_tile


@pytest.mark.skipif(config.ENABLE_CUDASIM, reason="the simulator replaces the compiler")
@pytest.mark.parametrize(("form", "block_n"), [("e4m3", 256), ("f16", 256), ("bf16", 128)])
def test_assembles_without_spills(form, block_n, tmp_path):
    report = assemble(hopper_gemm(form, block_n), (9, 0), tmp_path)
    assert report.faults() == []
    # 65536 registers for 384 threads; `setmaxnreg` moves them to the consumers.
    assert report.registers <= 168


@pytest.mark.parametrize(("form", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_expected_bytes_are_the_references(form, dtype):
    problem = make_problem(70, 34, 96, form)
    product = matmul(problem.a.view(dtype), problem.b.view(dtype), None)
    want = np.asarray(product, np.float32).astype(ml_dtypes.bfloat16).reshape(-1)
    np.testing.assert_array_equal(problem.expected(), want.view(np.uint32))


def test_expected_bytes_are_the_wgmmas():
    problem = make_problem(64, 64, 128, "e4m3")
    product = wgmma_tile("e4m3", "shared", problem.a, problem.b, None).view(np.float32)
    want = product.astype(ml_dtypes.bfloat16).reshape(-1).view(np.uint32)
    np.testing.assert_array_equal(problem.expected(), want)


# Partial tiles in every direction; more tiles than blocks; fewer steps than stages.
@pytest.mark.parametrize(
    ("form", "shape", "block_n", "blocks"),
    [
        ("e4m3", (130, 300, 1056), 256, 2),
        ("f16", (257, 136, 80), 128, 4),
        ("bf16", (16, 8, 640), 8, 1),
    ],
)
def test_fast_engine_computes_the_expected_bytes(form, shape, block_n, blocks):
    problem = make_problem(*shape, form, block_n=block_n)
    kernel, arguments = hopper_gemm(form, block_n), problem.arguments()
    emulate.launch(kernel, blocks, THREADS, *arguments, shared_bytes=kernel.shared_bytes)
    np.testing.assert_array_equal(arguments[2], problem.expected())
