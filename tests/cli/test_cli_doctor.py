"""`nbmoe doctor`: names what is missing and the command that mends it."""

import pytest

from nbmoe.cli import doctor
from nbmoe.gpus import Gpu
from nbmoe_kernels.catalog import catalog

KERNELS = (
    "moe_create_indices",
    "quantize_grouped_nvfp4",
    "matmul_grouped_nvfp4",
    "matmul_grouped_mxfp8_mxfp4",
    "matmul_grouped_swiglu_mxfp4",
    "moe_finalize",
)


def test_kernels_are_the_catalogs():
    """One line for all tile shapes and capacities of a kernel; none is left out."""
    listed = doctor.kernel_capabilities()
    assert set(KERNELS) <= set(listed)
    for kernel in catalog():
        assert any(kernel.name.startswith(name) for name in listed)
    assert not any("sm80" in name for name in listed)


@pytest.fixture
def machine(monkeypatch):
    """Makes the doctor see the given GPUs and a driver for CUDA 13.0."""

    def pretend(*gpus):
        found = (gpus, "" if gpus else "no NVIDIA driver")
        monkeypatch.setattr("nbmoe.gpus.find_gpus", lambda: found)
        monkeypatch.setattr("nbmoe.backend.find_gpus", lambda: found)
        monkeypatch.setattr("nbmoe.backend.simulator_enabled", lambda: False)
        monkeypatch.setattr(doctor, "_driver_version", lambda: (13, 0))

    monkeypatch.delenv("NBMOE_BACKEND", raising=False)
    return pretend


def row(text, name):
    return next(line.split()[1:] for line in text.splitlines() if line.split()[:1] == [name])


def test_without_a_gpu(nbmoe, machine):
    machine()
    result = nbmoe("doctor")
    assert (result.status, result.err) == (0, "")
    assert "none: no NVIDIA driver" in result.out
    assert "chosen here: emulate" in result.out
    assert row(result.out, "numpy")[0].startswith("2.")
    for operation in KERNELS:
        assert row(result.out, operation) == ["yes", "no"]  # emulate, cudasim


def test_kernels_on_two_gpus(nbmoe, machine):
    machine(Gpu(0, "NVIDIA H200", (9, 0)), Gpu(1, "Tesla T4", (7, 5)))
    result = nbmoe("doctor")
    assert result.status == 0
    assert "chosen here: gpu" in result.out
    assert "0: NVIDIA H200, compute capability 9.0" in result.out
    for operation in KERNELS:
        assert row(result.out, operation) == ["yes", "needs", "8.0", "yes", "no"]
    assert "Tesla T4 has compute capability 7.5" in result.out.split("To mend")[1]


def test_driver_older_than_the_compiler(nbmoe, machine, monkeypatch):
    machine(Gpu(0, "NVIDIA H200", (9, 0)))
    monkeypatch.setattr(doctor, "_driver_version", lambda: (12, 8))
    versions = {"nvidia-nvjitlink": "13.0.88", "numpy": "2.4.6"}
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, ""))
    assert "pip install 'nbmoe[cu12]'" in nbmoe("doctor").out.split("To mend")[1]


def test_numpy_too_new(nbmoe, machine, monkeypatch):
    machine()
    monkeypatch.setattr(doctor, "_version", lambda name: "2.5.0" if name == "numpy" else "1.0")
    assert "pip install 'numpy<2.5'" in nbmoe("doctor").out.split("To mend")[1]


def test_missing_package_is_named(nbmoe, machine, monkeypatch):
    machine(Gpu(0, "NVIDIA H200", (9, 0)))
    monkeypatch.setattr("nbmoe.backend.missing_packages", lambda: "numba_cuda")
    result = nbmoe("doctor")
    assert "numba_cuda not installed" in result.out
    assert "pip install 'nbmoe[cu13]'" in result.out
    assert row(result.out, "moe_finalize") == ["no", "yes", "no"]


@pytest.mark.parametrize("value", ["gpu", "tpu"])
def test_backend_that_cannot_run_is_status_1(nbmoe, machine, monkeypatch, value):
    machine()
    monkeypatch.setenv("NBMOE_BACKEND", value)
    result = nbmoe("doctor")
    assert result.status == 1
    assert "chosen here: none" in result.out and value in result.out


def test_really_runs_here(python_m_nbmoe):
    result = python_m_nbmoe("doctor")
    assert result.status == 0, result.out + result.err
    assert "Backends" in result.out and "Kernels" in result.out


def test_simulator_process(python_m_nbmoe):
    result = python_m_nbmoe("doctor", NUMBA_ENABLE_CUDASIM="1")
    assert result.status == 0, result.out + result.err
    assert "chosen here: cudasim" in result.out
    assert row(result.out, "moe_finalize") == ["yes", "yes"]
