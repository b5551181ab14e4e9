"""`StackedMoE`: every stored form gives the bytes of the layer with the same weights; P10."""

import dataclasses

import numpy as np
import pytest

from nbmoe.activation import GatedActivation
from nbmoe.backend import simulator_enabled
from nbmoe.config import QuantConfig
from nbmoe.errors import ArgTypeError, ConfigError, DTypeError, ShapeError
from nbmoe.layouts import interleave_scales
from nbmoe.nn import GateUpFormat, MoEGate, StackedMoE, make_layer, random_tokens
from tests.nn.weights import random_layer, random_router, random_stack

CONCATENATED, INTERLEAVED = GateUpFormat
CONFIGS = {
    "bf16": lambda: None,
    "mxfp4": QuantConfig.mxfp4,
    "mxfp8": QuantConfig.mxfp8,
    "fp8_row": QuantConfig.rowwise_fp8,
    "fp8_block": QuantConfig.blockscaled_fp8,
}
CASES = [("bf16", ""), ("mxfp4", "bf16"), ("mxfp4", "mxfp8"), ("mxfp8", "")]
CASES += [("fp8_row", ""), ("fp8_block", "")]


def interleave(array):
    """Gate and up halves of axis 1, alternating."""
    gate, up = np.split(array, 2, axis=1)
    return np.ascontiguousarray(np.stack([gate, up], axis=2).reshape(array.shape))


def build(weights, backend, gate_up_format=CONCATENATED, **options):
    """A StackedMoE of the weights as a checkpoint stores them."""
    fields = {
        name: getattr(weights, name)
        for name in ("gate_up", "gate_up_scales", "gate_up_bias", "down", "down_scales")
    }
    if gate_up_format is INTERLEAVED:
        for name in ("gate_up", "gate_up_scales", "gate_up_bias"):
            if fields[name] is not None and not (name, weights.format) == (
                "gate_up_scales",
                "fp8_block",
            ):
                fields[name] = interleave(fields[name])
    if weights.format in ("bf16", "fp8_row", "fp8_block"):
        for name in ("gate_up", "down"):
            fields[name] = np.ascontiguousarray(fields[name].transpose(0, 2, 1))
    if weights.format == "fp8_block":
        for name in ("gate_up_scales", "down_scales"):
            fields[name] = np.ascontiguousarray(fields[name].transpose(0, 2, 1))
    return StackedMoE(
        MoEGate.of_router(weights.router, backend=backend),
        fields.pop("gate_up"),
        fields.pop("down"),
        **fields,
        down_bias=weights.down_bias,
        gate_up_format=gate_up_format,
        mxfp8_activations=weights.activation_format == "mxfp8" and weights.format == "mxfp4",
        backend=backend,
        **{"quant_config": CONFIGS[weights.format](), "activation": weights.activation, **options},
    )


def small_layer(pair, **fields):
    sizes = {"hidden": 64, "moe": 128 if pair[0] == "fp8_block" else 32, "experts": 2}
    return random_layer(1, *pair, biased=True, **sizes, **fields)


@pytest.mark.parametrize("gate_up_format", GateUpFormat)
@pytest.mark.parametrize("pair", CASES, ids="-".join)
def test_equals_the_layer_of_the_same_weights(pair, gate_up_format, fast_backend):
    weights = small_layer(pair)
    if pair[0] == "fp8_block":  # blocks of interleaved rows hold gates and ups
        weights.gate_up_scales[:, 1] = weights.gate_up_scales[:, 0]
    x = random_tokens(3, 64, seed=2)
    layer = build(weights, fast_backend, gate_up_format)
    assert layer(x).tobytes() == make_layer(weights, backend="reference")(x).tobytes()


@pytest.mark.parametrize("gate_up_format", GateUpFormat)
@pytest.mark.parametrize("flag", [True, False])
def test_w4a8_fused_and_chained(flag, gate_up_format, fast_backend):
    weights = small_layer(("mxfp4", "mxfp8"))
    x = random_tokens(3, 64, seed=3)
    config = QuantConfig.mxfp4(can_use_fused_swiglu=flag)
    layer = build(weights, fast_backend, gate_up_format, quant_config=config)
    assert ("gate_up" in layer.stages) is not flag
    assert layer(x).tobytes() == make_layer(weights, backend="reference")(x).tobytes()


def test_scales_that_are_tiles_already():
    weights = random_layer(2, "mxfp4", "mxfp8", hidden=128, moe=128)
    x = random_tokens(3, 128, seed=3)
    tiles = {f"{leg}_scales": getattr(weights, f"{leg}_scales") for leg in ("gate_up", "down")}
    tiles = {name: interleave_scales(array) for name, array in tiles.items()}
    layer = StackedMoE(
        MoEGate.of_router(weights.router, backend="reference"),
        weights.gate_up,
        weights.down,
        **tiles,
        quant_config=QuantConfig.mxfp4(),
        mxfp8_activations=True,
        backend="reference",
    )
    assert layer(x).tobytes() == make_layer(weights, backend="reference")(x).tobytes()


