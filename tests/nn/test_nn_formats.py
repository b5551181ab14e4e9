"""P1, P4: in every format a layer is the specification's bytes, near float64, however it runs."""

import dataclasses

import pytest

from nbmoe.activation import GatedActivation
from nbmoe.config import QuantConfig
from nbmoe.nn import make_layer, random_tokens
from nbmoe.nn.build import quant_config_of
from nbmoe.nn.comparison import compare_with_float64
from nbmoe.nn.moe_quantized import MoEQuantized
from tests.nn.weights import FORMATS, random_layer, random_stack

BLOCK_FORMATS = [pair for pair in FORMATS if pair[0] in ("nvfp4", "mxfp8") or pair[1] == "mxfp8"]
BLOCK_FORMATS.append(("mxfp4", ""))
SWIGLUOAI = GatedActivation("swigluoai", alpha=1.702, limit=7.0)
INNER_ERROR = {
    "nvfp4": (0.06, 0.13),
    "mxfp4": (0.1, 0.22),
    "mxfp8": (0.015, 0.045),
    "bf16": (1.5e-3, 5e-3),
    "fp8_block": (0.009, 0.035),
    "fp8_row": (0.009, 0.035),
    "fp8_tensor": (0.015, 0.045),
}
"""What the activation's format costs: a smaller error would be that of another format."""


def same_bytes(found, expected):
    for field in dataclasses.fields(expected):
        left, right = getattr(found, field.name), getattr(expected, field.name)
        if field.name == "seconds":
            assert list(left) == list(right)
        elif right is None:
            assert left is None, field.name
        else:
            assert left.tobytes() == right.tobytes(), field.name


def near_float64(weights, x, trace):
    errors = compare_with_float64(weights, x, trace)
    assert errors.arithmetic < 6e-3
    low, high = INNER_ERROR[weights.activation_format]
    assert low < errors.inner < high


def chained_config(weights):
    config = quant_config_of(weights)
    assert isinstance(config, QuantConfig)
    return dataclasses.replace(config, can_use_fused_swiglu=False)


@pytest.mark.parametrize("pair", FORMATS, ids="-".join)
def test_layer_equals_reference_and_is_near_float64(pair, backend):
    tokens, experts = (2, 2) if backend == "cudasim" else (9, 4)  # it takes seconds a block
    weights = random_layer(1, *pair, biased=True, experts=experts)
    x = random_tokens(tokens, 64, seed=2)
    layer = make_layer(weights, backend=backend)
    trace = layer.trace(x)
    assert layer.stages == tuple(trace.seconds)
    same_bytes(trace, make_layer(weights, backend="reference").trace(x))
    near_float64(weights, x, trace)
    assert layer(x).tobytes() == trace.output.tobytes()


@pytest.mark.parametrize("pair", BLOCK_FORMATS, ids="-".join)
def test_fused_equals_chained(pair, fast_backend):
    weights = random_layer(3, *pair, biased=True)
    if pair[0] == "mxfp8":
        weights = dataclasses.replace(weights, activation=SWIGLUOAI)
    x = random_tokens(7, 64, seed=4)
    fused = MoEQuantized(weights, backend=fast_backend)
    chained = MoEQuantized(weights, quant_config=chained_config(weights), backend=fast_backend)
    assert "gate_up" not in fused.stages and "gate_up" in chained.stages
    found, expected = fused.trace(x), chained.trace(x)
    for name in ("inner_codes", "inner_scales", "down", "output"):
        assert getattr(found, name).tobytes() == getattr(expected, name).tobytes(), name


@pytest.mark.parametrize("pair", [("mxfp8", ""), ("fp8_block", ""), ("bf16", "")], ids="-".join)
def test_shared_expert_as_slot_0_equals_apart(pair, fast_backend):
    shared = random_stack(5, *pair, experts=1)
    weights = random_layer(6, *pair, shared=shared)
    x = random_tokens(6, 64, seed=7)
    make = type(make_layer(weights, backend="reference"))
    fused = make(weights, fused_shared_expert=True, backend=fast_backend)
    apart = make(weights, fused_shared_expert=False, backend=fast_backend)
    assert fused.shared_slot and "shared experts" in apart.stages
    assert fused(x).tobytes() == apart(x).tobytes()
    for layer in (fused, apart):
        assert compare_with_float64(weights, x, layer.trace(x)).arithmetic < 6e-3


@pytest.mark.parametrize("pair", FORMATS, ids="-".join)
def test_shared_experts_apart_are_near_float64(pair, fast_backend):
    """Against float64 matmuls of their own activations, so that nothing vouches for itself."""
    shared = random_stack(8, *pair, experts=1, moe=64, biased=True)
    weights = random_layer(9, *pair, shared=shared, biased=True)
    x = random_tokens(6, 64, seed=10)
    trace = make_layer(weights, backend=fast_backend).trace(x)
    near_float64(weights, x, trace)
    expected = make_layer(weights, backend="reference").trace(x)
    assert trace.shared.tobytes() == expected.shared.tobytes()
    assert trace.output.tobytes() == expected.output.tobytes()
    stack = dataclasses.replace(shared, down=shared.down[:, ::-1].copy())
    wrong = dataclasses.replace(weights, shared=stack)
    assert compare_with_float64(wrong, x, trace).arithmetic > 0.1
