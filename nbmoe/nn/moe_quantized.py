"""`MoEQuantized`: a quantized mixture-of-experts layer that runs on any backend."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy.typing as npt

from nbmoe import ops
from nbmoe.arrays import BFLOAT16, Array, Kind, describe, to_backend, to_numpy
from nbmoe.backend import resolve
from nbmoe.checkpoints import ExpertWeights, read_layer
from nbmoe.errors import DTypeError, ShapeError, message
from nbmoe.nn.prepared import PreparedExperts, prepare_experts
from nbmoe.nn.router import router_logits
from nbmoe.nn.trace import MoETrace, StageClock

STAGES = ("route", "quantize", "gate_up + SwiGLU", "down", "combine")
"""Names of the stages in execution order."""

_API = "MoEQuantized"


class MoEQuantized:
    """Router, NVFP4 experts and combination of one MoE layer.

    Weights are permuted, tiled and moved to the backend once, here. A call then routes on the host
    and runs five kernels:

        route -> moe_create_indices -> grouped_quantize_dynamic_block_scaled (gathers the tokens)
              -> grouped_matmul_blocked_swiglu -> grouped_matmul_block_scaled -> moe_finalize

    Every backend gives the same bytes.

    Attributes:
        backend: The `nbmoe.backend.Backend` that runs the kernels, with the reason for the choice.
        num_experts: E.
        hidden_size: H [elements].
        moe_dim: D [elements].
        top_k: Experts per token.
        renormalize: Whether the chosen experts' weights are scaled to sum 1.
    """

    def __init__(self, weights: ExpertWeights, *, backend: str | None = None) -> None:
        """Prepares a layer.

        Args:
            weights: The layer in host memory, from `nbmoe.checkpoints.read_layer` or made by hand.
            backend: "gpu", "emulate", "cudasim" or "reference"; None for `NBMOE_BACKEND`, or else
                a GPU if one is usable and emulation if not.

        Raises:
            ConfigError: The backend's name is unknown.
            DeviceError, UnsupportedError: The backend cannot run here.
            ScaleError: A product of scales leaves float32's normal range.
        """
        self.backend = resolve(backend, api=_API)
        self.num_experts = weights.num_experts
        self.hidden_size = weights.hidden_size
        self.moe_dim = weights.moe_dim
        self.top_k = weights.top_k
        self.renormalize = weights.renormalize
        self._router = weights.router
        prepared = prepare_experts(weights)
        placed = {f.name: self._put(getattr(prepared, f.name)) for f in fields(prepared)}
        self._experts = PreparedExperts(**placed)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        layer: int | None = None,
        *,
        backend: str | None = None,
    ) -> MoEQuantized:
        """Reads a layer of a checkpoint folder and prepares it.

        Args:
            path: Folder with config.json and safetensors files.
            layer: Number of the decoder layer; the first MoE layer if None.
            backend: As in `MoEQuantized`.

        Raises:
            As `nbmoe.checkpoints.read_layer` and `MoEQuantized`.
        """
        return cls(read_layer(path, layer), backend=backend)

    def __call__(self, x: Any, *, stream: Any = None) -> Any:
        """Computes the layer.

        Args:
            x: bf16 [T, H] tokens (ml_dtypes.bfloat16 or uint16 bit patterns), in host memory or,
                on the gpu backend, on the GPU. T may be 0.
            stream: CUDA stream for the kernels, None for the default. Routing waits for it if `x`
                is on the GPU, because logits are computed on the host.

        Returns:
            bf16 [T, H] where `x` is: numpy for numpy, a device array for a device array.

        Raises:
            DTypeError, ShapeError: `x` is not bf16 [T, H].
            DeviceError: `x` is where the backend cannot reach it.
        """
        source = self._check(x)
        output = self._forward(x, source, stream, StageClock())["output"]
        if source.kind is not Kind.NUMPY:
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
            on_stage: Called with the name of each of `STAGES` as it begins.

        Raises:
            As a call.
        """
        source = self._check(x)
        clock = StageClock(self._wait, on_stage)
        found = self._forward(x, source, stream, clock)
        bf16 = {name: to_numpy(found.pop(name), BFLOAT16) for name in ("down", "output")}
        host = {name: to_numpy(value) for name, value in found.items()}
        return MoETrace(**host, **bf16, seconds=clock.seconds)

    def _forward(self, x: Any, source: Array, stream: Any, clock: StageClock) -> dict[str, Any]:
        experts, run = self._experts, {"backend": self.backend.name, "stream": stream}
        with clock.stage("route"):
            if source.kind.on_gpu:
                self._wait()  # whoever fills x may still be running
            tokens = to_numpy(x, BFLOAT16)
            logits = router_logits(tokens, self._router)
            topk_ids, topk_weights = ops.route(
                logits, self.top_k, renormalize=self.renormalize, **run
            )
            placed_x = x if source.kind.on_gpu else self._put(tokens)
            placed_ids, placed_weights = self._put(topk_ids), self._put(topk_weights)
            if stream is not None or source.kind.on_gpu:
                self._wait()  # the kernels' stream may not wait for copies on the default stream
            indices = ops.moe_create_indices(placed_ids, self.num_experts, **run)
        with clock.stage("quantize"):
            hidden_codes, hidden_scales = ops.grouped_quantize_dynamic_block_scaled(
                placed_x,
                indices.expert_start_indices,
                indices.scales_offset,
                indices.expert_ids,
                experts.gate_up_inverse_input_scales,
                indices=indices.token_expert_order,
                indices_divisor=self.top_k,
                **run,
            )
        groups = (indices.expert_start_indices, indices.scales_offset, indices.expert_ids)
        rows = topk_ids.size
        with clock.stage("gate_up + SwiGLU"):
            inner_codes, inner_scales = ops.grouped_matmul_blocked_swiglu(
                hidden_codes,
                experts.gate_up,
                hidden_scales,
                experts.gate_up_scales,
                *groups,
                expert_scales=experts.gate_up_expert_scales,
                c_input_scales=experts.down_inverse_input_scales,
                estimated_total_m=rows,
                **run,
            )
        with clock.stage("down"):
            down = ops.grouped_matmul_block_scaled(
                inner_codes,
                experts.down,
                inner_scales,
                experts.down_scales,
                *groups,
                experts.down_expert_scales,
                estimated_total_m=rows,
                **run,
            )
        with clock.stage("combine"):
            output = ops.moe_finalize(down, indices.restore_token_order, placed_weights, **run)
        return {
            "logits": logits,
            "topk_ids": topk_ids,
            "topk_weights": topk_weights,
            "token_expert_order": indices.token_expert_order,
            "expert_start_indices": indices.expert_start_indices,
            "scales_offset": indices.scales_offset,
            "hidden_codes": hidden_codes,
            "hidden_scales": hidden_scales,
            "inner_codes": inner_codes,
            "inner_scales": inner_scales,
            "down": down,
            "output": output,
        }

    def _check(self, x: Any) -> Array:
        array = describe(_API, "x", x)
        rule = f"bfloat16 (T, {self.hidden_size})"
        if array.dtype not in ("bfloat16", "uint16"):
            hint = "round with nbmoe.codecs.encode_bf16"
            raise DTypeError(message(_API, "x", rule, array, hint))
        if len(array.shape) != 2 or array.shape[1] != self.hidden_size:
            raise ShapeError(message(_API, "x", rule, array))
        return array

    def _put(self, array: npt.NDArray[Any]) -> Any:
        return to_backend(array, self.backend.name)

    def _wait(self) -> None:
        if self.backend.on_gpu:
            from numba import cuda

            cuda.synchronize()
