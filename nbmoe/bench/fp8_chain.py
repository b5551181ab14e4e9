"""FP8 tokens by FP8 weights, with scales a block or a row, and by MXFP4 weights folded into FP8."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from nbmoe import ops
from nbmoe.bench.block_chain import BlockWeights, has_layout
from nbmoe.bench.chain import Positions
from nbmoe.bench.entry import MIXED, MIXED_PAIR, PACKED, PREPARED, Step, in_turn, step
from nbmoe.bench.exact import F64Array
from nbmoe.bench.memory import Memory
from nbmoe.bench.models import Model
from nbmoe.bench.row_chains import RowChain
from nbmoe.codecs import decode_e4m3
from nbmoe.formats import MXFP4
from nbmoe.layouts import ceil_div
from nbmoe.prepared.fp8 import unpack_fp8_tokens

_BLOCK = 128
_NO_BOUND = float(2**100)


class Fp8Weights:
    """Random e4m3 weights with a scale a block of 128 x 128, or a row."""

    def __init__(self, memory: Memory, model: Model, by_row: bool = False) -> None:
        self.memory, self._by_row = memory, by_row
        self.codes, self.scales = [], []
        for n, k in model.matmuls:
            self.codes.append(memory.codes(model.experts, n, k))
            blocks = (n, 1) if by_row else (ceil_div(n, _BLOCK), ceil_div(k, _BLOCK))
            self.scales.append(memory.factors(model.experts, *blocks))

    @functools.cached_property
    def prepared(self) -> list[Any]:
        """The codes for the Hopper kernels."""
        return [ops.prepare_fp8_weights(codes) for codes in self.codes]

    def rows(self, leg: int, expert: int, columns: Positions) -> F64Array:
        """Dequantized weight rows."""
        codes = self.memory.read(self.codes[leg][expert])[columns]
        scales = self.memory.read(self.scales[leg][expert]).astype(np.float64)
        values = decode_e4m3(codes).astype(np.float64)
        result: F64Array
        if self._by_row:
            result = values * scales[columns]
        else:
            across = np.arange(codes.shape[1]) // _BLOCK
            result = values * scales[columns // _BLOCK][:, across]
        return result


class Fp8Chain(RowChain):
    """e4m3 tokens with a scale 128 values of a row, e4m3 weights.

    Prepared operands are multiplied as e4m3, others as float16: their bytes differ.
    """

    activations, weights = "fp8_group", "fp8_block"
    same_bytes = False
    group = _BLOCK
    """Values of a row that share a scale, -1 for all."""

    def variants(self) -> tuple[str, ...]:
        return PACKED, PREPARED, MIXED

    def missing(self, variant: str) -> str:
        for name in ("prepare_fp8_weights", "prepare_fp8_tokens"):
            if variant != PACKED and not hasattr(ops, name):
                return f"this version has no nbmoe.ops.{name}"
        if variant == PREPARED and not has_layout(ops.quantize_dynamic_scaled_float8):
            return "quantizers of this version have no layout="
        return ""

    def legs(self, variant: str) -> tuple[str, ...]:
        return () if variant == MIXED else super().legs(variant)

    def extra_legs(self, variant: str) -> tuple[str, ...]:
        return ("prepare", "prepare_inner") if variant == MIXED else ()

    def pair_legs(self, variant: str) -> tuple[str, ...]:
        return MIXED_PAIR if variant == MIXED else super().pair_legs(variant)

    def make(self, leg: str, variant: str) -> Step:
        if leg == "quantize":
            gathered = self.gather()
            return in_turn(gathered, self._quantize(gathered.result, variant))
        if leg == "activate":
            activated = self.activated(variant)
            return in_turn(activated, self._quantize(activated.result, variant))
        if leg in ("prepare", "prepare_inner"):
            codes, scales = self.operand(int(leg == "prepare_inner"))
            return step(ops.prepare_fp8_tokens, codes, scales, self.routed.slots[0])
        i = int(leg == "down")
        if variant == PACKED:
            codes, scales = self.operand(i)
            operands = codes, self.w.codes[i], scales
        elif variant == PREPARED:
            operands = self.operand(i, PREPARED), self.w.prepared[i], None
        else:
            tokens = self.get("prepare_inner" if i else "prepare", MIXED).result
            operands = tokens, self.w.prepared[i], None
        return step(
            self.matmul(),
            *operands,
            self.weight_scales(i),
            *self.routed.plain_slots,
            estimated_total_m=self.problem.rows,
            # The routing is done before what a matmul follows, as in a layer.
            routed_before=True,
        )

    def weight_scales(self, leg: int) -> Any:
        """What goes with the weights of a matmul."""
        return self.w.scales[leg]

    def matmul(self) -> Callable[..., Any]:
        """The operation."""
        return ops.grouped_dynamic_scaled_fp8_matmul

    def rows(self, leg: int, variant: str, positions: Positions) -> F64Array:
        if variant != PREPARED:
            return self._dequantized(self.operand(leg), positions)
        tokens = self.operand(leg, PREPARED)
        host = [self.memory.read(array) for array in (tokens.data, tokens.scales)]
        on_host = dataclasses.replace(tokens, data=host[0], scales=host[1])
        starts = self.problem.starts.astype(np.uint32)
        return self._dequantized(unpack_fp8_tokens(on_host, starts), positions)

    def inner_rows(self, result: Any, positions: Positions) -> F64Array | None:
        return self._dequantized(result, positions) if isinstance(result, tuple) else None

    def _quantize(self, rows: Any, variant: str) -> Step:
        return step(
            ops.quantize_dynamic_scaled_float8,
            rows,
            group_size_or_per_token=self.group,
            scale_ub=_NO_BOUND,
            row_offsets=self.routed.slots[0],
            **({"layout": "prepared"} if variant == PREPARED else {}),
        )

    def _dequantized(self, packed: tuple[Any, Any], positions: Positions) -> F64Array:
        codes, scales = packed
        factors = self.memory.read(scales).astype(np.float64)
        values = []
        for row in positions:
            mine = decode_e4m3(self.memory.read(codes[int(row)]).view(np.uint8))
            across = np.arange(len(mine)) // (len(mine) if self.group < 0 else self.group)
            values.append(mine.astype(np.float64) * factors[across, int(row)])
        return np.asarray(values)


class Fp8RowChain(Fp8Chain):
    """e4m3 tokens and weights with a scale a row; the quantizer writes packed tokens only."""

    activations = weights = "fp8_row"
    group = -1

    def missing(self, variant: str) -> str:
        return super().missing(MIXED if variant == PREPARED else variant)

    def legs(self, variant: str) -> tuple[str, ...]:
        return super().legs(variant) if variant == PACKED else ()

    def make(self, leg: str, variant: str) -> Step:
        # Prepared tokens are those that the mixed pair prepares.
        return self.get(leg, MIXED) if variant == PREPARED else super().make(leg, variant)

    def matmul(self) -> Callable[..., Any]:
        return ops.grouped_rowwise_dynamic_scaled_fp8_matmul

    def rows(self, leg: int, variant: str, positions: Positions) -> F64Array:
        return super().rows(leg, PACKED, positions)


class FoldedWeights(BlockWeights):
    """Random MXFP4 weights, prepared for FP8 tokens."""

    def __init__(self, memory: Memory, model: Model) -> None:
        super().__init__(memory, model, MXFP4)

    @functools.cached_property
    def prepared(self) -> list[Any]:
        """The same with their scales folded into the codes."""
        return [
            ops.prepare_w4a8_weights(*operands)
            for operands in zip(self.codes, self.scales, strict=True)
        ]


class FoldedRowChain(Fp8RowChain):
    """e4m3 tokens with a scale a row, MXFP4 weights: prepared operands alone."""

    weights = "mxfp4"

    def variants(self) -> tuple[str, ...]:
        return PREPARED, MIXED

    def missing(self, variant: str) -> str:
        return "" if hasattr(ops, "prepare_w4a8_weights") else "this version folds no MXFP4 weights"

    def legs(self, variant: str) -> tuple[str, ...]:
        middle = ("activate", "prepare_inner", "down")
        return ("quantize", "prepare", "gate_up", *middle) if variant == MIXED else ()

    def extra_legs(self, variant: str) -> tuple[str, ...]:
        return ()

    def weight_scales(self, leg: int) -> Any:
        return None

    def operand(self, leg: int, variant: str = MIXED) -> Any:
        return super().operand(leg, MIXED)

    def rows(self, leg: int, variant: str, positions: Positions) -> F64Array:
        return self._dequantized(self.operand(leg), positions)
