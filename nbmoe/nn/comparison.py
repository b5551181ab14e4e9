"""How far a layer's result is from the same layer computed in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe.activation import GatedActivation
from nbmoe.checkpoints import ExpertWeights
from nbmoe.checkpoints.stack import ExpertStack
from nbmoe.codecs import decode_bf16
from nbmoe.nn.exact import exact_bias, exact_rows, exact_weight
from nbmoe.nn.shared_experts import prepend
from nbmoe.nn.trace import MoETrace
from nbmoe.reference import oracle

F64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """Relative L2 errors, |found - exact| / |exact|, over all tokens without NaN or infinity.

    Attributes:
        arithmetic: Of the output, against float64 matmuls on the same quantized activations: what
            the tensor core's cuts, float32 scales and bf16 roundings cost.
        inner: Of the activation between the matmuls, against an unrounded float64 activation of the
            same quantized input: mostly what quantizing it costs.
        total: Of the output, against a float64 layer whose activations are not quantized at all.
    """

    arithmetic: float
    inner: float
    total: float


def compare_with_float64(
    weights: ExpertWeights,
    x: npt.NDArray[Any],
    trace: MoETrace,
    *,
    activation: GatedActivation | None = None,
) -> Comparison:
    """Computes the layer in float64 from the dequantized weights, one expert at a time.

    Args:
        weights: The layer, as it was before preparation.
        x: bf16 [T, H], the input of `trace`.
        trace: What the layer made of it.
        activation: What joined gate and up, None for the weights'.
    """
    tokens = decode_bf16(x).astype(np.float64)
    finite = np.asarray(np.isfinite(tokens).all(axis=1))
    stack: ExpertStack = weights
    top_k = trace.topk_ids.shape[1]
    if weights.shared is not None and top_k > weights.top_k:
        stack = prepend(weights, weights.shared, "compare_with_float64")
    sources = trace.token_expert_order.astype(np.int64)
    factors = trace.topk_weights.reshape(-1).astype(np.float64)[sources]
    hidden, inner = (exact_rows(stack, trace, "hidden"), exact_rows(stack, trace, "inner"))
    inner = inner[:, : stack.moe_dim]  # without padding

    same, plain = np.zeros_like(tokens), np.zeros_like(tokens)
    found_inner, exact_inner = [np.zeros((0, stack.moe_dim))], [np.zeros((0, stack.moe_dim))]
    starts = trace.expert_start_indices.astype(np.int64)
    for expert in range(stack.num_experts):
        group = slice(starts[expert], starts[expert + 1])
        if group.start == group.stop:
            continue
        owners = sources[group] // top_k
        before = factors[group, np.newaxis]
        after = np.ones_like(before)
        if not weights.apply_router_weight_first:
            before, after = after, before
        layer = _Expert(stack, expert, activation or stack.activation)
        with np.errstate(invalid="ignore", over="ignore"):  # rows that `finite` leaves out
            z = layer.activated(hidden[group])
            np.add.at(same, owners, after * layer.down(inner[group]))
            whole = layer.down(layer.activated(tokens[owners] * before))
            np.add.at(plain, owners, after * whole)
        keep = finite[owners]
        found_inner.append(inner[group][keep])
        exact_inner.append(z[keep])
    if trace.shared is not None and weights.shared is not None:
        same += decode_bf16(trace.shared)
        shared = _Expert(weights.shared, 0, activation or weights.shared.activation)
        with np.errstate(invalid="ignore", over="ignore"):
            plain += shared.down(shared.activated(tokens))

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


class _Expert:
    """One expert in float64; holds only its own weights."""

    def __init__(self, stack: ExpertStack, expert: int, activation: GatedActivation) -> None:
        self._gate_up = exact_weight(stack, "gate_up", expert)
        self._down = exact_weight(stack, "down", expert)
        self._gate_up_bias = exact_bias(stack, "gate_up", expert)
        self._down_bias = exact_bias(stack, "down", expert)
        self._activation = activation

    def activated(self, rows: F64Array) -> F64Array:
        """[m, D], what goes into the down projection."""
        projected = rows @ self._gate_up.T + self._gate_up_bias
        d = projected.shape[1] // 2
        return oracle.gated_activation(projected[:, :d], projected[:, d:], self._activation)

    def down(self, inner: F64Array) -> F64Array:
        """[m, H] of [m, D]."""
        return inner @ self._down.T + self._down_bias
