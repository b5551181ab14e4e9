"""Every kernel compiles and assembles for every architecture, without spills or local memory.

Those that are for Hopper only have their own gate, `test_sass`.
"""

import numpy as np
import pytest
from numba import config, cuda, njit

from nbmoe_kernels.catalog import catalog
from nbmoe_kernels.catalog_sm90 import hopper_catalog
from nbmoe_kernels.compiler import architecture, compile_cubin, compile_ptx
from nbmoe_kernels.kernel import CompileError, kernel
from nbmoe_kernels.launcher import entry_symbol
from tests.kernels.assemble import assemble

ARCHITECTURES = [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]
MAX_REGISTERS = {32: 255, 128: 255, 256: 255, 512: 128}
"""Registers a thread may use for a block of that many threads to fit on an SM."""

needs_compiler = pytest.mark.skipif(
    config.ENABLE_CUDASIM, reason="the simulator replaces the compiler that this gate tests"
)


PORTABLE = [kernel for kernel in catalog() if kernel not in hopper_catalog()]


@needs_compiler
@pytest.mark.parametrize("kernel", PORTABLE, ids=lambda k: k.name)
def test_kernel_assembles_without_spills(kernel, tmp_path):
    for cc in (cc for cc in ARCHITECTURES if cc >= kernel.min_cc):
        report = assemble(kernel, cc, tmp_path)
        assert report.faults() == [], architecture(cc)
        assert report.registers <= MAX_REGISTERS[kernel.threads], architecture(cc)


@needs_compiler
def test_gate_finds_local_memory(tmp_path):
    @kernel("global u32* out, u32 i", threads=32, name="indexes_registers")
    def indexes_registers(out, i):
        values = cuda.local.array(64, np.uint32)
        for j in range(64):
            values[j] = np.uint32(out[np.uint64(j)])
        out[np.uint64(i)] = values[np.uint32(i)]

    faults = " ".join(assemble(indexes_registers, (9, 0), tmp_path).faults())
    assert "local_accesses" in faults


@needs_compiler
def test_functions_of_callers():
    """Numba's compiled functions are inlined; plain ones are refused, with Numba's reason."""

    def square(x):
        return x * x

    jitted = njit(square)

    @kernel("global f32* out", threads=32, name="calls_jitted")
    def calls_jitted(out):
        out[np.uint64(0)] = jitted(out[np.uint64(1)])

    @kernel("global f32* out", threads=32, name="calls_plain")
    def calls_plain(out):
        out[np.uint64(0)] = square(out[np.uint64(1)])

    assert "mul" in compile_ptx(calls_jitted, (9, 0))
    with pytest.raises(CompileError, match="calls_plain: "):
        compile_ptx(calls_plain, (9, 0))


@needs_compiler
def test_cubin_is_cached_by_content(tmp_path, monkeypatch):
    monkeypatch.setenv("NBMOE_CACHE_DIR", str(tmp_path))

    def make(constant):
        @kernel("global u32* out", threads=32, name="stores_constant")
        def stores_constant(out):
            out[np.uint64(0)] = np.uint32(constant)

        return stores_constant

    first = compile_cubin(make(1), (9, 0))
    assert entry_symbol(first).find("stores_constant") >= 0
    files = list(tmp_path.rglob("*.cubin"))
    assert len(files) == 1
    # The second process reads the file: marked bytes come back unchanged.
    files[0].write_bytes(first + b"marked")
    assert compile_cubin(make(1), (9, 0)) == first + b"marked"
    # Another constant, another architecture: other machine code.
    assert compile_cubin(make(2), (9, 0)) != first
    assert compile_cubin(make(1), (8, 0)) != first
    assert len(list(tmp_path.rglob("*.cubin"))) == 3


@needs_compiler
def test_kernel_refuses_an_older_architecture():
    with pytest.raises(RuntimeError, match=r"needs compute capability 8\.0, got 7\.5"):
        compile_cubin(catalog()[0], (7, 5))
