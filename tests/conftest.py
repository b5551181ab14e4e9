"""Hypothesis profiles, and the backends that a test runs its body on."""

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from nbmoe import arrays
from nbmoe import backend as backends
from nbmoe.arrays import to_backend, to_numpy
from nbmoe.reference import RoutingIndices
from nbmoe.validate.product_prepared import reads_prepared

# JAX would take three quarters of a GPU's memory for itself, in each process that has touched it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Kernels compile in the first example, so deadlines would only measure the compiler.
SLOW_FIRST = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=25,
    print_blob=True,
    suppress_health_check=SLOW_FIRST,
)
settings.register_profile(
    "nightly", deadline=None, max_examples=2000, print_blob=True, suppress_health_check=SLOW_FIRST
)
# The simulator interprets kernels: the same properties, on fewer examples.
settings.register_profile("simulator", settings.get_profile("ci"), max_examples=2)
DEFAULT_PROFILE = "simulator" if backends.simulator_enabled() else "ci"
settings.load_profile(os.environ.get("NBMOE_HYPOTHESIS_PROFILE", DEFAULT_PROFILE))


class Kernels:
    """Calls operations on one backend with numpy in and numpy out."""

    def __init__(self, name: str) -> None:
        self.name = name

    def put(self, value: Any) -> Any:
        """Moves arrays, and arrays in tuples, to the backend; leaves the rest."""
        if isinstance(value, np.ndarray):
            return to_backend(value, self.name)
        if isinstance(value, tuple):
            return tuple(self.put(v) for v in value)
        return with_arrays(value, self.put) if is_prepared(value) else value

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs `op`, waits for it, and returns its results on the host."""
        args = tuple(self.put(a) for a in args)
        kwargs = {key: self.put(value) for key, value in kwargs.items()}
        result = op(*args, backend=self.name, **kwargs)
        if isinstance(result, RoutingIndices):
            return RoutingIndices(*(to_numpy(r) for r in result))
        if is_prepared(result):
            return with_arrays(result, to_numpy)
        return tuple(map(to_numpy, result)) if isinstance(result, tuple) else to_numpy(result)


def is_prepared(value: Any) -> bool:
    """Whether a value is prepared weights or tokens, which hold their arrays."""
    return is_dataclass(value) and not isinstance(value, type) and hasattr(value, "data")


def with_arrays(prepared: Any, move: Callable[[Any], Any]) -> Any:
    """Prepared operands with another form of their arrays."""
    arrays = {name: getattr(prepared, name, None) for name in ("data", "scales")}
    moved = {name: move(array) for name, array in arrays.items() if array is not None}
    return replace(prepared, **moved)


def kernel_backends() -> list[Any]:
    """Backends that run kernels here; the simulator's process has only the simulator."""
    if backends.simulator_enabled():
        return ["cudasim"]
    gpu = [pytest.param("gpu", marks=pytest.mark.gpu)] if backends.problem("gpu") is None else []
    return ["emulate", *gpu]


@pytest.fixture(params=kernel_backends())
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The kernels on each backend that can run them here.

    What no kernel writes is 0 in results that an operation allocates on the host, and undefined on
    a GPU. Here it is 0 there too, so that whole results can be compared; tests with poisoned
    buffers hold kernels to what they may write.
    """
    if request.param == "gpu":
        monkeypatch.setattr(arrays, "empty", _zeroed(arrays.empty))
    return Kernels(request.param)


@pytest.fixture
def hopper_kernels(kernels: Kernels) -> Kernels:
    """The backends whose kernels read prepared operands: a GPU of another capability refuses."""
    if kernels.name == "gpu" and not reads_prepared():
        pytest.skip("the GPU is not of compute capability 9.0")
    return kernels


@pytest.fixture
def gpu_memory() -> Iterator[None]:
    """For tests of many gigabytes: one at a time, whatever process it is in.

    At the end it gives back what numba would free later.
    """
    import fcntl

    from numba import cuda

    with (Path(tempfile.gettempdir()) / "nbmoe-gpu-memory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        cuda.current_context().deallocations.clear()


def _zeroed(empty: Any) -> Any:
    def make(like: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        array = empty(like, shape, dtype)
        if hasattr(array, "copy_to_device") and array.size:
            array.copy_to_device(np.zeros(array.shape, array.dtype))
        return array

    return make


@pytest.fixture(autouse=True)
def _no_backend_variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests choose backends themselves."""
    monkeypatch.delenv(backends.VARIABLE, raising=False)
    yield
