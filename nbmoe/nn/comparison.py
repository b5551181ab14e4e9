"""How far a layer's result is from the same layer computed in float64."""

from __future__ import annotations

import dataclasses
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
            the tensor core's cuts, float32 scales and bf16 roundings cost. Shared experts included.
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
    found_inner: list[F64Array] = []
    exact_inner: list[F64Array] = []
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
    if trace.shared_parts is not None and weights.shared is not None:
        stack, alone = weights.shared, _of_shared(trace, x)
        shared = _Expert(stack, 0, activation or stack.activation)
        hidden, inner = (exact_rows(stack, alone, "hidden"), exact_rows(stack, alone, "inner"))
        inner = inner[:, : stack.moe_dim]
        with np.errstate(invalid="ignore", over="ignore"):
            same += shared.down(inner)
            plain += shared.down(shared.activated(tokens))
            z = shared.activated(hidden)
        found_inner.append(inner[finite])
        exact_inner.append(z[finite])

    output = decode_bf16(trace.output).astype(np.float64)[finite]
    return Comparison(
        arithmetic=relative_error(output, same[finite]),
        inner=relative_error(_flat(found_inner), _flat(exact_inner)),
        total=relative_error(output, plain[finite]),
    )


def _of_shared(trace: MoETrace, x: npt.NDArray[Any]) -> MoETrace:
    """The trace of shared experts that were computed apart: all tokens, in one group."""
    assert trace.shared_parts is not None, "there are shared experts"
    parts: dict[str, Any] = {**trace.shared_parts, "rows": x}
    return dataclasses.replace(
        trace,
        **parts,
        token_expert_order=np.arange(len(x), dtype=np.uint32),
        expert_start_indices=np.array([0, len(x)], np.uint32),
        scales_offset=np.zeros(1, np.uint32),
    )


def _flat(parts: list[F64Array]) -> F64Array:
    """All elements of matrices whose widths may differ."""
    return np.concatenate([np.zeros(0), *(part.ravel() for part in parts)])


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
