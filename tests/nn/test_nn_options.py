"""Options of the layers, and what they refuse (P10)."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from nbmoe import layouts, reference
from nbmoe.activation import GatedActivation
from nbmoe.config import QuantConfig
from nbmoe.errors import (
    ArgTypeError,
    ConfigError,
    DTypeError,
    LayoutError,
    ShapeError,
    UnsupportedError,
)
from nbmoe.nn import MoE, MoEQuantized, make_layer, random_tokens
from nbmoe.nn.build import quant_config_of
from nbmoe.nn.comparison import compare_with_float64
from tests.nn.weights import random_layer, random_stack

BF16 = ml_dtypes.bfloat16


def test_weight_on_the_input_of_a_block_format(fast_backend):
    """The rows are gathered and multiplied before they are quantized."""
    weights = dataclasses.replace(random_layer(1, "mxfp8"), apply_router_weight_first=True)
    x = random_tokens(5, 64, seed=1)
    trace = make_layer(weights, backend=fast_backend).trace(x)
    order = trace.token_expert_order
    scaled = x.astype(np.float32)[order // 2] * trace.topk_weights.reshape(-1, 1)[order]
    assert trace.rows.tobytes() == scaled.astype(BF16).tobytes()
    codes, _ = reference.grouped_quantize_dynamic_block_scaled(
        trace.rows,
        trace.expert_start_indices,
        trace.scales_offset,
        np.arange(4, dtype=np.int32),
        sf_vector_size=32,
        scales_type="float8_e8m0fnu",
        out_type="float8_e4m3fn",
    )
    assert trace.hidden_codes.tobytes() == codes.tobytes()
    assert compare_with_float64(weights, x, trace).arithmetic < 6e-3


def test_one_dynamic_scale_for_all_activations(fast_backend):
    weights = random_layer(2, "fp8_tensor")
    x = random_tokens(5, 64, seed=2)
    layer = MoEQuantized(weights, quant_config=QuantConfig.tensor_fp8(), backend=fast_backend)
    assert layer.strategy == "Fp8Strategy(tensor, dynamic, float32)"
    trace = layer.trace(x)
    largest = np.abs(x.astype(np.float32)[trace.token_expert_order // 2]).max()
    assert trace.hidden_scales.tolist() == [largest / np.float32(448)]
    assert compare_with_float64(weights, x, trace).arithmetic < 6e-3


def test_strategies_are_named():
    names = {
        pair: make_layer(random_layer(0, *pair), backend="reference").strategy
        for pair in [("nvfp4", ""), ("fp8_block", ""), ("bf16", ""), ("mxfp4", "bf16")]
    }
    assert names["nvfp4", ""].startswith("NvMxf4f8Strategy(nvfp4 x nvfp4), fused")
    assert names["fp8_block", ""] == "Fp8Strategy(block, dynamic, float32)"
    assert names["bf16", ""] == "bf16 matmul"
    assert names["mxfp4", "bf16"] == "bf16 matmul of mxfp4 weights"


def test_activation_of_the_layer_replaces_that_of_the_weights():
    weights = random_layer(3, "bf16")
    x = random_tokens(4, 64, seed=3)
    gelu = GatedActivation("gelu_tanh")
    found = MoE(weights, activation=gelu, backend="reference")(x)
    same = dataclasses.replace(weights, activation=gelu)
    assert found.tobytes() == MoE(same, backend="reference")(x).tobytes()
    assert found.tobytes() != MoE(weights, backend="reference")(x).tobytes()


SHARED = random_stack(4, "mxfp8", experts=1)
WIDER = random_stack(5, "mxfp8", experts=1, moe=64)
OTHER = random_stack(6, "bf16", experts=1)
BIASED = random_stack(7, "mxfp8", experts=1, biased=True)


@pytest.mark.parametrize("shared", [WIDER, OTHER, BIASED])
def test_shared_experts_unlike_the_routed_ones_stay_apart(shared):
    weights = random_layer(8, "mxfp8", shared=shared)
    assert not MoEQuantized(weights, backend="reference").shared_slot
    with pytest.raises(ConfigError, match=r"fused_shared_expert: .*pass fused_shared_expert=False"):
        MoEQuantized(weights, fused_shared_expert=True, backend="reference")


def test_shared_experts_like_the_routed_ones_become_slot_0():
    weights = random_layer(9, "mxfp8", shared=SHARED)
    layer = MoEQuantized(weights, backend="reference")
    trace = layer.trace(random_tokens(3, 64, seed=4))
    assert layer.shared_slot
    assert not trace.topk_ids[:, 0].any()
    assert (trace.topk_weights[:, 0] == 1).all()
    assert trace.expert_start_indices[1] == 3


def alternating(stack):
    """A stack with gate and up rows side by side."""
    fields = {"gate_up": layouts.sigma_permute(stack.gate_up)}
    if stack.gate_up_scales is not None:
        fields["gate_up_scales"] = layouts.sigma_permute(stack.gate_up_scales)
    if stack.gate_up_bias is not None:
        fields["gate_up_bias"] = layouts.sigma_permute(stack.gate_up_bias, axis=-1)
    return dataclasses.replace(stack, **fields)


@pytest.mark.parametrize(
    "pair",
    [("bf16", ""), ("nvfp4", ""), ("mxfp8", ""), ("mxfp4", "bf16"), ("fp8_row", "")],
    ids="-".join,
)
@pytest.mark.parametrize("moe", [32, 64])  # as the routed ones, and unlike them
def test_gate_and_up_rows_that_alternate(pair, moe):
    shared = random_stack(13, *pair, experts=1, moe=moe, biased=True)
    plain = random_layer(14, *pair, shared=shared, biased=True)
    mixed = dataclasses.replace(alternating(plain), shared=alternating(shared))
    x = random_tokens(4, 64, seed=6)
    make = type(make_layer(plain, backend="reference"))
    expected = make(plain, backend="reference")(x).tobytes()
    options = [{}]
    if pair[0] in ("nvfp4", "mxfp8"):
        chained = dataclasses.replace(quant_config_of(plain), can_use_fused_swiglu=False)
        options.append({"quant_config": chained})
    for option in options:
        layer = make(mixed, interleaved_gate_up=True, backend="reference", **option)
        assert layer(x).tobytes() == expected
        assert make(mixed, backend="reference", **option)(x).tobytes() != expected


MX8, BF = random_layer(10, "mxfp8"), random_layer(11, "bf16")
REFUSED = [
    (MoEQuantized, BF, {}, ConfigError, "weights"),
    (MoE, MX8, {}, ConfigError, "weights"),
    (MoEQuantized, MX8, {"quant_config": QuantConfig.nvfp4()}, ConfigError, "quant_config"),
    (MoE, BF, {"quant_config": QuantConfig.mxfp8()}, ConfigError, "quant_config"),
    (MoEQuantized, MX8, {"fused_shared_expert": True}, ConfigError, "fused_shared_expert"),
    (MoEQuantized, MX8, {"activation": "silu"}, ArgTypeError, "activation"),
    (MoEQuantized, MX8, {"interleaved_gate_up": 1}, ArgTypeError, "interleaved_gate_up"),
    (
        MoEQuantized,
        random_layer(0, "fp8_block"),
        {"interleaved_gate_up": True},
        ShapeError,
        "gate_up",
    ),
    (MoEQuantized, random_layer(0, "nvfp4", "bf16"), {}, UnsupportedError, "weights"),
    (
        MoEQuantized,
        random_layer(0, "fp8_row"),
        {"quant_config": QuantConfig.blockscaled_fp8()},
        ConfigError,
        "quant_config",
    ),
    (
        MoEQuantized,
        random_layer(0, "fp8_block"),
        {"quant_config": QuantConfig.blockscaled_fp8(scale_dtype="bfloat16")},
        ConfigError,
        "quant_config",
    ),
]


@pytest.mark.parametrize(("make", "weights", "options", "error", "arg"), REFUSED)
def test_refused_when_it_is_made(make, weights, options, error, arg):
    with pytest.raises(error, match=rf"^{make.__name__}\(\): {arg}: "):
        make(weights, backend="reference", **options)


def test_a_function_cannot_be_padded():
    def product(gate, up):
        return gate * up

    weights = dataclasses.replace(
        random_layer(12, "fp8_block"), activation=GatedActivation(gated_activation_fn=product)
    )
    with pytest.raises(ConfigError, match="D = 32 is no multiple of 128"):
        MoEQuantized(weights, backend="reference")


@pytest.mark.parametrize(
    ("out", "error"),
    [
        (np.zeros((3, 64), np.float32), DTypeError),
        (np.zeros((4, 64), BF16), ShapeError),
        (np.zeros((3, 128), BF16)[:, ::2], LayoutError),
        ("out", ArgTypeError),
    ],
)
def test_bad_buffers(out, error):
    layer = make_layer(BF, backend="reference")
    with pytest.raises(error, match=r"^MoE\(\): out: "):
        layer(random_tokens(3, 64, seed=5), out=out)
