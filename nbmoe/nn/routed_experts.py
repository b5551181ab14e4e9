"""`RoutedExperts`: quantized experts for tokens that somebody else has routed."""

from __future__ import annotations

from typing import Any

from nbmoe import arrays, ops
from nbmoe.arrays import BFLOAT16
from nbmoe.backend import resolve
from nbmoe.checkpoints.stack import ExpertStack
from nbmoe.nn.build import build_experts, strategy_name
from nbmoe.nn.run import Groups, Run, routing_buffers
from nbmoe.nn.trace import StageClock
from nbmoe.nn.workspace import Workspace
from nbmoe.streams import gpu_stream
from nbmoe.validate import BF16, F32, I32, Call


class RoutedExperts:
    """Groups rows by expert, computes the experts and combines the results.

    What `MoELayer` does behind its router, with the same bytes; one object serves one stream at a
    time, and its buffers are made once.

    Attributes:
        backend: The `nbmoe.backend.Backend` that runs the kernels.
        num_experts: E.
        hidden_size: H [elements].
        moe_dim: D [elements].
        strategy: How activations are quantized and multiplied, for reports.
    """

    def __init__(
        self, stack: ExpertStack, *, backend: str | None = None, prepared: bool | None = None
    ) -> None:
        """Prepares the weights.

        Args:
            stack: The experts in host memory.
            backend: As in `nbmoe.nn.MoEQuantized`.
            prepared: As in `nbmoe.nn.MoEQuantized`.

        Raises:
            As `nbmoe.nn.MoEQuantized`.
        """
        api = type(self).__name__
        self.backend = resolve(backend, api=api)
        self._experts = build_experts(api, stack, self.backend, prepared=prepared)
        self._workspace = Workspace(self.backend.name)
        self.num_experts = stack.num_experts
        self.hidden_size = stack.hidden_size
        self.moe_dim = stack.moe_dim
        self.strategy = strategy_name(stack, self._experts)

    def __call__(
        self, x: Any, expert_ids: Any, weights: Any, *, out: Any = None, stream: Any = None
    ) -> Any:
        """Computes the experts of all tokens.

        Args:
            x: bfloat16 (T, H), where the backend computes.
            expert_ids: int32 (T, k), the experts of each token, no one twice; -1 for none.
            weights: float32 (T, k), factors of their results.
            out: bfloat16 (T, H) to write.
            stream: CUDA stream, None as for `nbmoe.ops`.

        Returns:
            `out`, or bfloat16 (T, H) of `x`'s kind.

        Raises:
            DTypeError, ShapeError, LayoutError, DeviceError: an array cannot be used.
            RoutingError: an id is outside [-1, E), or a token has an expert twice.
        """
        call = Call(type(self).__name__, None)
        tokens = call.array("x", x, BF16, "(T, H)")
        call.shape("x", (tokens.shape[0], self.hidden_size), f"(T, H), H = {self.hidden_size}")
        count = tokens.shape[0]
        ids = call.array("expert_ids", expert_ids, I32, "(T, k)")
        k = ids.shape[1]
        call.shape("expert_ids", (count, k), f"({count}, k)")
        call.array("weights", weights, F32, "(T, k)")
        call.shape("weights", (count, k), f"({count}, {k}), one an id")
        handle = gpu_stream(call.api, stream, (tokens,)) if self.backend.on_gpu else stream
        run = Run(self._workspace, StageClock(), handle)
        if out is None:
            out = arrays.empty(tokens, (count, self.hidden_size), BFLOAT16)
        indices = ops.moe_create_indices(
            expert_ids,
            self.num_experts,
            out=routing_buffers(run, count * k, self.num_experts),
            **run.options,
        )
        down = self._experts(x, Groups.of(indices, count, k), run)
        restore = indices.restore_token_order
        return ops.moe_finalize(down, restore, weights, out=out, **run.options)
