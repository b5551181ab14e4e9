"""Model architectures: where an MoE layer's tensors are and how its router works.

Routing rules cannot be read off the tensors, and a wrong guess would give plausible nonsense, so
only architectures listed here are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbmoe.errors import ConfigError, UnsupportedError, message


@dataclass(frozen=True)
class Architecture:
    """Names and routing rule of one model type.

    Attributes:
        model_type: `model_type` of config.json.
        block: Name of the MoE block inside a decoder layer.
        gate_proj: Name of the gate projection inside an expert.
        up_proj: Name of the up projection inside an expert.
        down_proj: Name of the down projection inside an expert.
        moe_dim_key: Key of config.json that holds the intermediate size of one expert.
        renormalize_key: Key that says whether the chosen weights are scaled to sum 1; None where
            the model always does it.
    """

    model_type: str
    block: str = "mlp"
    gate_proj: str = "gate_proj"
    up_proj: str = "up_proj"
    down_proj: str = "down_proj"
    moe_dim_key: str = "moe_intermediate_size"
    renormalize_key: str | None = "norm_topk_prob"

    def layer_prefix(self, layer: int) -> str:
        """Prefix of every tensor of the MoE block, without the final dot."""
        return f"model.layers.{layer}.{self.block}"


QWEN3_MOE = Architecture("qwen3_moe")
OLMOE = Architecture("olmoe", moe_dim_key="intermediate_size")
MIXTRAL = Architecture(
    "mixtral",
    block="block_sparse_moe",
    gate_proj="w1",
    up_proj="w3",
    down_proj="w2",
    moe_dim_key="intermediate_size",
    renormalize_key=None,
)
ARCHITECTURES = {a.model_type: a for a in (QWEN3_MOE, OLMOE, MIXTRAL)}

_EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts")


@dataclass(frozen=True)
class ModelConfig:
    """What config.json says about every MoE layer of a model.

    Attributes:
        architecture: The model type's names and routing rule.
        hidden_size: H [elements].
        moe_dim: D, the intermediate size of one expert [elements].
        num_experts: E.
        top_k: Experts per token.
        renormalize: Whether the chosen weights are scaled to sum 1.
    """

    architecture: Architecture
    hidden_size: int
    moe_dim: int
    num_experts: int
    top_k: int
    renormalize: bool


def parse_model_config(config: Mapping[str, Any], api: str) -> ModelConfig:
    """Reads the MoE part of config.json.

    Raises:
        UnsupportedError: The model type or its activation is not one that nbmoe computes.
        ConfigError: A key is missing or contradicts another.
    """
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        rule = f"one of {', '.join(ARCHITECTURES)}"
        hint = "these have the softmax, top-k router that this release computes"
        raise UnsupportedError(message(api, "config.json: model_type", rule, model_type, hint))
    architecture = ARCHITECTURES[model_type]
    activation = config.get("hidden_act")
    if activation != "silu":
        raise UnsupportedError(message(api, "config.json: hidden_act", "silu", activation))
    present = [key for key in _EXPERT_COUNT_KEYS if key in config]
    if not present:
        rule = " or ".join(_EXPERT_COUNT_KEYS)
        raise ConfigError(message(api, "config.json", rule, "neither"))
    parsed = ModelConfig(
        architecture=architecture,
        hidden_size=_positive(config, "hidden_size", api),
        moe_dim=_positive(config, architecture.moe_dim_key, api),
        num_experts=_positive(config, present[0], api),
        top_k=_positive(config, "num_experts_per_tok", api),
        renormalize=_renormalize(config, architecture, api),
    )
    if parsed.top_k > parsed.num_experts:
        arg = "config.json: num_experts_per_tok"
        raise ConfigError(message(api, arg, f"at most {parsed.num_experts}", parsed.top_k))
    return parsed


def _positive(config: Mapping[str, Any], key: str, api: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise ConfigError(message(api, f"config.json: {key}", "a positive integer", repr(value)))
    return value


def _renormalize(config: Mapping[str, Any], architecture: Architecture, api: str) -> bool:
    key = architecture.renormalize_key
    if key is None:
        return True
    value = config.get(key)
    if type(value) is not bool:
        raise ConfigError(message(api, f"config.json: {key}", "true or false", repr(value)))
    return value