def relu_gate(gate, up):
    """A gated activation that has no name."""
    return (gate if gate > 0 else np.float32(0)) * up


@pytest.mark.parametrize("pair", [("bf16", ""), ("mxfp4", "mxfp8")], ids="-".join)
def test_activation_of_the_user(pair, fast_backend):
    weights = small_layer(pair)
    x = random_tokens(3, 64, seed=4)
    layer = build(weights, fast_backend, activation=None, gated_activation_fn=relu_gate)
    assert "gate_up" in layer.stages
    mine = GatedActivation(gated_activation_fn=relu_gate)
    same = dataclasses.replace(weights, activation=mine)
    assert layer(x).tobytes() == make_layer(same, backend="reference")(x).tobytes()


def test_weight_on_the_input(fast_backend):
    """Llama 4: an expert sees bf16(w * x), and its output is summed as it is."""
    router = random_router(5, 2, 64, 1, scoring="sigmoid_after_topk", renormalize=False)
    weights = random_layer(6, "bf16", experts=2, router=router)
    x = random_tokens(3, 64, seed=5)
    layer = build(weights, fast_backend, apply_router_weight_first=True)
    trace = layer.trace(x)
    scaled = (x.astype(np.float32) * trace.topk_weights).astype(x.dtype)
    order = trace.token_expert_order
    assert trace.rows.tobytes() == scaled[order].tobytes()
    assert (trace.output[order] == trace.down).all()


def test_shared_experts(fast_backend):
    shared = random_stack(7, "bf16", experts=1, moe=64)
    weights = small_layer(("fp8_row", ""), shared=shared)
    x = random_tokens(3, 64, seed=6)
    layer = build(weights, fast_backend, shared_experts=shared)
    assert "shared experts" in layer.stages
    assert layer(x).tobytes() == make_layer(weights, backend="reference")(x).tobytes()


W4A8 = ("mxfp4", "mxfp8")
BAD = [
    (W4A8, {"apply_router_weight_first": True}, ConfigError, "mxfp8_activations"),
    (("mxfp8", ""), {"mxfp8_activations": True}, ConfigError, "mxfp8_activations"),
    (("bf16", ""), {"mxfp8_activations": 1}, ArgTypeError, "mxfp8_activations"),
    (("bf16", ""), {"apply_router_weight_first": 1}, ArgTypeError, "apply_router_weight_first"),
    (("bf16", ""), {"gate_up_format": "interleaved"}, ArgTypeError, "gate_up_format"),
    (("bf16", ""), {"gated_activation_fn": relu_gate}, ConfigError, "activation"),
    (("mxfp4", "bf16"), {"quant_config": QuantConfig.nvfp4()}, ConfigError, "quant_config"),
]


@pytest.mark.parametrize(("pair", "options", "error", "arg"), BAD)
def test_refused(pair, options, error, arg):
    weights = small_layer(pair)
    gate = MoEGate.of_router(weights.router, backend="reference")
    fields = {"quant_config": CONFIGS[pair[0]](), "activation": weights.activation}
    fields["mxfp8_activations"] = pair == W4A8
    with pytest.raises(error, match=rf"^StackedMoE\(\): {arg}: "):
        StackedMoE(
            gate,
            weights.gate_up,
            weights.down,
            gate_up_scales=weights.gate_up_scales,
            down_scales=weights.down_scales,
            backend="reference",
            **{**fields, **options},
        )


def test_gates_that_do_not_fit():
    weights = small_layer(("bf16", ""))
    other = MoEGate.of_router(random_router(0, 3, 64, 2), backend="reference")
    stored = [np.ascontiguousarray(w.transpose(0, 2, 1)) for w in (weights.gate_up, weights.down)]
    with pytest.raises(ShapeError, match=r"^StackedMoE\(\): gate_up: .* 3 experts"):
        StackedMoE(other, *stored, backend="reference")
    with pytest.raises(ArgTypeError, match=r"^StackedMoE\(\): gate: "):
        StackedMoE(weights.router, *stored, backend="reference")
    with pytest.raises(ShapeError, match="3 axes"):
        StackedMoE(other, stored[0][0], stored[1], backend="reference")


@pytest.mark.skipif(simulator_enabled(), reason="the simulator's process has no emulator")
def test_gate_of_another_backend():
    weights = small_layer(("bf16", ""))
    gate = MoEGate.of_router(weights.router, backend="emulate")
    with pytest.raises(ConfigError, match=r"^StackedMoE\(\): gate: expected a gate on reference"):
        StackedMoE(gate, weights.gate_up, weights.down, backend="reference")


def test_input_that_is_not_bf16():
    layer = build(small_layer(("bf16", "")), "reference")
    with pytest.raises(DTypeError, match=r"^StackedMoE\(\): x: "):
        layer(np.zeros((2, 64), np.float32))
