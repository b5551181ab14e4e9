"""What a forward pass found, as lines for people and as a dictionary for programs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe.activation import GatedActivation
from nbmoe.checkpoints import ExpertWeights
from nbmoe.cli.drawing import seconds, table
from nbmoe.cli.stages import operations
from nbmoe.nn import MoELayer, MoETrace
from nbmoe.nn.comparison import Comparison

ERROR_LIMIT = 1e-2
"""Largest arithmetic error of a correct layer; bf16 rounding alone gives about 2.4e-3."""

_WHERE = {
    "gpu": "on the GPU",
    "emulate": "the GPU kernels, compiled for this CPU",
    "cudasim": "the GPU kernels, interpreted on this CPU",
    "reference": "the specification in numpy, no kernels",
}
_SCORINGS = {
    "softmax": "softmax",
    "sigmoid": "sigmoid",
    "softmax_after_topk": "softmax of the chosen",
    "sigmoid_after_topk": "sigmoid of the chosen",
    "none": "logits",
}
_ACTIVATION_NOTES = {
    "bf16": "are not quantized",
    "fp8_block": "in groups of 1 x 128 to fp8",
    "fp8_row": "a token at a time to fp8",
    "fp8_tensor": "with calibrated scales to fp8",
}


def layer_lines(weights: ExpertWeights, layer: MoELayer, tokens: int, origin: str) -> str:
    """Describes the layer, its input and where it runs."""
    backend = layer.backend
    rows = [
        ("layer", weights.source),
        ("experts", f"{layer.num_experts}, top {layer.top_k}, {router_text(weights)}"),
        ("sizes", f"hidden {layer.hidden_size}, moe dim {layer.moe_dim}"),
        ("format", format_text(weights)),
        ("activation", activation_text(weights.activation)),
        ("shared", shared_text(weights)),
        ("strategy", layer.strategy),
        ("tokens", f"{tokens} x {layer.hidden_size} bf16, {origin}"),
        ("rows", f"{tokens * layer.top_k} routed to experts"),
        ("backend", f"{backend.name}: {_WHERE[backend.name]}"),
        ("because", backend.reason),
    ]
    return table([row for row in rows if row[1]])


def router_text(weights: ExpertWeights) -> str:
    """The rule of the router."""
    router = weights.router
    parts = [_SCORINGS[router.scoring]]
    if not router.scoring.endswith("_after_topk"):
        rule = "scaled to sum 1" if router.renormalize else "as they are"
        parts.append(f"weights {rule}")
    if router.n_group > 1:
        parts.append(f"of {router.topk_group} of {router.n_group} groups")
    if router.correction_bias is not None:
        parts.append("chosen with a correction bias")
    if router.scaling_factor != 1:
        parts.append(f"times {router.scaling_factor:g}")
    return ", ".join(parts)


def format_text(weights: ExpertWeights) -> str:
    """Formats of weights and activations."""
    text = f"{weights.format} weights"
    if weights.gate_up_bias is not None or weights.down_bias is not None:
        text += " with biases"
    note = _ACTIVATION_NOTES.get(
        weights.activation_format, f"in blocks to {weights.activation_format}"
    )
    quantized = "" if weights.activation_format == "bf16" else "quantized "
    return f"{text}, activations {quantized}{note}"


def activation_text(activation: GatedActivation) -> str:
    """An activation and its constants."""
    if activation.gated_activation_fn is not None:
        return getattr(activation.gated_activation_fn, "__name__", "a function")
    constants = [
        f"{name} {value:g}"
        for name, value in (("alpha", activation.alpha), ("limit", activation.limit))
        if value
    ]
    name = activation.fused_activation
    return f"{name} ({', '.join(constants)})" if constants else name


def shared_text(weights: ExpertWeights) -> str:
    """Shared experts, empty without any."""
    shared = weights.shared
    return "" if shared is None else f"moe dim {shared.moe_dim}, {shared.format} weights"


def time_lines(trace: MoETrace, first_pass: float | None, weights: ExpertWeights) -> str:
    """Time per stage, and of a first pass that compiled [s]."""
    rows = [("stage", "time", "runs")]
    rows += [
        (name, seconds(value), operations(name, weights)) for name, value in trace.seconds.items()
    ]
    rows.append(("total", seconds(sum(trace.seconds.values())), ""))
    if first_pass is not None:
        rows.append(
            ("first pass", seconds(first_pass), "compiles kernels or finds them in a cache")
        )
    return table(rows)


def rows_per_expert(layer: MoELayer, trace: MoETrace) -> npt.NDArray[np.int64]:
    """Rows of each routed expert; a shared expert in a slot of its own gets every token."""
    starts = trace.expert_start_indices.astype(np.int64)
    rows = starts[1:] - starts[:-1]
    return rows[1:] if layer.shared_slot else rows


def error_lines(errors: Comparison, weights: ExpertWeights) -> str:
    """The relative L2 errors and what each means."""
    quantized = weights.activation_format
    same = "the same activations" if quantized == "bf16" else "the same quantized activations"
    rows = [
        (
            "relative error",
            f"{errors.arithmetic:.2e}",
            f"against float64 on {same} (limit {ERROR_LIMIT:.0e})",
        )
    ]
    if quantized != "bf16":
        rows += [
            ("", f"{errors.inner:.2e}", f"between the matmuls, from quantizing to {quantized}"),
            ("", f"{errors.total:.2e}", "against float64 on activations that are not quantized"),
        ]
    return table(rows)


def as_dictionary(
    weights: ExpertWeights,
    layer: MoELayer,
    trace: MoETrace,
    first_pass: float | None,
    errors: Comparison,
) -> dict[str, Any]:
    """Everything that the lines say, for --json; an error that is not finite is None."""
    router, shared = weights.router, weights.shared
    return {
        "source": weights.source,
        "format": weights.format,
        "activation_format": weights.activation_format,
        "strategy": layer.strategy,
        "activation": activation_text(weights.activation),
        "backend": layer.backend.name,
        "reason": layer.backend.reason,
        "num_experts": layer.num_experts,
        "hidden_size": layer.hidden_size,
        "moe_dim": layer.moe_dim,
        "shared_moe_dim": 0 if shared is None else shared.moe_dim,
        "top_k": layer.top_k,
        "scoring": router.scoring,
        "renormalize": router.renormalize,
        "tokens": len(trace.output),
        "rows_per_expert": rows_per_expert(layer, trace).tolist(),
        "seconds": trace.seconds,
        "first_pass_seconds": first_pass,
        "relative_error": _finite(errors.arithmetic),
        "inner_relative_error": _finite(errors.inner),
        "unquantized_relative_error": _finite(errors.total),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
