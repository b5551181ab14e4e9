"""`RowExperts`: experts that take gathered rows: bfloat16, weight-only MXFP4, and FP8."""

from __future__ import annotations

from typing import Any

from nbmoe import ops
from nbmoe.activation import GatedActivation
from nbmoe.arrays import BFLOAT16
from nbmoe.checkpoints.stack import ExpertStack
from nbmoe.nn.experts import gathered
from nbmoe.nn.products import Product
from nbmoe.nn.run import Groups, Run


class RowExperts:
    """Gather (and quantize), gate/up, activation (and quantize), down.

    Attributes:
        num_experts: E.
        hidden_size: H [elements].
        moe_dim: D [elements].
        product: The weights, and how rows are quantized for them.
        interleaved: Whether gate and up columns alternate.
    """

    def __init__(
        self,
        stack: ExpertStack,
        product: Product,
        activation: GatedActivation,
        *,
        interleaved: bool = False,
    ) -> None:
        """Joins weights and an activation.

        Args:
            stack: The weights, for their sizes.
            product: The same weights on the backend.
            activation: What joins gate and up.
            interleaved: Whether their rows alternate in the weights.
        """
        self.num_experts = stack.num_experts
        self.hidden_size = stack.hidden_size
        self.moe_dim = stack.moe_dim
        self.product = product
        self.interleaved = interleaved
        self._activation = activation

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages in order."""
        first = "quantize" if self.product.quantizes else "gather"
        return (first, "gate_up", "activation", "down")

    def __call__(self, x: Any, groups: Groups, run: Run) -> Any:
        """See `nbmoe.nn.experts.Experts`."""
        product, (first, *_) = self.product, self.stages
        with run.stage(first):
            rows = gathered(x, groups, self.hidden_size, run)
            hidden = product.quantize(rows, "gate_up", groups, run)
        with run.stage("gate_up"):
            gate_up = product.multiply(hidden, "gate_up", groups, run)
        with run.stage("activation"):
            inner = run.array("inner", (groups.rows, product.inner_size), BFLOAT16)
            ops.gated_activation(
                gate_up,
                activation=self._activation,
                interleaved=self.interleaved,
                out=inner,
                **run.options,
            )
            operands = product.quantize(inner, "down", groups, run)
        with run.stage("down"):
            return product.multiply(operands, "down", groups, run)
