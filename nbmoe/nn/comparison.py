"""How far a layer's result is from the same layer computed in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe.checkpoints import ExpertWeights
from nbmoe.codecs import decode_bf16
from nbmoe.nn.prepared import prepare_experts
from nbmoe.nn.trace import MoETrace
from nbmoe.reference import oracle

F64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """Relative L2 errors, |found - exact| / |exact|, over all tokens without NaN or infinity.

    Attributes:
        arithmetic: Of the output, against float64 matmuls on the same quantized activations: what
            the tensor core's cuts, float32 scales and bf16 roundings cost.
        inner: Of the activation between the matmuls, against an unrounded float64 SwiGLU of the
            same quantized input: mostly what quantizing it to NVFP4 costs.
        total: Of the output, against a float64 layer whose activations are not quantized at all.
    """

    arithmetic: float
    inner: float
    total: float


def compare_with_float64(
    weights: ExpertWeights, x: npt.NDArray[Any], trace: MoETrace
) -> Comparison:
    """Computes the layer in float64 from the dequantized weights, one expert at a time.

    Args:
        weights: The layer, as it was before preparation.
        x: bf16 [T, H], the input of `trace`.
        trace: What the layer made of it.
    """
    prepared = prepare_experts(weights)
    tokens = decode_bf16(x).astype(np.float64)
    finite = np.asarray(np.isfinite(tokens).all(axis=1))
    start = trace.expert_start_indices.astype(np.int64)
    groups = (trace.expert_start_indices, trace.scales_offset)
    rows = oracle.dequantize_groups(trace.hidden_codes, trace.hidden_scales, *groups)
    inner = oracle.dequantize_groups(trace.inner_codes, trace.inner_scales, *groups)
    # Every routed copy of a token was quantized alike, so any of them gives its quantized value.
    quantized = np.zeros_like(tokens)
    scale = float(prepared.gate_up_inverse_input_scales[0])
    quantized[trace.token_expert_order // weights.top_k] = rows / scale

    same, plain = np.zeros_like(tokens), np.zeros_like(tokens)
    found_inner, exact_inner = [np.zeros((0, weights.moe_dim))], [np.zeros((0, weights.moe_dim))]
    for expert in range(weights.num_experts):
        group = slice(start[expert], start[expert + 1])
        if group.start == group.stop:
            continue
        found = inner[group] / float(prepared.down_inverse_input_scales[expert])
        keep = finite[trace.token_expert_order[group] // weights.top_k]

        def use_found(z: F64Array, _: int, found: F64Array = found, keep: Any = keep) -> F64Array:
            found_inner.append(found[keep])
            exact_inner.append(z[keep])
            return found

        layer = _ExpertLayer(weights, trace, expert)
        with np.errstate(invalid="ignore", over="ignore"):  # rows that `finite` leaves out
            same += layer.output(quantized, use_found)
            plain += layer.output(tokens)

    output = decode_bf16(trace.output).astype(np.float64)[finite]
    return Comparison(
        arithmetic=relative_error(output, same[finite]),
        inner=relative_error(np.concatenate(found_inner), np.concatenate(exact_inner)),
        total=relative_error(output, plain[finite]),
    )


def relative_error(found: F64Array, exact: F64Array) -> float:
    """|found - exact| / |exact| in L2; 0 if both are zero or empty, infinite if only exact is."""
    difference, norm = np.linalg.norm(found - exact), np.linalg.norm(exact)
    if norm == 0:
        return 0.0 if difference == 0 else float("inf")
    return float(difference / norm)


class _ExpertLayer:
    """One expert's share of the layer; holds only that expert's weights in float64."""

    def __init__(self, weights: ExpertWeights, trace: MoETrace, expert: int) -> None:
        self._gate_up = oracle.dequantize_nvfp4(
            weights.gate_up[expert],
            weights.gate_up_scales[expert],
            float(weights.gate_up_weight_scale[expert]),
        )[np.newaxis]
        self._down = oracle.dequantize_nvfp4(
            weights.down[expert],
            weights.down_scales[expert],
            float(weights.down_weight_scale[expert]),
        )[np.newaxis]
        self._ids = np.where(trace.topk_ids == expert, 0, -1).astype(np.int32)
        self._weights = trace.topk_weights

    def output(self, x: F64Array, quantize: Any = None) -> F64Array:
        """[T, H], zero for tokens that do not use the expert."""
        return oracle.moe_layer(x, self._ids, self._weights, self._gate_up, self._down, quantize)
