"""nbmoe as an experts implementation of transformers: `use_nbmoe(model, "mxfp4")`.

The experts of Qwen3-MoE, gpt-oss and every other model whose experts' class has transformers'
decorator `use_experts_implementation` are quantized once; routing stays the model's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from nbmoe.activation import SILU, GatedActivation
from nbmoe.checkpoints.quantize_weights import quantize_weights
from nbmoe.checkpoints.stack import WEIGHT_FORMATS, ExpertStack
from nbmoe.codecs import encode_bf16
from nbmoe.errors import ConfigError, ScaleError, UnsupportedError, message
from nbmoe.integrations.numbers import Numbers
from nbmoe.nn.routed_experts import RoutedExperts

__all__ = ["NAME", "use_nbmoe"]

NAME = "nbmoe"
_API = "use_nbmoe"
_SILU, _GELU = ("SiLU", "SiLUActivation"), ("GELUTanh", "PytorchGELUTanh")
_EXPERTS, _NUMBER = "nbmoe_experts", "nbmoe_number"
_experts: Numbers[RoutedExperts] = Numbers("nbmoe::routed_experts", "experts")


@torch.library.custom_op("nbmoe::routed_experts", mutates_args=())
def routed_experts(
    x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, number: int
) -> torch.Tensor:
    """Experts' results (T, H) for bfloat16 tokens (T, H), int32 ids and float32 weights (T, k)."""
    result: torch.Tensor = _experts.get(number)(x, expert_ids, weights)
    return result


@routed_experts.register_fake
def _(
    x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, number: int
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What the experts' modules of a model call."""
    experts = getattr(module, _EXPERTS, None)
    if experts is None:
        rule = f"a model that {_API} has prepared"
        hint = f"call nbmoe.integrations.transformers.{_API}(model, format)"
        raise ConfigError(message(NAME, "experts", rule, type(module).__name__, hint))
    # Of expert parallelism: experts of other ranks have the number E.
    ids = top_k_index.to(torch.int32)
    ids = torch.where(ids < experts.num_experts, ids, -1).contiguous()
    x = hidden_states.to(torch.bfloat16).contiguous()
    weights = top_k_weights.to(torch.float32).contiguous()
    result = torch.ops.nbmoe.routed_experts(x, ids, weights, getattr(module, _NUMBER))
    return result.to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)


def use_nbmoe(
    model: Any,
    format: str = "mxfp4",
    *,
    activations: str = "",
    input_scale: float | None = None,
    backend: str | None = None,
) -> Any:
    """Quantizes a model's experts and has them computed by nbmoe.

    The model's own weights stay where they are, unused: delete `gate_up_proj` and `down_proj` of
    its experts' modules to have their memory back. Nothing is quantized twice: a model that is
    prepared again gets new experts.

    Args:
        model: A `transformers.PreTrainedModel` whose experts have gate and up in one weight.
        format: Format of weights: "nvfp4", "mxfp4", "mxfp8", "fp8_block", "fp8_row" or "bf16".
        activations: Format that activations are quantized to, "" for that of the weights: "mxfp8"
            or "bf16" beside "mxfp4".
        input_scale: NVFP4's scale of both matmuls' inputs: their largest magnitude / 2688 or more.
            Values beyond 2688 times it are cut.
        backend: As in `nbmoe.nn.MoEQuantized`. "gpu" for a model on a GPU.

    Returns:
        `model`.

    Raises:
        ConfigError: The format is unknown, or the model has no such experts.
        ScaleError: NVFP4 without `input_scale`, or another format with it.
        UnsupportedError: Experts have no gate, or another activation, or formats do not go
            together.
    """
    if format not in WEIGHT_FORMATS or format == "fp8_tensor":
        known = tuple(f for f in WEIGHT_FORMATS if f != "fp8_tensor")
        raise ConfigError(message(_API, "format", f"one of {known}", repr(format)))
    _check_input_scale(format, input_scale)
    modules = [
        m for m in model.modules() if hasattr(m, "down_proj") and hasattr(m, "is_transposed")
    ]
    if not modules:
        rule = "a model with experts that have transformers' use_experts_implementation"
        raise ConfigError(message(_API, "model", rule, type(model).__name__))
    for module in modules:
        stack = _stack(module, format, activations, input_scale)
        experts = RoutedExperts(stack, backend=backend)
        setattr(module, _EXPERTS, experts)
        setattr(module, _NUMBER, _experts.of(experts))
    model.set_experts_implementation(NAME)
    return model


def _check_input_scale(format: str, input_scale: float | None) -> None:
    if format == "nvfp4" and input_scale is None:
        hint = "largest magnitude of the experts' inputs / 2688; MX formats need none"
        raise ScaleError(message(_API, "input_scale", "a float for nvfp4", "None", hint))
    if format != "nvfp4" and input_scale is not None:
        raise ScaleError(message(_API, "input_scale", f"None for {format}", input_scale))


def _stack(module: Any, format: str, activations: str, input_scale: float | None) -> ExpertStack:
    """A module's weights in nbmoe's convention."""
    what = type(module).__name__
    if not module.has_gate or getattr(module, "has_post_expert_norm", False):
        rule = "experts with gate and up, and no norm behind them"
        raise UnsupportedError(message(_API, "model", rule, what))
    gate_up, down = (_rows(getattr(module, n), module) for n in ("gate_up_proj", "down_proj"))
    biases: dict[str, Any] = {}
    if module.has_bias:
        gate_up_bias = module.gate_up_proj_bias.detach().float().cpu().numpy()
        biases["gate_up_bias"] = encode_bf16(_gate_first(gate_up_bias, module))
        biases["down_bias"] = encode_bf16(module.down_proj_bias.detach().float().cpu().numpy())
    fields = quantize_weights(_gate_first(gate_up, module), down, format)
    if input_scale is not None:
        scales = np.full(len(gate_up), input_scale, np.float32)
        fields |= {"gate_up_input_scale": scales, "down_input_scale": scales}
    return ExpertStack(
        format=format,
        input_format=activations,
        **fields,  # type: ignore[arg-type]
        **biases,
        activation=_activation(module),
        source=what,
    )


def _rows(weight: Any, module: Any) -> npt.NDArray[np.float32]:
    """float32 (E, out, in)."""
    weight = weight.detach().float()
    if module.is_transposed:
        weight = weight.transpose(1, 2)
    return np.ascontiguousarray(weight.cpu().numpy())


def _gate_first(rows: npt.NDArray[Any], module: Any) -> npt.NDArray[Any]:
    if module.is_concatenated:
        return rows
    return np.concatenate([rows[:, 0::2], rows[:, 1::2]], axis=1)


def _activation(module: Any) -> GatedActivation:
    if hasattr(module, "alpha") and hasattr(module, "limit"):
        alpha, limit = float(module.alpha), float(module.limit)
        return GatedActivation("swigluoai", alpha=alpha, limit=limit)
    name = type(getattr(module, "act_fn", None)).__name__
    if name in _SILU:
        return SILU
    if name in _GELU:
        return GatedActivation("gelu_tanh")
    rule = f"an activation of {(*_SILU, *_GELU)}, or alpha and limit"
    raise UnsupportedError(message(_API, "model", rule, f"{type(module).__name__} with {name}"))
