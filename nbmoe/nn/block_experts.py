"""`BlockExperts`: experts whose weights and activations are NVFP4, MXFP4 or MXFP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbmoe import ops
from nbmoe.activation import GatedActivation
from nbmoe.arrays import BFLOAT16, named_dtype
from nbmoe.checkpoints.stack import ExpertStack
from nbmoe.layouts import TILE_SHAPE, activation_tiles, ceil_div
from nbmoe.nn.experts import Put, gathered
from nbmoe.nn.preparation import Prepare
from nbmoe.nn.prepared import prepare_experts, prepare_weights
from nbmoe.nn.run import Groups, Run
from nbmoe.prepared.tokens import token_shape
from nbmoe.strategies import NvMxf4f8Strategy
from nbmoe_kernels.heuristics_sm90 import fusing_pays
from nbmoe_kernels.mega_ffn_sm90_config import mega_ffn_pays

FUSED_STAGE = "gate_up + activation"

Operands = tuple[Any, Any]
"""Codes and their scales, or prepared tokens and None."""
Quantize = Callable[[Any, str], Any]
"""Quantizes into `out=` in a layout, "packed" or "prepared"."""


class BlockExperts:
    """Quantize, gate/up, activation and quantize, down.

    The fused path multiplies, activates and quantizes in one kernel, for which gate and up rows
    alternate. The chained path does it in two and gives the same bytes; it also takes an
    activation that is a function. Prepared weights and tokens change no byte either, nor does
    `mega_ffn_nvfp4`, which does all but the first step in one launch.

    Attributes:
        num_experts: E.
        hidden_size: H [elements].
        moe_dim: D [elements].
        strategy: What quantizes and multiplies.
        fused: Whether the path is the fused one. With prepared weights it takes two kernels, or
            one for down, too, where that is faster; a trace takes the one with the stages' names.
        interleaved: Whether gate and up rows alternate on either path.
        prepared: Whether weights and tokens are prepared (`nbmoe.prepared`).
    """

    def __init__(
        self,
        stack: ExpertStack,
        strategy: NvMxf4f8Strategy,
        activation: GatedActivation,
        put: Put,
        *,
        fused: bool,
        interleaved: bool = False,
        prepare: Prepare | None = None,
    ) -> None:
        """Permutes, tiles and uploads a stack.

        Args:
            stack: Weights in the strategy's format.
            strategy: What quantizes and multiplies.
            activation: What joins gate and up.
            put: Moves an array to the backend.
            fused: Whether to take the fused path.
            interleaved: Whether the stack's gate and up rows alternate already.
            prepare: Prepares weights, and so tokens; None to prepare neither.
        """
        self.num_experts = stack.num_experts
        self.hidden_size = stack.hidden_size
        self.moe_dim = stack.moe_dim
        self.strategy = strategy
        self.fused = fused
        self.interleaved = interleaved
        self.prepared = prepare is not None
        self._activation = activation
        self._placed = prepare_experts(stack, permute=fused and not interleaved).map(put)
        if prepare is not None:
            self._placed = prepare_weights(self._placed, prepare, stack.format)

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages in order."""
        if self.fused:
            return ("quantize", FUSED_STAGE, "down")
        return ("quantize", "gate_up", "activation", "down")

    def __call__(self, x: Any, groups: Groups, run: Run) -> Any:
        """See `nbmoe.nn.experts.Experts`."""
        placed, rows = self._placed, groups.rows
        shape = (rows, 2 * self.moe_dim)
        with run.stage("quantize"):
            hidden = self._quantize(x, groups, run)
        if self.fused and self.prepared and not run.keeps and self._takes_mega_ffn(rows):
            return self._mega_ffn(hidden, groups, run)
        if self.fused:
            with run.stage(FUSED_STAGE):
                inner = self._fused(hidden, groups, run)
        else:
            with run.stage("gate_up"):
                gate_up = self._gate_up(hidden, run.array("gate_up", shape, BFLOAT16), groups, run)
            with run.stage("activation"):
                inner = self._activate(gate_up, hidden, groups, run)
        with run.stage("down"):
            return self.strategy.grouped_matmul(
                placed.down,
                placed.down_scales,
                placed.down_expert_scales,
                (*inner, *groups.slots, None),
                rows,
                bias=placed.down_bias,
                routed_before=True,
                out=run.array("down", (rows, self.hidden_size), BFLOAT16),
                stream=run.stream,
            )

    def _fused(self, hidden: Operands, groups: Groups, run: Run) -> Operands:
        placed, strategy = self._placed, self.strategy
        if self.prepared and not fusing_pays(self.num_experts, groups.rows):
            # The chained path by another name: its bytes are the same.
            shape = (groups.rows, 2 * self.moe_dim)
            gate_up = self._gate_up(hidden, run.array("gate_up", shape, BFLOAT16), groups, run)
            return self._activate(gate_up, hidden, groups, run)
        return self._quantized(
            "inner",
            self.moe_dim,
            groups,
            run,
            lambda out, layout: strategy.grouped_matmul_swiglu(
                placed.gate_up,
                placed.gate_up_scales,
                expert_scales=placed.gate_up_expert_scales,
                input_scales=placed.down_inverse_input_scales,
                expert_inputs=(*hidden, *groups.slots, None),
                estimated_total_m=groups.rows,
                activation=self._activation,
                bias=placed.gate_up_bias,
                scales_are_inverted=True,
                layout=layout,
                routed_before=True,
                out=out,
                stream=run.stream,
            ),
        )

    def _takes_mega_ffn(self, rows: int) -> bool:
        tokens, weights = self.strategy.format.name, self.strategy.weight_format.name
        return mega_ffn_pays(tokens, weights, self.moe_dim, self.num_experts, rows)

    def _mega_ffn(self, hidden: Operands, groups: Groups, run: Run) -> Any:
        placed, rows, slots = self._placed, groups.rows, self.num_experts
        starts, _, ids = groups.slots
        # A buffer is 0 when it is made, and every launch leaves its counters at 0.
        counters = run.scratch(
            "mega_ffn_counters", (ops.mega_ffn_arrival_count_size(rows, slots),), np.uint32
        )
        size = ops.mega_ffn_workspace_size(rows, slots, self.moe_dim)
        return ops.mega_ffn_nvfp4(
            run.array("down", (rows, self.hidden_size), BFLOAT16),
            hidden[0],
            placed.gate_up,
            None,
            None,
            placed.down,
            None,
            starts,
            ids,
            None,
            placed.gate_up_expert_scales,
            placed.down_expert_scales,
            placed.down_inverse_input_scales,
            rows,
            slots,
            slots,
            counters,
            clamp_activation=self._activation.limit > 0,
            activation=self._activation,
            gate_up_bias=placed.gate_up_bias,
            down_bias=placed.down_bias,
            routed_before=True,
            workspace=run.scratch("inner_tokens", (size,), np.uint8),
            **run.options,
        )

    def _gate_up(self, hidden: Operands, out: Any, groups: Groups, run: Run) -> Any:
        placed = self._placed
        return self.strategy.grouped_matmul(
            placed.gate_up,
            placed.gate_up_scales,
            placed.gate_up_expert_scales,
            (*hidden, *groups.slots, None),
            groups.rows,
            bias=placed.gate_up_bias,
            routed_before=True,
            out=out,
            stream=run.stream,
        )

    def _activate(self, gate_up: Any, hidden: Operands, groups: Groups, run: Run) -> Operands:
        strategy, scales = self.strategy, self._placed.down_inverse_input_scales
        return self._quantized(
            "inner",
            self.moe_dim,
            groups,
            run,
            lambda out, layout: strategy.fused_silu_quantize(
                gate_up,
                scales,
                (*hidden, *groups.slots, None),
                activation=self._activation,
                interleaved=self.interleaved or self.fused,
                scales_are_inverted=True,
                layout=layout,
                out=out,
                stream=run.stream,
            ),
        )

    def _quantize(self, x: Any, groups: Groups, run: Run) -> Operands:
        """Quantizes the rows of the groups; weighted rows have to be gathered first."""
        order, divisor = groups.order, groups.divisor
        if groups.weights is not None:
            x, order, divisor = gathered(x, groups, self.hidden_size, run), None, 1
        strategy, scales = self.strategy, self._placed.gate_up_inverse_input_scales
        return self._quantized(
            "hidden",
            self.hidden_size,
            groups,
            run,
            lambda out, layout: strategy.grouped_quantize(
                x,
                strategy.format.block,
                scales,
                *groups.slots,
                order,
                divisor,
                scales_are_inverted=True,
                layout=layout,
                out=out,
                stream=run.stream,
            ),
        )

    def _quantized(
        self, name: str, k: int, groups: Groups, run: Run, quantize: Quantize
    ) -> Operands:
        """Quantizes rows to what the matmul takes.

        Args:
            name: What the rows are called.
            k: Elements of a row.
            groups: The rows.
            run: The call.
            quantize: Quantizes into buffers, in a layout.

        Returns:
            Codes and scales, or prepared tokens and None.
        """
        if not self.prepared:
            packed: Operands = quantize(self._buffers(name, groups.rows, k, run), "packed")
            return packed
        tokens = run.scratch(
            f"{name}_tokens", token_shape(groups.rows, self.num_experts, k), np.uint8
        )
        if not run.keeps:
            return quantize(tokens, "prepared"), None
        codes, scales = quantize(self._buffers(name, groups.rows, k, run), "packed")
        starts, offsets, _ = groups.slots
        fmt = self.strategy.format
        prepared = ops.prepare_tokens(
            codes, scales, starts, offsets, format=fmt, out=tokens, **run.options
        )
        return prepared, None

    def _buffers(self, name: str, rows: int, k: int, run: Run) -> tuple[Any, Any]:
        fmt = self.strategy.format
        tiles = activation_tiles(rows, self.num_experts)
        shape = (tiles, ceil_div(k, fmt.tile_columns), *TILE_SHAPE)
        return (
            run.array(f"{name}_codes", (rows, fmt.packed_k(k)), named_dtype(fmt.codes_dtype)),
            run.array(f"{name}_scales", shape, named_dtype(fmt.scales_dtype)),
        )
