"""Block-scaled formats: NVFP4, MXFP4, MXFP8, and W4A8 (MXFP8 tokens, MXFP4 weights)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from nbmoe import ops
from nbmoe.bench.chain import Chain, Positions
from nbmoe.bench.entry import MIXED, MIXED_PAIR, PACKED, PREPARED, Step, step
from nbmoe.bench.exact import F64Array
from nbmoe.bench.memory import Memory
from nbmoe.bench.models import Model
from nbmoe.bench.routed import Routed
from nbmoe.formats import NVFP4, BlockFormat
from nbmoe.layouts import TILE_ROWS, deinterleave_scales
from nbmoe.reference import oracle


def has_layout(op: Callable[..., Any]) -> bool:
    """Whether an operation can write tokens for the Hopper kernels."""
    return "layout" in inspect.signature(op).parameters


def missing_operations(variant: str) -> str:
    """Which operation of the Hopper kernels is not in this version, empty if it has them all."""
    for name in ("prepare_weights", "prepare_tokens"):
        if variant != PACKED and not hasattr(ops, name):
            return f"this version has no nbmoe.ops.{name}"
    return ""


class BlockWeights:
    """Random weights of a model in a block format; gate and up rows take turns."""

    def __init__(self, memory: Memory, model: Model, fmt: BlockFormat) -> None:
        self.memory, self.fmt = memory, fmt
        self.codes, self.scales = [], []
        for n, k in model.matmuls:
            self.codes.append(memory.codes(model.experts, n, fmt.packed_k(k)))
            columns = fmt.scale_columns(k)
            self.scales.append(memory.block_scales(fmt.scale, model.experts, n, columns))

    @functools.cached_property
    def prepared(self) -> list[Any]:
        """The same for the Hopper kernels."""
        return [
            ops.prepare_weights(codes, scales, format=self.fmt.name)
            for codes, scales in zip(self.codes, self.scales, strict=True)
        ]

    def rows(self, leg: int, expert: int, columns: Positions) -> F64Array:
        """Dequantized weight rows."""
        codes = self.memory.read(self.codes[leg][expert])[columns]
        k = codes.shape[1] * self.fmt.per_byte
        tiles = self.memory.read(self.scales[leg][expert])
        n = self.codes[leg].shape[1]
        scales = deinterleave_scales(tiles, n, self.fmt.scale_columns(k))[columns]
        return oracle.dequantize(codes, scales, self.fmt)


class BlockChain(Chain):
    """Packed tokens and scale tiles; the fused kernel joins gate/up, activation and quantizing."""

    def __init__(self, routed: Routed, weights: BlockWeights, fmt: BlockFormat) -> None:
        super().__init__(routed)
        self.w, self.fmt = weights, fmt
        self.activations, self.weights = fmt.name, weights.fmt.name
        self.keys: dict[str, Any] = {
            "format": fmt.name,
            "weight_format": weights.fmt.name,
            "estimated_total_m": self.problem.rows,
            # The routing is done before what a matmul follows, as in a layer.
            "routed_before": True,
        }
        if fmt.has_tensor_scale:
            self.keys["expert_scales"] = routed.ones

    def variants(self) -> tuple[str, ...]:
        return PACKED, PREPARED, MIXED

    def missing(self, variant: str) -> str:
        if variant == PREPARED and not has_layout(ops.grouped_quantize_dynamic_block_scaled):
            return "quantizers of this version have no layout="
        return missing_operations(variant)

    def legs(self, variant: str) -> tuple[str, ...]:
        if variant == MIXED:
            return ()
        if variant == PREPARED and not has_layout(ops.grouped_matmul_blocked_swiglu):
            return "quantize", "gate_up", "activate", "down"
        return "quantize", "swiglu", "down"

    def extra_legs(self, variant: str) -> tuple[str, ...]:
        return ("gate_up", "activate") if variant != MIXED else ("prepare", "prepare_inner")

    def pair_legs(self, variant: str) -> tuple[str, ...]:
        return MIXED_PAIR if variant == MIXED else super().pair_legs(variant)

    def make(self, leg: str, variant: str) -> Step:
        if leg == "quantize":
            return self._quantize(variant)
        if leg in ("prepare", "prepare_inner"):
            codes, scales = self._packed(int(leg == "prepare_inner"))
            starts, offsets, _ = self.routed.slots
            return step(ops.prepare_tokens, codes, scales, starts, offsets, format=self.fmt.name)
        if leg == "activate":
            return self._activate(variant)
        operands = self._operands(int(leg == "down"), variant)
        if leg == "swiglu":
            keys = self.keys | self._layout(variant) | {"activation": self.model.activation}
            if self.fmt.has_tensor_scale:
                keys["c_input_scales"] = self.routed.ones
            return step(ops.grouped_matmul_blocked_swiglu, *operands, **keys)
        return step(ops.grouped_matmul_block_scaled, *operands, **self.keys)

    def rows(self, leg: int, variant: str, positions: Positions) -> F64Array:
        return self._dequantized(self._packed(leg), positions)

    def weight(self, leg: int, expert: int, columns: Positions) -> F64Array:
        return self.w.rows(leg, expert, columns)

    def inner_rows(self, result: Any, positions: Positions) -> F64Array | None:
        return self._dequantized(result, positions) if isinstance(result, tuple) else None

    def inner_block(self) -> int:
        return self.fmt.block

    def _quantize(self, variant: str) -> Step:
        return step(
            ops.grouped_quantize_dynamic_block_scaled,
            self.routed.x,
            *self.routed.slots,
            self.routed.ones if self.fmt.has_tensor_scale else None,
            sf_vector_size=self.fmt.block,
            scales_type="float8_e4m3fn" if self.fmt is NVFP4 else "float8_e8m0fnu",
            out_type=self.fmt.codes_dtype,
            **self.routed.gather,
            **self._layout(variant),
        )

    def _activate(self, variant: str) -> Step:
        return step(
            ops.fused_silu_quantize,
            self.get("gate_up", variant).result,
            *self.routed.slots,
            self.routed.ones if self.fmt.has_tensor_scale else None,
            format=self.fmt.name,
            interleaved=True,
            activation=self.model.activation,
            **self._layout(variant),
        )

    def _layout(self, variant: str) -> dict[str, Any]:
        return {"layout": "prepared"} if variant == PREPARED else {}

    def _packed(self, leg: int) -> tuple[Any, Any]:
        codes, scales = self.get("swiglu" if leg else "quantize", PACKED).result
        return codes, scales

    def _operands(self, leg: int, variant: str) -> tuple[Any, ...]:
        starts, offsets, ids = self.routed.slots
        if variant == PACKED:
            codes, scales = self._packed(leg)
            weight = self.w.codes[leg], self.w.scales[leg]
            return codes, weight[0], scales, weight[1], starts, offsets, ids
        if variant == MIXED:
            source = self.get("prepare_inner" if leg else "prepare", MIXED)
        else:
            inner = "swiglu" if "swiglu" in self.legs(PREPARED) else "activate"
            source = self.get(inner if leg else "quantize", PREPARED)
        return source.result, self.w.prepared[leg], None, None, starts, None, ids

    def _dequantized(self, packed: tuple[Any, Any], positions: Positions) -> F64Array:
        codes, scales = packed
        offsets = self.memory.read(self.routed.indices.scales_offset).astype(np.int64)
        first_tiles = self.problem.starts[:-1] // TILE_ROWS + offsets
        values = []
        for row in positions:
            expert = self.problem.row_experts[row]
            local = int(row - self.problem.starts[expert])
            tile = int(first_tiles[expert]) + local // TILE_ROWS
            of_tile = self.memory.read(scales[tile])
            local %= TILE_ROWS
            of_row = of_tile[:, local % 32, local // 32].ravel()
            of_row = np.ascontiguousarray(of_row).view(np.uint8)
            mine = self.memory.read(codes[int(row)])
            columns = mine.size * self.fmt.per_byte // self.fmt.block
            values.append(oracle.dequantize(mine, of_row[:columns], self.fmt))
        return np.asarray(values)
