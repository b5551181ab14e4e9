"""Machine code of the kernels that are for Hopper only: products, copies, registers, no spills."""

import re

import numpy as np
import pytest
from numba import config, cuda

from nbmoe_kernels.catalog_sm90 import hopper_catalog
from nbmoe_kernels.compiler import compile_cubin
from nbmoe_kernels.device.bulk import bulk_load
from nbmoe_kernels.device.mbarrier import mbarrier_init
from nbmoe_kernels.device.op import unroll
from nbmoe_kernels.device.sync import set_max_registers
from nbmoe_kernels.device.wgmma import wgmma, wgmma_commit, wgmma_fence, wgmma_wait
from nbmoe_kernels.kernel import kernel
from tests.kernels.machine_code import machine_code, opcodes

pytestmark = pytest.mark.skipif(
    config.ENABLE_CUDASIM, reason="the simulator replaces the compiler that this gate tests"
)
SM_REGISTERS = 65536


@pytest.mark.parametrize("kernel", hopper_catalog(), ids=lambda k: k.name)
def test_kernel_has_the_instructions_it_is_made_of(kernel, tmp_path):
    code = machine_code(kernel, tmp_path)
    # A name says how registers are handed over, how many blocks share an SM, and who multiplies.
    reallocates = re.search(r"_r\d+_\d+", kernel.name) is not None
    blocks = int(re.search(r"_b(\d+)_e\d+", kernel.name)[1])
    by_warps = "_mma" in kernel.name
    assert code.faults(reallocates=reallocates, by_warps=by_warps) == []
    # Registers are given to warps in eights a thread.
    each = -(-code.registers // 8) * 8
    assert blocks * kernel.threads * each <= SM_REGISTERS


_product, _wait = wgmma(64, "f16"), wgmma_wait(0)
_fewer = set_max_registers(104, increase=False)


def planted(fault, *, reallocates=False):
    """A kernel that copies and multiplies, but for its fault."""
    copies, multiplies = fault != "no bulk copy", fault != "no product"
    reads_early, is_local = fault == "reads early", fault == "local memory"

    @kernel(
        "global u8* source, global f32* out, u32 step",
        threads=128,
        shared_bytes=16384 + 16,
        name="planted",
        min_cc=(9, 0),
    )
    def plants(source, out, step):
        smem = cuda.shared.array(0, np.uint8, alignment=1024)
        bars = cuda.shared.array(0, np.uint64, alignment=1024)
        acc = cuda.local.array(32, np.float32)
        for i in unroll(range(32)):
            acc[i] = out[np.uint64(i)]
        if reallocates:
            _fewer()
        if copies:
            mbarrier_init(bars, np.uint32(2048), np.uint32(1))
            bulk_load(
                smem, np.uint32(0), source, np.uint64(0), np.uint32(64), bars, np.uint32(2048)
            )
        if multiplies:
            wgmma_fence()
            _product(acc, smem, np.uint32(0), smem, np.uint32(8192), np.uint32(1))
            wgmma_commit()
            if reads_early:
                acc[0] = np.float32(acc[0] + np.float32(1.0))
                wgmma_fence()
                _product(acc, smem, np.uint32(0), smem, np.uint32(8192), np.uint32(1))
                wgmma_commit()
            _wait()
        if is_local:
            out[np.uint64(32)] = acc[np.uint32(step & np.uint32(31))]
        for i in unroll(range(32)):
            out[np.uint64(i)] = acc[i]

    return plants


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("none", []),
        ("no bulk copy", ["no bulk copy (UBLKCP)"]),
        ("no product", ["no HGMMA or QGMMA"]),
        ("reads early", ["C7517", "C7511"]),
        ("local memory", ["STL found", "LDL found"]),
    ],
)
def test_gate_finds(fault, found, tmp_path):
    faults = machine_code(planted(fault), tmp_path).faults(reallocates=False)
    assert set(found) <= set(faults) and bool(found) == bool(faults)


def test_gate_finds_products_of_the_other_kind(tmp_path):
    code = machine_code(planted("none"), tmp_path)
    assert code.faults(reallocates=False, by_warps=True) == ["no HMMA", "HGMMA found"]


def test_gate_finds_registers_that_are_not_handed_over(tmp_path):
    code = machine_code(planted("none"), tmp_path)
    assert code.faults(reallocates=True) == ["USETMAXREG: 0"]
    code = machine_code(planted("none", reallocates=True), tmp_path)
    assert code.faults(reallocates=False) == ["USETMAXREG: 1"]
    assert code.faults(reallocates=True) == []


def test_the_code_is_what_is_shipped(tmp_path, monkeypatch):
    monkeypatch.setenv("NBMOE_CACHE_DIR", str(tmp_path / "cache"))
    made = planted("none")
    code = machine_code(made, tmp_path)
    (tmp_path / "shipped.cubin").write_bytes(compile_cubin(made, (9, 0)))
    assert opcodes(tmp_path / "shipped.cubin") == code.opcodes
