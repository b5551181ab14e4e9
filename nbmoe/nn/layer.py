"""`MoELayer`: what all layers do alike, from tokens to combined tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbmoe import arrays, ops
from nbmoe.arrays import BFLOAT16, Array, Kind, describe, to_backend, to_numpy
from nbmoe.backend import Backend
from nbmoe.errors import DTypeError, ShapeError, message
from nbmoe.nn.captured import CapturedLayer
from nbmoe.nn.experts import Experts
from nbmoe.nn.gate import MoEGate
from nbmoe.nn.run import Groups, Run, one_group, routing_buffers
from nbmoe.nn.trace import MoETrace, StageClock
from nbmoe.nn.workspace import Workspace
from nbmoe.reference import RoutingIndices
from nbmoe.streams import gpu_stream
from nbmoe.validate import BF16, Call


class MoELayer:
    """Router, experts, shared experts and combination of one MoE layer.

    A call runs on one stream and never waits for it, if its input is where the backend computes:

        gate -> moe_create_indices -> experts -> (shared experts) -> moe_finalize

    Every backend gives the same bytes. Intermediates live in the layer's `Workspace`: after the
    first call with a number of tokens, or with more, the only memory that a call asks for is its
    result's, and with `out=` none. So one layer object serves one stream at a time.

    `capture` makes a CUDA graph of a call. By hand, a call can be captured if `x` and `out=` are on
    the GPU and a call with as many tokens came before: that one loads kernels and makes room, which
    a capture refuses to. The graph holds addresses of weights and buffers and may rely on them as
    long as the layer exists, whatever calls, captures and larger sizes follow: the layer keeps what
    it outgrows (`Workspace` says how little that is; after `reserve` of the largest size, nothing).
    Keeping the layer, `x` and `out` is up to the caller, and so is one order for all replays and
    calls of a layer, because they share buffers.

    Attributes:
        backend: The `nbmoe.backend.Backend` that runs the kernels, with the reason for the choice.
        gate: The router.
        experts: The routed experts.
        shared_experts: The shared experts if they are computed apart, else None.
        shared_slot: Whether shared experts are slot 0 of `experts`.
        apply_router_weight_first: Whether routing weights multiply inputs, not outputs.
        num_experts: E, routed experts.
        hidden_size: H [elements].
        moe_dim: D [elements].
        top_k: Routed experts per token.
        strategy: How activations are quantized and multiplied, for reports.
        workspace: The buffers.
    """

    def __init__(
        self,
        backend: Backend,
        gate: MoEGate,
        experts: Experts,
        *,
        shared_experts: Experts | None = None,
        shared_slot: bool = False,
        apply_router_weight_first: bool = False,
        strategy: str = "",
    ) -> None:
        """Joins the parts of a layer, all of the same backend."""
        self.backend = backend
        self.gate = gate
        self.experts = experts
        self.shared_experts = shared_experts
        self.shared_slot = shared_slot
        self.apply_router_weight_first = apply_router_weight_first
        self.num_experts = gate.num_experts
        self.hidden_size = experts.hidden_size
        self.moe_dim = experts.moe_dim
        self.top_k = gate.num_experts_per_token
        self.strategy = strategy
        self.workspace = Workspace(backend.name)

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages of a call in order."""
        shared = ("shared experts",) if self.shared_experts is not None else ()
        return ("route", *self.experts.stages, *shared, "combine")

    @property
    def renormalize(self) -> bool:
        """Whether the chosen experts' weights are scaled to sum 1."""
        return bool(self.gate.options["renormalize"])

    def __call__(self, x: Any, *, out: Any = None, stream: Any = None) -> Any:
        """Computes the layer.

        Args:
            x: bf16 [T, H] tokens (ml_dtypes.bfloat16 or uint16 bit patterns), in host memory or,
                on the gpu backend, on the GPU. T may be 0. A host array is copied to the GPU first,
                which waits.
            out: bf16 [T, H] to write, where the backend computes.
            stream: CUDA stream for the kernels, None as for `nbmoe.ops`.

        Returns:
            `out`, or bf16 [T, H] where `x` is: numpy for numpy, a device array for a device array.

        Raises:
            DTypeError, ShapeError: `x` or `out` is not bf16 [T, H].
            LayoutError: `out` cannot be written.
            DeviceError: `x` or `out` is where the backend cannot reach it.
        """
        source = self._check(x, out)
        placed = self._place(x, source, stream)
        run = Run(self.workspace, StageClock(), self._one_stream(placed, stream))
        output = self._forward(placed, source.shape[0], run, out)
        if out is not None or describe(self._api, "output", output).kind is source.kind:
            return output
        self._wait()  # the copy below is on the default stream
        return to_numpy(output, BFLOAT16)

    def trace(
        self, x: Any, *, stream: Any = None, on_stage: Callable[[str], None] | None = None
    ) -> MoETrace:
        """Computes the layer and keeps everything: intermediates on the host, times per stage.

        Args:
            x: As in a call.
            stream: As in a call.
            on_stage: Called with the name of each of `stages` as it begins.

        Raises:
            As a call.
        """
        source = self._check(x, None)
        placed = self._place(x, source, stream)
        clock = StageClock(self._wait, on_stage)
        # Buffers of its own: what no kernel writes is 0 in a trace, whatever ran before.
        workspace = Workspace(self.backend.name)
        run = Run(workspace, clock, self._one_stream(placed, stream), keeps=True)
        output = self._forward(placed, source.shape[0], run, None)
        self._wait()
        return MoETrace.of(run.found, output, self.gate.num_parts, clock.seconds)

    def reserve(self, tokens: int) -> None:
        """Makes room for calls with up to `tokens` tokens, by computing as many zeros.

        Such calls then upload nothing and allocate nothing but their result. Kernels that only
        fewer tokens use are still loaded by the first of these calls.

        Args:
            tokens: T.
        """
        self(np.zeros((tokens, self.hidden_size), BFLOAT16))

    def capture(self, tokens: int) -> CapturedLayer:
        """The layer for `tokens` tokens as one CUDA graph; see `CapturedLayer`.

        Args:
            tokens: T, 1 or more.

        Raises:
            ArgTypeError, RangeError: `tokens` is no int of at least 1.
            DeviceError: The backend is not gpu.
        """
        return CapturedLayer(self, tokens)

    def _forward(self, x: Any, tokens: int, run: Run, out: Any) -> Any:
        if out is None:
            like = describe(self._api, "x", x)
            out = arrays.empty(like, (tokens, self.hidden_size), BFLOAT16)
        k = self.top_k + self.shared_slot
        with run.stage("route"):
            weights, indices = self._route(x, tokens, run)
        weights_first = weights if self.apply_router_weight_first else None
        groups = Groups.of(indices, tokens, k, weights_first)
        down = self.experts(x, groups, run)
        shared = self._compute_shared(x, tokens, run)
        if self.apply_router_weight_first:
            weights = run.workspace.constant_rows(
                "ones", tokens, lambda n: np.ones((n, k), np.float32)
            )
        restore = indices.restore_token_order
        with run.stage("combine"):
            return ops.moe_finalize(down, restore, weights, shared=shared, out=out, **run.options)

    def _route(self, x: Any, tokens: int, run: Run) -> tuple[Any, RoutingIndices]:
        """Routing weights, and where the routed rows go."""
        experts, slots = self.experts.num_experts, tokens * (self.top_k + self.shared_slot)
        indices = routing_buffers(run, slots, experts)
        shared_slot = self.shared_slot
        if experts == self.num_experts + shared_slot:
            _, weights = self.gate.forward_with_indices(
                x, tokens, run, indices, shared_slot=shared_slot
            )
            return weights, indices
        ids, weights = self.gate.forward(x, tokens, run, shared_slot=shared_slot)
        return weights, ops.moe_create_indices(ids, experts, out=indices, **run.options)

    def _compute_shared(self, x: Any, tokens: int, run: Run) -> Any:
        if self.shared_experts is None:
            return None
        with run.stage("shared experts"):
            groups = one_group(run.workspace, tokens)
            return self.shared_experts(x, groups, run.untimed("shared."))

    @property
    def _api(self) -> str:
        return type(self).__name__

    def _check(self, x: Any, out: Any) -> Array:
        array = describe(self._api, "x", x)
        rule = f"bfloat16 (T, {self.hidden_size})"
        if array.dtype not in ("bfloat16", "uint16"):
            hint = "round with nbmoe.codecs.encode_bf16"
            raise DTypeError(message(self._api, "x", rule, array, hint))
        if len(array.shape) != 2 or array.shape[1] != self.hidden_size:
            raise ShapeError(message(self._api, "x", rule, array))
        if out is not None:
            Call(self._api, None).output("out", out, BF16, "(T, H)", array.shape)
        return array

    def _place(self, x: Any, source: Array, stream: Any) -> Any:
        """The input where the kernels reach it."""
        if source.kind is not Kind.NUMPY:
            return x
        placed = to_backend(source.view, self.backend.name)  # type: ignore[arg-type]
        if stream is not None:
            self._wait()  # the kernels' stream may not wait for the copy on the default stream
        return placed

    def _one_stream(self, placed: Any, stream: Any) -> Any:
        """The stream of the whole call.

        Operations choose by their operands, and only the first of them sees the caller's array.
        """
        if not self.backend.on_gpu:
            return stream
        return gpu_stream(self._api, stream, (describe(self._api, "x", placed),))

    def _wait(self) -> None:
        if self.backend.on_gpu:
            from numba import cuda

            cuda.synchronize()
