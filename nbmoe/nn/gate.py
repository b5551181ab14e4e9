"""`MoEGate`: from tokens to the experts they go to."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe import ops
from nbmoe.arrays import BFLOAT16, describe, to_backend
from nbmoe.backend import resolve
from nbmoe.checkpoints.router import Router
from nbmoe.codecs import decode_bf16, encode_bf16
from nbmoe.errors import DTypeError, ShapeError, message
from nbmoe.nn.run import Run
from nbmoe.nn.trace import StageClock
from nbmoe.nn.workspace import Workspace
from nbmoe.ops.route_indices import route_with_indices
from nbmoe.reference import RoutingIndices

_MAX_PARTS = 3


class MoEGate:
    """Logits of all experts, then the k best of each token.

    By default what `max.nn.moe.MoEGate` computes: the k largest logits themselves. `scoring` makes
    it another model's router; `SigmoidTopKRouter` is the one with a correction bias.

    A float32 weight is held as the sum of up to three bfloat16 parts, whose logits are summed: no
    bit of it is lost.

    Attributes:
        backend: The `nbmoe.backend.Backend` that runs the kernels.
        hidden_dim: H [elements].
        num_experts: E.
        num_experts_per_token: k.
        options: Keywords of `nbmoe.ops.route`.
    """

    def __init__(
        self,
        weight: npt.NDArray[Any],
        num_experts_per_token: int,
        *,
        scoring: str = "none",
        renormalize: bool = False,
        bias: npt.NDArray[Any] | None = None,
        routed_scaling_factor: float = 1.0,
        backend: str | None = None,
    ) -> None:
        """Uploads a gate.

        Args:
            weight: bf16 or f32 [E, H] in host memory, H % 8 == 0.
            num_experts_per_token: k.
            scoring: As in `nbmoe.ops.route`.
            renormalize: As in `nbmoe.ops.route`.
            bias: bf16 or f32 [E] added to the logits, or None.
            routed_scaling_factor: As in `nbmoe.ops.route`.
            backend: As in `nbmoe.nn.MoEQuantized`.

        Raises:
            DTypeError, ShapeError: An array is of another type or shape.
            ArgTypeError, RangeError, ConfigError: As `nbmoe.ops.route`.
        """
        self.backend = resolve(backend, api=type(self).__name__)
        parts = _bf16_parts(self._take("weight", weight, (None, None)))
        self.num_experts, self.hidden_dim = weight.shape
        self.num_experts_per_token = num_experts_per_token
        self.num_parts = len(parts)
        self._weight = self._put(np.concatenate(parts))
        self._bias = self._take_vector("bias", bias)
        self._correction_bias: Any = None
        self.options: dict[str, Any] = {
            "scoring": scoring,
            "renormalize": renormalize,
            "routed_scaling_factor": routed_scaling_factor,
            "num_parts": self.num_parts,
        }
        self._check_options()

    @staticmethod
    def of_router(router: Router, *, backend: str | None = None) -> MoEGate:
        """The gate that a checkpoint's router describes.

        Args:
            router: The parameters and the rule.
            backend: As in `nbmoe.nn.MoEQuantized`.
        """
        from nbmoe.nn.sigmoid_router import SigmoidTopKRouter

        if router.scoring == "sigmoid":
            return SigmoidTopKRouter(
                router.weight,
                router.top_k,
                norm_topk_prob=router.renormalize,
                correction_bias=router.correction_bias,
                routed_scaling_factor=router.scaling_factor,
                n_groups=router.n_group,
                topk_group=router.topk_group,
                bias=router.bias,
                backend=backend,
            )
        return MoEGate(
            router.weight,
            router.top_k,
            scoring=router.scoring,
            renormalize=router.renormalize and router.scoring != "none",
            bias=router.bias,
            routed_scaling_factor=router.scaling_factor,
            backend=backend,
        )

    def __call__(self, x: Any, *, stream: Any = None) -> tuple[Any, Any]:
        """Routes tokens.

        Args:
            x: bf16 (T, H), where the backend's kernels can reach it.
            stream: See `nbmoe.ops`.

        Returns:
            topk_ids (T, k) int32 and topk_weights (T, k) float32.

        Raises:
            As `nbmoe.ops.router_logits`.
        """
        run = Run(Workspace(self.backend.name), StageClock(), stream)
        tokens = describe(type(self).__name__, "x", x).shape[0]
        return self.forward(x, tokens, run)

    def forward(
        self, x: Any, tokens: int, run: Run, *, shared_slot: bool = False
    ) -> tuple[Any, Any]:
        """Routes tokens within a layer's call.

        Args:
            x: bf16 (T, H).
            tokens: T.
            run: The call.
            shared_slot: As in `nbmoe.ops.route`.

        Returns:
            `(topk_ids, topk_weights)`, buffers of the workspace.
        """
        logits, out = self._logits(x, tokens, run, shared_slot)
        return ops.route(
            logits,
            self.num_experts_per_token,
            out=out,
            **self._route_options(run, shared_slot),
        )

    def forward_with_indices(
        self,
        x: Any,
        tokens: int,
        run: Run,
        indices: RoutingIndices,
        *,
        shared_slot: bool = False,
    ) -> tuple[Any, Any]:
        """Routes tokens and groups the routed rows by expert, in one launch for few tokens.

        Args:
            x: bf16 (T, H).
            tokens: T.
            run: The call.
            indices: Buffers for what `nbmoe.ops.moe_create_indices` gives for the E experts, and
                the shared one.
            shared_slot: As in `nbmoe.ops.route`.

        Returns:
            As `forward`.
        """
        logits, out = self._logits(x, tokens, run, shared_slot)
        ids, weights, _ = route_with_indices(
            logits,
            self.num_experts_per_token,
            out=(*out, *indices),
            **self._route_options(run, shared_slot),
        )
        return ids, weights

    def _logits(
        self, x: Any, tokens: int, run: Run, shared_slot: bool
    ) -> tuple[Any, tuple[Any, Any]]:
        """The logits, and buffers for ids and weights."""
        columns = self.num_parts * self.num_experts
        shape = (tokens, self.num_experts_per_token + shared_slot)
        logits = run.array("logits", (tokens, columns), np.float32)
        ops.router_logits(x, self._weight, out=logits, **run.options)
        out = (run.array("topk_ids", shape, np.int32), run.array("topk_weights", shape, np.float32))
        return logits, out

    def _route_options(self, run: Run, shared_slot: bool) -> dict[str, Any]:
        return {
            "bias": self._bias,
            "correction_bias": self._correction_bias,
            "shared_slot": shared_slot,
            **self.options,
            **run.options,
        }

    def _check_options(self) -> None:
        """Lets the operation refuse what it would refuse at the first call."""
        logits = np.zeros((0, self.num_parts * self.num_experts), np.float32)
        correction = None if self._correction_bias is None else np.zeros(self.num_experts, "f4")
        ops.route(
            logits,
            self.num_experts_per_token,
            correction_bias=correction,
            backend="reference",
            **self.options,
        )

    def _take(self, name: str, array: Any, shape: tuple[int | None, ...]) -> npt.NDArray[Any]:
        api = type(self).__name__
        got = describe(api, name, array)
        if got.dtype not in ("bfloat16", "float32") or got.view is None:
            raise DTypeError(message(api, name, "a numpy array of bfloat16 or float32", got))
        sizes = zip(shape, got.shape, strict=False)
        if len(got.shape) != len(shape) or any(e not in (None, g) for e, g in sizes):
            raise ShapeError(message(api, name, f"shape {shape}", got.shape))
        return got.view

    def _take_vector(self, name: str, array: Any) -> Any:
        if array is None:
            return None
        values = self._take(name, array, (self.num_experts,))
        if values.dtype == BFLOAT16:
            values = decode_bf16(values)
        return self._put(values)

    def _put(self, array: npt.NDArray[Any]) -> Any:
        return to_backend(array, self.backend.name)


def _bf16_parts(weight: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """bfloat16 arrays whose sum is the weight, bit for bit but for values below 2**-133."""
    if weight.dtype == BFLOAT16:
        return [weight]
    parts: list[npt.NDArray[Any]] = []
    rest = weight
    while not parts or (len(parts) < _MAX_PARTS and rest.any()):
        parts.append(encode_bf16(rest))
        rest = rest - decode_bf16(parts[-1])
    return parts
