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
INNER_ERROR = {"nvfp4": 0.2, "mxfp4": 0.25, "mxfp8": 0.06, "bf16": 5e-3}
INNER_ERROR |= {"fp8_block": 0.06, "fp8_row": 0.06, "fp8_tensor": 0.15}


def same_bytes(found, expected):
    for field in dataclasses.fields(expected):
        left, right = getattr(found, field.name), getattr(expected, field.name)
        if field.name == "seconds":
            assert list(left) == list(right)
        elif right is None:
            assert left is None, field.name
        else:
            assert left.tobytes() == right.tobytes(), field.name


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
    errors = compare_with_float64(weights, x, trace)
    assert errors.arithmetic < 6e-3
    assert errors.inner < INNER_ERROR[weights.activation_format]
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
