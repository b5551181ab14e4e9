"""`MoEQuantized`: a quantized mixture-of-experts layer that runs on any backend."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from nbmoe.activation import GatedActivation, take_activation
from nbmoe.backend import resolve
from nbmoe.checkpoints import ExpertWeights, read_layer
from nbmoe.config import QuantConfig
from nbmoe.errors import ArgTypeError, ConfigError, message
from nbmoe.nn.build import build_experts, strategy_name
from nbmoe.nn.gate import MoEGate
from nbmoe.nn.layer import MoELayer
from nbmoe.nn.shared_experts import difference, prepend


class MoEQuantized(MoELayer):
    """Router, quantized experts and combination of one MoE layer.

    Weights are permuted, tiled and moved to the backend once, here. NVFP4, MXFP4, MXFP8 and MXFP4
    weights with MXFP8 activations go through `NvMxf4f8Strategy`, as one fused matmul with SwiGLU
    where the config and the activation allow it and as a chain with the same bytes otherwise; FP8
    goes through `Fp8Strategy`. MXFP4 weights with bfloat16 activations are decoded on the way.

    Every backend gives the same bytes. See `MoELayer` for calls and attributes.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        *,
        quant_config: QuantConfig | None = None,
        activation: GatedActivation | None = None,
        fused_shared_expert: bool | None = None,
        apply_router_weight_first: bool | None = None,
        interleaved_gate_up: bool = False,
        prepared: bool | None = None,
        backend: str | None = None,
    ) -> None:
        """Prepares a layer.

        Args:
            weights: The layer in host memory, from `nbmoe.checkpoints.read_layer` or made by hand.
            quant_config: Settings for the weights' format, None for its own.
            activation: What joins gate and up, None for the weights'.
            fused_shared_expert: Whether a shared expert becomes slot 0 of the routed ones; None if
                it is like them. Its NVFP4 input scale then counts for all.
            apply_router_weight_first: Whether routing weights multiply inputs, not outputs; None
                for what the weights say.
            interleaved_gate_up: Whether gate and up rows alternate in the weights, their scales and
                biases, those of shared experts included: gate 0, up 0, gate 1, ...
            prepared: Whether weights and tokens are prepared for the kernels of compute capability
                9.0 (`nbmoe.prepared`), which changes no byte but with FP8; None for where these
                run on a GPU and it changes none.
            backend: "gpu", "emulate", "cudasim" or "reference"; None for `NBMOE_BACKEND`, or else
                a GPU if one is usable and emulation if not.

        Raises:
            ConfigError: The backend's name is unknown, the weights are bf16, the config is of
                another format, or a shared expert that is to be fused is unlike the routed ones.
            ArgTypeError: An argument is of another type.
            ShapeError: `interleaved_gate_up` with FP8 blocks and D % 128 != 0.
            DeviceError, UnsupportedError: The backend cannot run here, formats of weights and
                activations do not go together, or `prepared` asks for what no kernel reads.
            ScaleError: A product of scales leaves float32's normal range.
        """
        api = type(self).__name__
        chosen = resolve(backend, api=api)
        self._check_format(weights)
        if not isinstance(interleaved_gate_up, bool):
            got = f"{type(interleaved_gate_up).__name__} {interleaved_gate_up!r}"
            raise ArgTypeError(message(api, "interleaved_gate_up", "a bool", got))
        if activation is not None:
            weights = _with_activation(weights, take_activation(api, activation))
        shared = weights.shared
        if fused_shared_expert is None:
            fused_shared_expert = shared is not None and not difference(weights, shared)
        if shared is None and fused_shared_expert:
            rule = "False without shared experts"
            raise ConfigError(message(api, "fused_shared_expert", rule, True))
        routed = weights
        if shared is not None and fused_shared_expert:
            routed = prepend(weights, shared, api)  # type: ignore[assignment]
        how: dict[str, Any] = {"interleaved": interleaved_gate_up, "prepared": prepared}
        experts = build_experts(api, routed, chosen, config=quant_config, **how)
        apart = None
        if shared is not None and not fused_shared_expert:
            apart = build_experts(api, shared, chosen, **how)
        if apply_router_weight_first is None:
            apply_router_weight_first = weights.apply_router_weight_first
        super().__init__(
            chosen,
            MoEGate.of_router(weights.router, backend=chosen.name),
            experts,
            shared_experts=apart,
            shared_slot=fused_shared_expert,
            apply_router_weight_first=apply_router_weight_first,
            strategy=strategy_name(weights, experts),
        )

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

    def _check_format(self, weights: ExpertWeights) -> None:
        if weights.format == "bf16":
            hint = "MoE is the layer of bf16 weights"
            raise ConfigError(message(self._api, "weights", "quantized weights", "bf16", hint))


def _with_activation(weights: ExpertWeights, activation: GatedActivation) -> ExpertWeights:
    """The weights with another activation, that of shared experts included."""
    shared = weights.shared
    if shared is not None:
        shared = dataclasses.replace(shared, activation=activation)
    return dataclasses.replace(weights, activation=activation, shared=shared)
