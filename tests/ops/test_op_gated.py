"""P1, P3, P5: the gated activation equals the reference byte for byte, also a caller's function."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nbmoe import ops
from nbmoe.activation import GatedActivation
from nbmoe.backend import simulator_enabled
from tests.ops.compare import assert_equals_reference, assert_same
from tests.ops.slot_properties import spoil
from tests.strategies import VALUES, activations

activate = ops.gated_activation
HALF, THIRD = np.float32(0.5), np.float32(1 / 3)


def polynomial(gate: Any, up: Any) -> Any:
    """A caller's activation, in which a contraction would show."""
    return (gate * gate * THIRD + gate * HALF) * up + THIRD


def branching(gate: Any, up: Any) -> Any:
    """Another one, with a branch."""
    if gate > HALF:
        return gate * up
    return -up / (gate + HALF)


ACTIVATIONS = {
    "silu": None,
    "silu to 3": GatedActivation(limit=3.0),
    "swigluoai": GatedActivation("swigluoai", alpha=1.702, limit=7.0),
    "gelu_tanh": GatedActivation("gelu_tanh"),
    "polynomial": GatedActivation(gated_activation_fn=polynomial),
    "branching": GatedActivation(gated_activation_fn=branching),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_equals_reference(kernels: Any, name: str, interleaved: bool) -> None:
    for kind in VALUES[:2] if kernels.name == "cudasim" else VALUES:
        rows, d = (2, 16) if kernels.name == "cudasim" else (9, 2064)
        if name == "branching":
            kind = "gauss"  # 0 / 0 is no canonical NaN on a CPU
        x = activations(np.random.default_rng(1), rows, 2 * d, kind)
        assert_equals_reference(
            kernels,
            activate,
            (((rows, d), ml_dtypes.bfloat16),),
            x,
            activation=ACTIVATIONS[name],
            interleaved=interleaved,
        )


@pytest.mark.parametrize("name", ["silu", "swigluoai", "gelu_tanh"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_row_alone_equals_row_in_batch(kernels: Any, name: str, interleaved: bool) -> None:
    """P3: also beside rows of NaN and infinity."""
    rng = np.random.default_rng(2)
    options = {"activation": ACTIVATIONS[name], "interleaved": interleaved}
    x = activations(rng, 6, 96, "gauss")
    rows = kernels(activate, x, **options)
    for at in range(len(x)):
        neighbours = spoil(rng, x, np.delete(np.arange(len(x)), at))
        assert_same(kernels(activate, x[at : at + 1], **options)[0], rows[at])
        assert_same(kernels(activate, neighbours, **options)[at], rows[at])


@pytest.mark.skipif(simulator_enabled(), reason="the simulator replaces the compiler")
def test_a_sum_of_products_is_not_contracted() -> None:
    """On the GPU as on the CPU `a * b + c` rounds twice: in NVVM's output and in the linker's."""
    from cuda.bindings import nvjitlink

    from nbmoe_kernels import compiler
    from nbmoe_kernels.gated_activate import make_gated_activate

    kernel, cc = make_gated_activate(polynomial), (9, 0)
    ltoir = compiler._library(kernel).get_ltoir(compiler._target(cc))
    options = [f"-arch={compiler.architecture(cc)}", "-ptx", *compiler.LINK_OPTIONS]
    handle = nvjitlink.create(len(options), options)
    nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, ltoir, len(ltoir), "kernel")
    nvjitlink.complete(handle)
    linked = bytearray(nvjitlink.get_linked_ptx_size(handle))
    nvjitlink.get_linked_ptx(handle, linked)
    nvjitlink.destroy(handle)
    for ptx in (compiler.compile_ptx(kernel, cc), linked.decode()):
        assert "mul.rn.f32" in ptx and "add.rn.f32" in ptx
        assert "fma.rn.f32" not in ptx


def test_no_rows(kernels: Any) -> None:
    assert kernels(activate, np.zeros((0, 64), np.uint16)).shape == (0, 32)
