"""Ops together in kernels: the fast engine and a GPU give the expected bytes."""

import numpy as np
import pytest
from numba import config

import emulate
from emulate.bench.hopper_gemm import hopper_gemm, make_problem
from nbmoe.backend import problem as backend_problem
from tests.kernels.assemble import assemble
from tests.kernels.op_kernels import CASES, encode

EACH_CASE = pytest.mark.parametrize("make", CASES, ids=lambda m: m.__name__)


@pytest.mark.skipif(config.ENABLE_CUDASIM, reason="the simulator replaces the compiler")
@EACH_CASE
def test_assembles_without_warnings(make, tmp_path):
    case = make()
    assert assemble(case.kernel, case.kernel.min_cc, tmp_path).faults() == []


@EACH_CASE
def test_fast_engine_gives_the_expected_bytes(make):
    case = make()
    held = {n: a for n, a in case.arrays.items() if not isinstance(a, tuple)}
    maps = {
        n: encode(held[a[0]], held[a[0]].ctypes.data, a[1], "emulator")
        for n, a in case.arrays.items()
        if isinstance(a, tuple)
    }
    arguments = [maps.get(p.name, held.get(p.name)) for p in case.kernel.params if p.is_pointer]
    emulate.launch(
        case.kernel,
        case.blocks,
        case.kernel.threads,
        *(a.reshape(-1) for a in arguments),
        *case.scalars,
        shared_bytes=case.kernel.shared_bytes,
        resident="all",
    )
    for name, want in case.expected.items():
        np.testing.assert_array_equal(held[name], want)


def launch_on_gpu(kernel, blocks, arrays, maps, scalars):
    """Run a kernel on device copies of its arrays; what the arrays hold afterwards."""
    from numba import cuda

    from nbmoe_kernels.launcher import GpuExecutor

    held = {name: cuda.to_device(array.reshape(-1)) for name, array in arrays.items()}
    for name, (array, box_rows) in maps.items():
        address = held[array].device_ctypes_pointer.value
        held[name] = cuda.to_device(encode(arrays[array], address, box_rows, "gpu"))
    pointers = [p.name for p in kernel.params if p.is_pointer]
    addresses = [held[name].device_ctypes_pointer.value for name in pointers]
    GpuExecutor()(kernel, (blocks, 1, 1), (*addresses, *scalars), None)
    cuda.synchronize()
    return {n: held[n].copy_to_host().reshape(arrays[n].shape) for n in arrays}


needs_gpu = pytest.mark.skipif(backend_problem("gpu") is not None, reason="no usable GPU")


def needs_capability(kernel):
    from nbmoe_kernels.launcher import GpuExecutor

    cc = GpuExecutor().cc
    if cc < kernel.min_cc or cc >= (10, 0):
        pytest.skip(f"{kernel.name} is for Hopper, this GPU has {cc}")


@pytest.mark.gpu
@needs_gpu
@EACH_CASE
def test_gpu_gives_the_expected_bytes(make):
    case = make()
    needs_capability(case.kernel)
    held = {n: a for n, a in case.arrays.items() if not isinstance(a, tuple)}
    maps = {n: a for n, a in case.arrays.items() if isinstance(a, tuple)}
    after = launch_on_gpu(case.kernel, case.blocks, held, maps, case.scalars)
    for name, want in case.expected.items():
        np.testing.assert_array_equal(after[name], want)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("form", "shape", "block_n"),
    [
        ("e4m3", (1030, 1300, 2080), 256),
        ("f16", (257, 136, 1040), 128),
        ("bf16", (500, 512, 640), 256),
    ],
)
def test_gpu_computes_the_gemm_of_the_model(form, shape, block_n):
    problem, kernel = make_problem(*shape, form, block_n=block_n), hopper_gemm(form, block_n)
    needs_capability(kernel)
    expected = problem.expected()
    arrays = {"a": problem.a.view(np.uint8), "b": problem.b.view(np.uint8)}
    arrays["out"] = np.full_like(expected, 0xFFFFFFFF)
    maps = {"map_a": ("a", 128), "map_b": ("b", block_n)}
    after = launch_on_gpu(kernel, 8, arrays, maps, problem.sizes())
    np.testing.assert_array_equal(after["out"], expected)
