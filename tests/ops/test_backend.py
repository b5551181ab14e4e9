"""P11: which backend runs, why, and what is said when one cannot."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nbmoe import backend, gpus
from nbmoe.arrays import describe
from nbmoe.backend import explain, resolve
from nbmoe.errors import ArgTypeError, ConfigError, DeviceError, UnsupportedError
from nbmoe_kernels.kernel import Kernel, kernel
from tests.bad_inputs.case import FakeDeviceArray

HOST = describe("t", "x", np.zeros(4, np.uint8))
GPU = describe("t", "x", FakeDeviceArray((4,), "|u1"))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what is installed: GPUs, their problem, packages, the simulator."""

    def set_world(
        capability: tuple[int, int] | None = None, missing: str = "", simulator: bool = False
    ) -> None:
        found = (gpus.Gpu(0, "Card", capability),) if capability else ()
        why = "" if found else "no NVIDIA driver (libcuda.so.1 is not found)"
        monkeypatch.setattr(backend, "find_gpus", lambda: (found, why))
        monkeypatch.setattr(backend, "missing_packages", lambda: missing)
        monkeypatch.setattr(backend, "simulator_enabled", lambda: simulator)

    set_world()
    return set_world


def test_automatic_without_operands(world: Any) -> None:
    assert resolve().name == "emulate" and "no NVIDIA driver" in resolve().reason
    world(capability=(9, 0))
    assert resolve().name == "gpu"
    world(capability=(9, 0), simulator=True)
    assert resolve().name == "cudasim"


def test_operands_decide(world: Any) -> None:
    """Host arrays stay on the host though a GPU is there."""
    world(capability=(9, 0))
    assert resolve(arrays=[HOST]).name == "emulate"
    assert resolve(arrays=[GPU]).name == "gpu"
    world(simulator=True)
    assert resolve(arrays=[HOST]).name == "cudasim"


def test_argument_beats_variable(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBMOE_BACKEND", "reference")
    assert resolve().name == "reference" and "NBMOE_BACKEND" in resolve().reason
    assert resolve("emulate").name == "emulate"
    assert resolve(arrays=[HOST]).name == "reference"
    monkeypatch.setenv("NBMOE_BACKEND", " ")
    assert resolve().name == "emulate"


def test_too_old_a_gpu(world: Any) -> None:
    """M24."""
    world(capability=(7, 5))
    with pytest.raises(UnsupportedError, match=r"'gpu': Card has compute capability 7\.5; .* 8\.0"):
        resolve("gpu")
    assert resolve().name == "emulate" and "7.5" in resolve().reason


def test_operands_on_an_old_gpu(world: Any) -> None:
    world(capability=(7, 5))
    with pytest.raises(UnsupportedError, match=r"x: expected .*8\.0\+, got Card has"):
        backend.check_reach("api", "gpu", {"x": GPU})


@pytest.mark.parametrize(
    ("kwargs", "name", "reason", "remedy"),
    [
        ({}, "gpu", "no NVIDIA driver", "use backend='emulate'"),
        ({"capability": (9, 0), "missing": "numba_cuda"}, "gpu", "numba_cuda not", "pip install"),
        ({"capability": (9, 0), "simulator": True}, "gpu", "is the simulator", "without NUMBA_EN"),
        ({}, "cudasim", "not the simulator", "set NUMBA_ENABLE_CUDASIM=1 before Python starts"),
    ],
)
def test_explicit_backend_that_cannot_run(
    world: Any, kwargs: dict[str, Any], name: str, reason: str, remedy: str
) -> None:
    world(**kwargs)
    with pytest.raises(DeviceError) as caught:
        resolve(name, api="op")
    assert str(caught.value).startswith("op(): backend: expected a backend that can run")
    assert reason in str(caught.value) and remedy in str(caught.value)
    assert reason in explain() and remedy in explain()


def test_explain(world: Any) -> None:
    lines = explain().splitlines()
    assert lines[0].startswith("backend: emulate (no usable GPU")
    assert [line.split()[0] for line in lines[1:]] == list(backend.NAMES)
    assert explain("reference").startswith("backend: reference (backend='reference')")


def test_bad_names(world: Any) -> None:
    with pytest.raises(ConfigError, match=r"one of .*'gpu', 'emulate', 'cudasim', 'reference'"):
        resolve("tpu")
    with pytest.raises(ArgTypeError, match="int 1"):
        resolve(1)  # type: ignore[arg-type]


def test_simulator_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before numba is imported the variable says it, afterwards numba does."""
    monkeypatch.delitem(sys.modules, "numba.core.config", raising=False)
    for value, enabled in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", value)
        assert backend.simulator_enabled() is enabled
    monkeypatch.setitem(sys.modules, "numba.core.config", SimpleNamespace(ENABLE_CUDASIM=1))
    assert backend.simulator_enabled() is True


def make_kernel() -> Kernel:
    @kernel(
        "global u32* words, global f32* factors, i32 shift, f32 scale", threads=32, name="probe"
    )
    def probe(words: Any, factors: Any, shift: Any, scale: Any) -> None: ...

    return probe


@pytest.mark.parametrize(("name", "engine"), [("emulate", "fast"), ("cudasim", "interpreted")])
def test_host_executor(name: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels get flat arrays and scalars of exactly the declared types; empty ones get memory."""
    calls: list[Any] = []
    fake = SimpleNamespace(launch=lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setitem(sys.modules, "emulate", fake)
    probe, codes = make_kernel(), np.arange(16, dtype=np.uint8).reshape(4, 4)
    backend.executor(name)(probe, (1, 2, 3), (codes, np.zeros(0, np.uint8), 3, 0.5), None)
    ((args, kwargs),) = calls
    launched, grid, threads, words, factors, shift, scale = args
    assert (launched, grid, threads) == (probe, (1, 2, 3), 32)
    assert words.dtype == np.uint32 and words.shape == (4,) and np.shares_memory(words, codes)
    assert factors.dtype == np.float32 and factors.shape == (1,)
    assert type(shift) is np.int32 and type(scale) is np.float32
    assert kwargs == {"shared_bytes": 0, "engine": engine}
