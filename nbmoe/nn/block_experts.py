"""`BlockExperts`: experts whose weights and activations are NVFP4, MXFP4 or MXFP8."""

from __future__ import annotations

from typing import Any

from nbmoe.activation import GatedActivation
from nbmoe.arrays import BFLOAT16, named_dtype
from nbmoe.checkpoints.stack import ExpertStack
from nbmoe.layouts import TILE_SHAPE, activation_tiles, ceil_div
from nbmoe.nn.experts import Put, gathered
from nbmoe.nn.prepared import prepare_experts
from nbmoe.nn.run import Groups, Run
from nbmoe.strategies import NvMxf4f8Strategy

FUSED_STAGE = "gate_up + activation"


class BlockExperts:
    """Quantize, gate/up, activation and quantize, down.

    The fused path multiplies, activates and quantizes in one kernel, for which gate and up rows
    alternate. The chained path does it in two and gives the same bytes; it also takes an
    activation that is a function.

    Attributes:
        num_experts: E.
        hidden_size: H [elements].
        moe_dim: D [elements].
        strategy: What quantizes and multiplies.
        fused: Whether the path is the fused one.
        interleaved: Whether gate and up rows alternate on either path.
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
    ) -> None:
        """Permutes, tiles and uploads a stack.

        Args:
            stack: Weights in the strategy's format.
            strategy: What quantizes and multiplies.
            activation: What joins gate and up.
            put: Moves an array to the backend.
            fused: Whether to take the fused path.
            interleaved: Whether the stack's gate and up rows alternate already.
        """
        self.num_experts = stack.num_experts
        self.hidden_size = stack.hidden_size
        self.moe_dim = stack.moe_dim
        self.strategy = strategy
        self.fused = fused
        self.interleaved = interleaved
        self._activation = activation
        self._placed = prepare_experts(stack, permute=fused and not interleaved).map(put)

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages in order."""
        if self.fused:
            return ("quantize", FUSED_STAGE, "down")
        return ("quantize", "gate_up", "activation", "down")

    def __call__(self, x: Any, groups: Groups, run: Run) -> Any:
        """See `nbmoe.nn.experts.Experts`."""
        placed, strategy, rows = self._placed, self.strategy, groups.rows
        with run.stage("quantize"):
            hidden = self._quantize(x, groups, run)
        inputs = (*hidden, *groups.slots, None)
        inner = self._buffers("inner", rows, self.moe_dim, run)
        if self.fused:
            with run.stage(FUSED_STAGE):
                strategy.grouped_matmul_swiglu(
                    placed.gate_up,
                    placed.gate_up_scales,
                    expert_scales=placed.gate_up_expert_scales,
                    input_scales=placed.down_inverse_input_scales,
                    expert_inputs=inputs,
                    estimated_total_m=rows,
                    activation=self._activation,
                    bias=placed.gate_up_bias,
                    scales_are_inverted=True,
                    out=inner,
                    stream=run.stream,
                )
        else:
            with run.stage("gate_up"):
                gate_up = run.array("gate_up", (rows, 2 * self.moe_dim), BFLOAT16)
                strategy.grouped_matmul(
                    placed.gate_up,
                    placed.gate_up_scales,
                    placed.gate_up_expert_scales,
                    inputs,
                    rows,
                    bias=placed.gate_up_bias,
                    out=gate_up,
                    stream=run.stream,
                )
            with run.stage("activation"):
                strategy.fused_silu_quantize(
                    gate_up,
                    placed.down_inverse_input_scales,
                    inputs,
                    activation=self._activation,
                    interleaved=self.interleaved,
                    scales_are_inverted=True,
                    out=inner,
                    stream=run.stream,
                )
        with run.stage("down"):
            return strategy.grouped_matmul(
                placed.down,
                placed.down_scales,
                placed.down_expert_scales,
                (*inner, *groups.slots, None),
                rows,
                bias=placed.down_bias,
                out=run.array("down", (rows, self.hidden_size), BFLOAT16),
                stream=run.stream,
            )

    def _quantize(self, x: Any, groups: Groups, run: Run) -> tuple[Any, Any]:
        """Quantizes the rows of the groups; weighted rows have to be gathered first."""
        order, divisor = groups.order, groups.divisor
        if groups.weights is not None:
            x, order, divisor = gathered(x, groups, self.hidden_size, run), None, 1
        buffers = self._buffers("hidden", groups.rows, self.hidden_size, run)
        return self.strategy.grouped_quantize(
            x,
            self.strategy.format.block,
            self._placed.gate_up_inverse_input_scales,
            *groups.slots,
            order,
            divisor,
            scales_are_inverted=True,
            out=buffers,
            stream=run.stream,
        )

    def _buffers(self, name: str, rows: int, k: int, run: Run) -> tuple[Any, Any]:
        fmt = self.strategy.format
        tiles = activation_tiles(rows, self.num_experts)
        shape = (tiles, ceil_div(k, fmt.tile_columns), *TILE_SHAPE)
        return (
            run.array(f"{name}_codes", (rows, fmt.packed_k(k)), named_dtype(fmt.codes_dtype)),
            run.array(f"{name}_scales", shape, named_dtype(fmt.scales_dtype)),
        )
