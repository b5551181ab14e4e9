"""Which operations a stage of a layer runs, for the table of times."""

from __future__ import annotations

from nbmoe.checkpoints import ExpertWeights

_BLOCK_MATMUL = "grouped_matmul_block_scaled"
_MATMULS = {
    "fp8_block": "grouped_dynamic_scaled_fp8_matmul",
    "fp8_row": "grouped_rowwise_dynamic_scaled_fp8_matmul",
    "fp8_tensor": "grouped_rowwise_dynamic_scaled_fp8_matmul",
    "bf16": "grouped_matmul_ragged",
}
_QUANTIZERS = {
    "fp8_block": "quantize_dynamic_scaled_float8",
    "fp8_row": "quantize_dynamic_scaled_float8",
    "fp8_tensor": "quantize_static_scaled_float8",
}


def operations(stage: str, weights: ExpertWeights) -> str:
    """Names of `nbmoe.ops` that a stage calls, empty for a stage that is not known here."""
    inputs = weights.activation_format
    is_block = inputs not in _MATMULS
    matmul = _BLOCK_MATMUL if is_block else _MATMULS[inputs]
    if inputs == "bf16" and weights.format != "bf16":
        matmul = "grouped_matmul_w4a16"
    quantizer = _QUANTIZERS.get(inputs, "")
    activation = "fused_silu_quantize" if is_block else f"gated_activation, {quantizer}"
    return {
        "route": "router_logits, route, moe_create_indices",
        "quantize": "grouped_quantize_dynamic_block_scaled" if is_block else quantizer,
        "gather": "gather_rows",
        "gate_up + activation": "grouped_matmul_blocked_swiglu",
        "gate_up": matmul,
        "activation": activation.rstrip(", "),
        "down": matmul,
        "shared experts": "the same for every token",
        "combine": "moe_finalize",
    }.get(stage, "")
