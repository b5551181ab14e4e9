"""`StackedMoE`: a layer whose experts come as one stacked weight a projection."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe.activation import GatedActivation, ScalarFn, take_activation
from nbmoe.arrays import BFLOAT16, describe
from nbmoe.backend import resolve
from nbmoe.checkpoints.stack import ExpertStack
from nbmoe.config import QuantConfig
from nbmoe.errors import ArgTypeError, ConfigError, ShapeError, message
from nbmoe.layouts import deinterleave_scales
from nbmoe.nn.build import build_experts, strategy_name
from nbmoe.nn.gate import MoEGate
from nbmoe.nn.layer import MoELayer

_API = "StackedMoE"
_BLOCK = 128


class GateUpFormat(Enum):
    """How gate and up share a stacked weight.

    CONCATENATED: all gate columns, then all up columns. INTERLEAVED: gate 0, up 0, gate 1, ...
    """

    CONCATENATED = "concatenated"
    INTERLEAVED = "interleaved"


class StackedMoE(MoELayer):
    """Router, experts in stacked weights, and combination, as of gpt-oss, Llama 4 and Qwen3-VL.

    | quant_config | weights as stored | scales as stored | activations |
    |---|---|---|---|
    | None | bf16 (E, in, out) | | bf16 |
    | MXFP4 | u8 (E, out, in/2) | e8m0 (E, out, in/32) | bf16 (W4A16) |
    | MXFP4, `mxfp8_activations` | u8 (E, out, in/2) | the same, or tiles | MXFP8 (W4A8) |
    | MXFP8 | e4m3 (E, out, in) | e8m0 (E, out, in/32) | MXFP8 |
    | NVFP4 | not stacked: see `MoEQuantized` | | |
    | FP8 block | e4m3 (E, in, out) | (E, ceil(in/128), ceil(out/128)) | a scale a group of 128 |
    | FP8 rowwise | e4m3 (E, in, out) | f32 (E, out, 1) | a scale a token |

    Weights of bf16 and FP8 are transposed once, here. The MXFP4 weight scales for MXFP8 activations
    may come as tiles (E, out/128, in/128, 32, 4, 4).

    See `MoELayer` for calls and attributes.
    """

    def __init__(
        self,
        gate: MoEGate,
        gate_up: npt.NDArray[Any],
        down: npt.NDArray[Any],
        *,
        gate_up_scales: npt.NDArray[Any] | None = None,
        down_scales: npt.NDArray[Any] | None = None,
        gate_up_bias: npt.NDArray[Any] | None = None,
        down_bias: npt.NDArray[Any] | None = None,
        quant_config: QuantConfig | None = None,
        gate_up_format: GateUpFormat = GateUpFormat.CONCATENATED,
        activation: GatedActivation | None = None,
        gated_activation_fn: ScalarFn | None = None,
        shared_experts: ExpertStack | None = None,
        apply_router_weight_first: bool = False,
        mxfp8_activations: bool = False,
        prepared: bool | None = None,
        backend: str | None = None,
    ) -> None:
        """Prepares a layer.

        Args:
            gate: The router, of the same backend.
            gate_up: Weights of gate and up, see the table; out = 2D, in = H.
            down: Weights of the down projection; out = H, in = D.
            gate_up_scales: Scales of `gate_up`.
            down_scales: Scales of `down`.
            gate_up_bias: bf16 (E, 2D), in the order of `gate_up_format`, or None.
            down_bias: bf16 (E, H) or None.
            quant_config: Settings of the weights, None for bf16.
            gate_up_format: How gate and up share a weight, its scales and its bias.
            activation: What joins them, None for silu.
            gated_activation_fn: A function of two float32 scalars, gate and up, instead.
            shared_experts: Experts that every token goes to, as one expert, or None.
            apply_router_weight_first: Whether routing weights multiply inputs, not outputs.
            mxfp8_activations: Whether MXFP4 weights meet MXFP8 activations instead of bf16 ones.
            prepared: As in `MoEQuantized`.
            backend: As in `MoEQuantized`.

        Raises:
            ConfigError: The config is of a format that is not stacked, `mxfp8_activations` came
                without MXFP4 or with `apply_router_weight_first`, or `activation` with
                `gated_activation_fn`.
            ArgTypeError, DTypeError: An argument is of another type.
            ShapeError: Weights, scales, biases and the gate do not fit together.
            ScaleError: A scale cannot have come from a quantizer.
            DeviceError, UnsupportedError: The backend cannot run here.
        """
        chosen = resolve(backend, api=_API)
        if not isinstance(gate, MoEGate):
            raise ArgTypeError(message(_API, "gate", "a MoEGate", type(gate).__name__))
        if gate.backend.name != chosen.name:
            rule = f"a gate on {chosen.name}, the layer's backend"
            raise ConfigError(message(_API, "gate", rule, gate.backend.name))
        if activation is not None and gated_activation_fn is not None:
            got = f"{activation!r}"
            raise ConfigError(message(_API, "activation", "None beside gated_activation_fn", got))
        if gated_activation_fn is not None:
            activation = GatedActivation(gated_activation_fn=gated_activation_fn)
        interleaved = _take_format(gate_up_format) is GateUpFormat.INTERLEAVED
        fmt = _format_of(quant_config)
        input_format = _input_format(fmt, mxfp8_activations, apply_router_weight_first)
        stored = {
            "gate_up": (gate_up, gate_up_scales),
            "down": (down, down_scales),
        }
        arrays: dict[str, Any] = {}
        for name, (codes, scales) in stored.items():
            codes, scales = _row_major(name, codes, scales, fmt)
            arrays |= {name: codes, f"{name}_scales": scales}
        stack = ExpertStack(
            format=fmt,
            input_format=input_format,
            **arrays,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            activation=take_activation(_API, activation),
            source=_API,
        )
        _check_fit(stack, gate)
        experts = build_experts(
            _API, stack, chosen, config=quant_config, interleaved=interleaved, prepared=prepared
        )
        super().__init__(
            chosen,
            gate,
            experts,
            shared_experts=(
                None
                if shared_experts is None
                else build_experts(_API, shared_experts, chosen, prepared=prepared)
            ),
            apply_router_weight_first=apply_router_weight_first,
            strategy=strategy_name(stack, experts),
        )


def _take_format(gate_up_format: Any) -> GateUpFormat:
    if not isinstance(gate_up_format, GateUpFormat):
        got = f"{type(gate_up_format).__name__} {gate_up_format!r}"
        raise ArgTypeError(message(_API, "gate_up_format", "a GateUpFormat", got))
    return gate_up_format


def _format_of(config: QuantConfig | None) -> str:
    """The weight format of a config."""
    if config is None:
        return "bf16"
    if config.is_mxfp4:
        return "mxfp4"
    if config.is_mxfp8:
        return "mxfp8"
    if config.block_format is None and not config.is_mxfp6:
        if config.weight_scale.is_rowwise:
            return "fp8_row"
        if config.weight_scale.block_size == (_BLOCK, _BLOCK):
            return "fp8_block"
    rule = "MXFP4, MXFP8, or FP8 with scales a row or a block of 128 x 128"
    hint = "MoEQuantized is the layer of NVFP4 and of FP8 with scales a tensor"
    raise ConfigError(message(_API, "quant_config", rule, config.format.value, hint))


def _input_format(fmt: str, mxfp8_activations: bool, weight_first: bool) -> str:
    for name, value in (
        ("mxfp8_activations", mxfp8_activations),
        ("apply_router_weight_first", weight_first),
    ):
        if not isinstance(value, bool):
            got = f"{type(value).__name__} {value!r}"
            raise ArgTypeError(message(_API, name, "a bool", got))
    if mxfp8_activations and fmt != "mxfp4":
        rule = f"False with {fmt} weights: only MXFP4 weights have a choice"
        raise ConfigError(message(_API, "mxfp8_activations", rule, True))
    if mxfp8_activations and weight_first:
        rule = "False with apply_router_weight_first"
        raise ConfigError(message(_API, "mxfp8_activations", rule, True))
    if fmt == "mxfp4":
        return "mxfp8" if mxfp8_activations else "bf16"
    return ""


def _row_major(
    name: str, codes: Any, scales: Any, fmt: str
) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
    """Codes (E, out, in) as bytes or bf16, and scales as an `ExpertStack` has them."""
    array = describe(_API, name, codes)
    if array.view is None or len(array.shape) != 3:
        raise ShapeError(message(_API, name, "a numpy array of 3 axes", array))
    values = array.view.view(BFLOAT16) if array.dtype == "uint16" else array.view
    if values.dtype.itemsize == 1:
        values = values.view(np.uint8)
    if fmt in ("bf16", "fp8_block", "fp8_row"):
        values = np.ascontiguousarray(values.transpose(0, 2, 1))
    if scales is None or fmt == "bf16":
        return values, scales
    found = describe(_API, f"{name}_scales", scales).view
    if found is None:
        raise ShapeError(message(_API, f"{name}_scales", "a numpy array", "one of the GPU"))
    if fmt == "fp8_block":
        found = np.ascontiguousarray(found.astype(np.float32).transpose(0, 2, 1))
    elif fmt in ("mxfp4", "mxfp8"):
        found = found.view(np.uint8)
        if found.ndim == 6:
            rows = values.shape[1]
            k = values.shape[2] * (2 if fmt == "mxfp4" else 1)
            found = deinterleave_scales(found, rows, k // 32)
    return values, found


def _check_fit(stack: ExpertStack, gate: MoEGate) -> None:
    expected = (gate.num_experts, gate.hidden_dim)
    found = (stack.num_experts, stack.hidden_size)
    if found != expected:
        rule = f"weights of {expected[0]} experts and hidden size {expected[1]}, the gate's"
        raise ShapeError(message(_API, "gate_up", rule, f"{found[0]} and {found[1]}"))
