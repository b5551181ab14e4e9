"""bf16 tokens: with bf16 weights, and with MXFP4 weights (W4A16)."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbmoe import ops
from nbmoe.bench.block_chain import BlockWeights, missing_operations
from nbmoe.bench.chain import Chain, Positions
from nbmoe.bench.entry import MIXED, MIXED_PAIR, PACKED, PREPARED, Step, step
from nbmoe.bench.exact import F64Array
from nbmoe.bench.memory import Memory
from nbmoe.bench.models import Model
from nbmoe.bench.routed import Routed
from nbmoe.codecs import decode_bf16
from nbmoe.formats import MXFP4


class Bf16Weights:
    """Random bf16 weights."""

    def __init__(self, memory: Memory, model: Model) -> None:
        self.memory = memory
        self.codes = [memory.bf16(model.experts, n, k) for n, k in model.matmuls]

    @functools.cached_property
    def prepared(self) -> list[Any]:
        """The same for the Hopper kernels."""
        return [ops.prepare_weights(codes, format="bf16") for codes in self.codes]

    def rows(self, leg: int, expert: int, columns: Positions) -> F64Array:
        """Weight rows."""
        rows = self.memory.read(self.codes[leg][expert])[columns]
        return decode_bf16(rows).astype(np.float64)


class RowChain(Chain):
    """Gathers, multiplies, activates and multiplies in launches of their own."""

    interleaved = False

    def __init__(self, routed: Routed, weights: Any) -> None:
        super().__init__(routed)
        self.w = weights

    def variants(self) -> tuple[str, ...]:
        return (PACKED,)

    def legs(self, variant: str) -> tuple[str, ...]:
        return "quantize", "gate_up", "activate", "down"

    def extra_legs(self, variant: str) -> tuple[str, ...]:
        return ()

    def gather(self) -> Step:
        """Tokens in the order of rows."""
        order, top_k = self.routed.indices.token_expert_order, self.model.top_k
        return step(ops.gather_rows, self.routed.x, order, divisor=top_k)

    def activated(self, variant: str) -> Step:
        """The activation of gate/up, in bf16."""
        gate_up = self.get("gate_up", variant).result
        return step(ops.gated_activation, gate_up, activation=self.model.activation)

    def weight(self, leg: int, expert: int, columns: Positions) -> F64Array:
        rows: F64Array = self.w.rows(leg, expert, columns)
        return rows

    def operand(self, leg: int, variant: str = PACKED) -> Any:
        """What the matmul of a leg multiplies."""
        return self.get("activate" if leg else "quantize", variant).result

    def _read_rows(self, array: Any, positions: Positions) -> F64Array:
        rows = [decode_bf16(self.memory.read(array[int(row)])) for row in positions]
        return np.asarray(rows, np.float64)


class Bf16Chain(RowChain):
    """bf16 tokens and bf16 weights, or MXFP4 weights where `weights` has scales."""

    def __init__(self, routed: Routed, weights: Bf16Weights | BlockWeights) -> None:
        super().__init__(routed, weights)
        self.activations = "bf16"
        self.weights = "mxfp4" if isinstance(weights, BlockWeights) else "bf16"

    def make(self, leg: str, variant: str) -> Step:
        if variant == PREPARED:  # the same kernels, on tokens that are already prepared
            return self.get(leg, MIXED)
        if leg == "quantize":
            return self.gather()
        if leg == "activate":
            return self.activated(variant)
        if leg in ("prepare", "prepare_inner"):
            rows = self.operand(int(leg == "prepare_inner"), MIXED)
            return step(ops.prepare_tokens, rows, None, self.routed.slots[0], format="bf16")
        i = int(leg == "down")
        keys = {"estimated_total_m": self.problem.rows, "routed_before": True}
        if variant == MIXED:
            tokens = self.get("prepare_inner" if i else "prepare", MIXED).result
            operands, scales = (tokens, self.w.prepared[i]), None
        else:
            operands, scales = (self.operand(i), self.w.codes[i]), getattr(self.w, "scales", None)
        if self.weights == "mxfp4":
            tail = None if scales is None else scales[i], *self.routed.plain_slots
            return step(ops.grouped_matmul_w4a16, *operands, *tail, **keys)
        return step(ops.grouped_matmul_ragged, *operands, *self.routed.plain_slots, **keys)

    def variants(self) -> tuple[str, ...]:
        return PACKED, PREPARED, MIXED

    def missing(self, variant: str) -> str:
        return missing_operations(variant)

    def legs(self, variant: str) -> tuple[str, ...]:
        if variant == MIXED:
            return "quantize", "prepare", "gate_up", "activate", "prepare_inner", "down"
        return super().legs(variant) if variant == PACKED else ()

    def pair_legs(self, variant: str) -> tuple[str, ...]:
        return MIXED_PAIR if variant == MIXED else super().pair_legs(variant)

    def rows(self, leg: int, variant: str, positions: Positions) -> F64Array:
        return self._read_rows(self.operand(leg), positions)

    def inner_rows(self, result: Any, positions: Positions) -> F64Array | None:
        return self._read_rows(result, positions)


def mxfp4_weights(memory: Memory, model: Model) -> BlockWeights:
    """Weights of W4A16."""
    return BlockWeights(memory, model, MXFP4)
