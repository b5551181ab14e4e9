"""The device functions of gated activations against the reference, and that against float64."""

import math
from typing import Any

import numpy as np
import pytest
from numba import cuda
from numpy.typing import NDArray

from nbmoe import backend as backends
from nbmoe.activation import GatedActivation
from nbmoe.arrays import describe, to_numpy
from nbmoe.ops.launch import flat
from nbmoe.reference import oracle
from nbmoe.reference.activation import gated_activation
from nbmoe_kernels.activation import make_gated_activation
from nbmoe_kernels.kernel import Kernel, kernel

THREADS = 256
OAI = GatedActivation("swigluoai", alpha=1.702, limit=7.0)
ACTIVATIONS = (
    GatedActivation(),
    GatedActivation(limit=10.0),
    OAI,
    GatedActivation("swigluoai", alpha=-0.5, limit=0.25),
    GatedActivation("gelu_tanh"),
)
UPS = (1.0, -2.5, 0.0, 7.25, -1e30, 3.4e38, np.inf, -np.inf, np.nan)


def make_kernel(activation: GatedActivation) -> Kernel:
    activate = make_gated_activation(activation.kernel_activation)

    @kernel(
        "global f32* z, global f32* gate, global f32* up, u32 count, f32 alpha, f32 limit",
        threads=THREADS,
        name="activates",
    )
    def activates(z, gate, up, count, alpha, limit):
        block = np.uint32(np.uint32(cuda.blockIdx.x) * np.uint32(THREADS))
        i = np.uint32(block + np.uint32(cuda.threadIdx.x))
        if i < count:
            at = np.uint64(i)
            z[at] = activate(gate[at], up[at], alpha, limit)

    return activates


def on_backend(kernels: Any, activation: GatedActivation, gate: Any, up: Any) -> Any:
    """z of every pair, computed by a kernel with a thread a pair."""
    z = kernels.put(np.empty_like(gate))
    operands = [describe("test", "x", x) for x in (z, kernels.put(gate), kernels.put(up))]
    chosen = backends.resolve(kernels.name, api="test")
    scalars = (len(gate), np.float32(activation.alpha), np.float32(activation.limit))
    make_kernel(activation).launch(
        backends.executor(kernels.name, operands[0].device),
        (-(-len(gate) // THREADS), 1, 1),
        *flat(chosen, *operands),
        *scalars,
    )
    return to_numpy(z)


def all_bf16() -> NDArray[np.float32]:
    """Every bfloat16 value; the simulator takes each 211th."""
    step = 211 if backends.simulator_enabled() else 1
    return (np.arange(0, 1 << 16, step, dtype=np.uint32) << 16).view(np.float32)


def bits(x: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Bit patterns, one for all NaN."""
    return np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_device_function_equals_the_reference(kernels: Any, activation: GatedActivation) -> None:
    gate = np.tile(all_bf16(), len(UPS))
    up = np.repeat(np.float32(UPS), len(gate) // len(UPS))
    got = on_backend(kernels, activation, gate, up)
    np.testing.assert_array_equal(bits(got), bits(gated_activation(gate, up, activation)))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_no_gate_but_nan_gives_nan(activation: GatedActivation) -> None:
    gate = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    for up in np.float32([1, -2.5, 3e38]):
        z = gated_activation(gate, np.full_like(gate, up), activation)
        np.testing.assert_array_equal(np.isnan(z), np.isnan(gate))
        if activation.alpha >= 0:
            assert (z[gate == -np.inf] == 0).all()
            wide = np.array([-np.inf]), np.array([float(up)])
            assert (oracle.gated_activation(*wide, activation) == 0).all()
    z = gated_activation(gate, np.full_like(gate, np.nan), activation)
    assert np.isnan(z).all()


def test_known_values() -> None:
    def one(gate: float, up: float, activation: GatedActivation) -> float:
        return float(gated_activation(np.float32([gate]), np.float32([up]), activation)[0])

    limited = GatedActivation(limit=10.0)
    # min(100, 10) * sigmoid(10) * clamp(-100, -10, 10)
    assert one(100, -100, limited) == pytest.approx(-99.9955, abs=5e-5)
    assert one(3, 0, OAI) == pytest.approx(2.98193, abs=5e-6)
    # The gate has no lower clamp: silu(-10.5) and not silu(-10).
    assert one(-10.5, 1, limited) == pytest.approx(-10.5 / (1 + math.exp(10.5)), rel=1e-6)
    assert one(1, 1, GatedActivation("gelu_tanh")) == pytest.approx(0.8411920, abs=1e-6)
    assert one(-1, 1, GatedActivation("gelu_tanh")) == pytest.approx(-0.1588080, abs=1e-6)
    assert one(8, 9, OAI) == pytest.approx(7 / (1 + math.exp(-1.702 * 7)) * 8, rel=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_error_against_float64(activation: GatedActivation) -> None:
    """Relative to the result; for gelu's tanh, which cancels, relative to gate * up."""
    rng = np.random.default_rng(0)
    gate, up = (rng.standard_normal((2, 200_000)) * [[8.0], [4.0]]).astype(np.float32)
    z = gated_activation(gate, up, activation).astype(np.float64)
    exact = oracle.gated_activation(gate.astype(np.float64), up.astype(np.float64), activation)
    if activation.fused_activation == "gelu_tanh":
        bound = 2.0**-21 * np.abs(gate * up)
    else:
        # An error of the exponent of exp is a relative one of the result.
        exponent = np.abs(activation.alpha * gate.astype(np.float64))
        bound = (4e-7 + 2.0**-24 * exponent) * np.abs(exact)
    assert (np.abs(z - exact) <= bound).all()


def softplus_gate(gate: Any, up: Any) -> Any:
    return max(gate, np.float32(0)) * up


def test_a_function_runs_in_kernels_and_in_the_reference(kernels: Any) -> None:
    activation = GatedActivation(gated_activation_fn=softplus_gate)
    gate = all_bf16()[::7]
    gate = gate[np.isfinite(gate)]
    up = np.full_like(gate, 0.75)
    got = on_backend(kernels, activation, gate, up)
    expected = gated_activation(gate, up, activation)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(got, np.maximum(gate, 0) * up)
