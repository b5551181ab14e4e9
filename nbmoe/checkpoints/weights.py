"""`ExpertWeights`: one MoE layer in the one convention that the rest of nbmoe knows."""

from __future__ import annotations

from dataclasses import dataclass

from nbmoe.checkpoints.router import Router
from nbmoe.checkpoints.stack import ExpertStack
from nbmoe.errors import ArgTypeError, ShapeError, message

_API = "ExpertWeights"


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertWeights(ExpertStack):
    """The experts, the router and the shared experts of one MoE layer, in host memory.

    All of `ExpertStack` (format, codes, scales, biases, activation, source), and

    Attributes:
        router: The gate and its rule.
        shared: Experts that every token goes to with weight 1, as one expert (E = 1) that may be
            wider than the routed ones and of another format; None if there are none.
        apply_router_weight_first: Whether an expert's input is multiplied by the routing weight,
            instead of its output (Llama-4).

    Raises:
        ArgTypeError, ConfigError, DTypeError, ShapeError, ScaleError: As `ExpertStack`; and
            ShapeError if the router or the shared experts do not fit the experts.
    """

    router: Router
    shared: ExpertStack | None = None
    apply_router_weight_first: bool = False

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self.router.top_k

    @property
    def renormalize(self) -> bool:
        """Whether the chosen experts' weights are scaled to sum 1."""
        return self.router.renormalize

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.router, Router):
            raise ArgTypeError(message(_API, "router", "a Router", type(self.router).__name__))
        shape = (self.num_experts, self.hidden_size)
        if self.router.weight.shape != shape:
            got = self.router.weight.shape
            raise ShapeError(message(_API, "router.weight", f"(E, H) = {shape}", got))
        if self.shared is None:
            return
        if not isinstance(self.shared, ExpertStack):
            got_type = type(self.shared).__name__
            raise ArgTypeError(message(_API, "shared", "an ExpertStack or None", got_type))
        expected = (1, self.hidden_size)
        found = (self.shared.num_experts, self.shared.hidden_size)
        if found != expected:
            rule = f"one expert of hidden size {self.hidden_size}"
            raise ShapeError(message(_API, "shared", rule, f"{found[0]} of {found[1]}"))
