"""P1: a layer is the composition of the specification's operations, written out here."""

import numpy as np
import pytest

from nbmoe import layouts, reference
from nbmoe.formats import FORMATS as BLOCK_FORMATS
from nbmoe.nn import make_layer, random_tokens
from tests.nn.weights import FORMATS, random_layer

ONE = np.float32(1)


def block_scaled(weights, x, slots, order, top_k):
    fmt = BLOCK_FORMATS[weights.activation_format]
    formats = {"format": fmt.name, "weight_format": weights.format}
    inverse, alpha, down_inverse, down_alpha = None, None, None, None
    if weights.format == "nvfp4":
        largest = weights.gate_up_input_scale.max()
        inverse = np.full(weights.num_experts, ONE / largest, np.float32)
        alpha = weights.gate_up_weight_scale * largest
        down_inverse = ONE / weights.down_input_scale
        down_alpha = weights.down_weight_scale * weights.down_input_scale
    codes = reference.grouped_quantize_dynamic_block_scaled(
        x,
        *slots,
        inverse,
        sf_vector_size=fmt.block,
        scales_type="float8_e4m3fn" if fmt.scale == "e4m3" else "float8_e8m0fnu",
        out_type=fmt.codes_dtype,
        indices=order,
        indices_divisor=top_k,
    )
    tiles = [layouts.interleave_scales(s) for s in (weights.gate_up_scales, weights.down_scales)]
    gate_up = reference.grouped_matmul_block_scaled(
        codes[0],
        weights.gate_up,
        codes[1],
        tiles[0],
        *slots,
        alpha,
        bias=weights.gate_up_bias,
        **formats,
    )
    inner = reference.fused_silu_quantize(gate_up, *slots, down_inverse, format=fmt.name)
    return reference.grouped_matmul_block_scaled(
        inner[0],
        weights.down,
        inner[1],
        tiles[1],
        *slots,
        down_alpha,
        bias=weights.down_bias,
        **formats,
    )


def quantized_fp8(weights, rows, leg):
    if weights.format == "fp8_block":
        return reference.quantize_dynamic_scaled_float8(rows, group_size_or_per_token=128)
    if weights.format == "fp8_row":
        codes, scales = reference.quantize_dynamic_scaled_float8(rows, group_size_or_per_token=-1)
        return codes, scales[:, : len(rows)].reshape(-1, 1).copy()
    scale = getattr(weights, f"{leg}_input_scale").max()
    codes = reference.quantize_static_scaled_float8(rows, float(scale))
    return codes, np.full((len(rows), 1), scale, np.float32)


def multiply_rows(weights, rows, leg, starts, ids):
    codes, scales = getattr(weights, leg), getattr(weights, f"{leg}_scales")
    bias = getattr(weights, f"{leg}_bias")
    if weights.format == "bf16":
        return reference.grouped_matmul_ragged(rows, codes, starts, ids, bias=bias)
    if weights.format == "mxfp4":
        decoded = reference.mxfp4_dequant(codes, scales)
        return reference.grouped_matmul_ragged(rows, decoded, starts, ids, bias=bias)
    a, a_scales = quantized_fp8(weights, rows, leg)
    name = "" if weights.format == "fp8_block" else "rowwise_"
    matmul = getattr(reference, f"grouped_{name}dynamic_scaled_fp8_matmul")
    return matmul(a, codes, a_scales, scales, starts, ids, bias=bias)


def compose(weights, x):
    top_k = weights.top_k
    logits = reference.router_logits(x, weights.router.weight)
    ids, factors = reference.route(logits, top_k, renormalize=True)
    routing = reference.moe_create_indices(ids, weights.num_experts)
    starts, slots_ids = routing.expert_start_indices, routing.expert_ids
    order = routing.token_expert_order
    if weights.activation_format in BLOCK_FORMATS:
        slots = (starts, routing.scales_offset, slots_ids)
        down = block_scaled(weights, x, slots, order, top_k)
    else:
        rows = x[order // top_k]
        gate_up = multiply_rows(weights, rows, "gate_up", starts, slots_ids)
        inner = reference.gated_activation(gate_up)
        down = multiply_rows(weights, inner, "down", starts, slots_ids)
    return reference.moe_finalize(down, routing.restore_token_order, factors)


@pytest.mark.parametrize("pair", FORMATS, ids="-".join)
def test_layer_is_the_composition(pair, fast_backend):
    moe = 128 if pair[0] == "fp8_block" else 32
    weights = random_layer(1, *pair, biased=True, moe=moe)
    x = random_tokens(9, 64, seed=2)
    found = make_layer(weights, backend=fast_backend)(x)
    assert found.tobytes() == compose(weights, x).tobytes()


def test_padded_blocks_change_nothing(fast_backend):
    """An FP8 layer whose D is no multiple of 128 is padded with zero weights; these are exact."""
    weights = random_layer(3, "fp8_block", moe=32)
    x = random_tokens(5, 64, seed=4)
    trace = make_layer(weights, backend=fast_backend).trace(x)
    assert trace.inner.shape == (10, 128)
    assert not trace.inner[:, 32:].view(np.uint16).any()
    logits = reference.router_logits(x, weights.router.weight)
    ids, _ = reference.route(logits, weights.top_k, renormalize=True)
    routing = reference.moe_create_indices(ids, weights.num_experts)
    codes, scales = reference.quantize_dynamic_scaled_float8(
        x[routing.token_expert_order // 2], group_size_or_per_token=128
    )
    for part, columns in ((0, slice(0, 32)), (1, slice(128, 160))):
        half = reference.grouped_dynamic_scaled_fp8_matmul(
            codes,
            weights.gate_up[:, 32 * part : 32 * part + 32].copy(),
            scales,
            weights.gate_up_scales[:, part : part + 1].copy(),
            routing.expert_start_indices,
            routing.expert_ids,
        )
        assert trace.gate_up[:, columns].tobytes() == half.tobytes()
