"""Model architectures: where an MoE layer's tensors are and how its router works.

Routing rules cannot be read off the tensors, and a wrong guess would give plausible nonsense, so
only architectures listed here are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbmoe.activation import GatedActivation
from nbmoe.checkpoints.router import SCORINGS
from nbmoe.errors import ConfigError, UnsupportedError, message


@dataclass(frozen=True)
class Architecture:
    """Names and routing rule of one model type.

    Attributes:
        model_type: `model_type` of config.json.
        block: Name of the MoE block inside a decoder layer.
        router: Name of the gate inside the block.
        gate_proj: Name of the gate projection inside an expert.
        up_proj: Name of the up projection inside an expert.
        down_proj: Name of the down projection inside an expert.
        moe_dim_key: Key of config.json that holds the intermediate size of one expert.
        renormalize_key: Key that says whether the chosen weights are scaled to sum 1; None where
            the model always does it.
        scoring: How logits become weights, one of `nbmoe.checkpoints.router.SCORINGS`.
        has_router_bias: Whether the gate has a bias.
        is_grouped: Whether config.json has the keys of DeepSeek's router (n_group, topk_group,
            routed_scaling_factor) and the gate an `e_score_correction_bias`.
        shared: Name of the shared experts inside the block; empty where the model has none.
        is_fused: Whether all experts lie in one tensor, gate and up rows interleaved, with biases.
        alpha: Factor of swigluoai; 0 for silu.
    """

    model_type: str
    block: str = "mlp"
    router: str = "gate"
    gate_proj: str = "gate_proj"
    up_proj: str = "up_proj"
    down_proj: str = "down_proj"
    moe_dim_key: str = "moe_intermediate_size"
    renormalize_key: str | None = "norm_topk_prob"
    scoring: str = "softmax"
    has_router_bias: bool = False
    is_grouped: bool = False
    shared: str = ""
    is_fused: bool = False
    alpha: float = 0.0

    def __post_init__(self) -> None:
        assert self.scoring in SCORINGS

    def layer_prefix(self, layer: int) -> str:
        """Prefix of every tensor of the MoE block, without the final dot."""
        return f"model.layers.{layer}.{self.block}"


def _deepseek(model_type: str) -> Architecture:
    return Architecture(model_type, scoring="sigmoid", is_grouped=True, shared="shared_experts")


ARCHITECTURES = {
    a.model_type: a
    for a in (
        Architecture("qwen3_moe"),
        Architecture("olmoe", moe_dim_key="intermediate_size"),
        Architecture(
            "mixtral",
            block="block_sparse_moe",
            gate_proj="w1",
            up_proj="w3",
            down_proj="w2",
            moe_dim_key="intermediate_size",
            renormalize_key=None,
        ),
        _deepseek("deepseek_v3"),
        _deepseek("kimi_k2"),
        _deepseek("glm4_moe"),
        Architecture(
            "gpt_oss",
            router="router",
            moe_dim_key="intermediate_size",
            renormalize_key=None,
            scoring="softmax_after_topk",
            has_router_bias=True,
            is_fused=True,
            alpha=1.702,
        ),
    )
}

_EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
# What DeepSeek's own configurations say about rules that others leave out.
_DEEPSEEK_RULES = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


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
        activation: What joins gate and up.
        n_group: Groups of experts.
        topk_group: Groups that a token may choose from.
        scaling_factor: Factor of the routing weights.
        num_shared: Shared experts, each as wide as a routed one; 0 for none.
    """

    architecture: Architecture
    hidden_size: int
    moe_dim: int
    num_experts: int
    top_k: int
    renormalize: bool
    activation: GatedActivation
    n_group: int = 1
    topk_group: int = 1
    scaling_factor: float = 1.0
    num_shared: int = 0


def parse_model_config(config: Mapping[str, Any], api: str) -> ModelConfig:
    """Reads the MoE part of config.json.

    Raises:
        UnsupportedError: The model type, its activation or its router is not one that nbmoe
            computes.
        ConfigError: A key is missing or contradicts another.
    """
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        rule = f"one of {', '.join(ARCHITECTURES)}"
        hint = "their routers are known; others would have to be guessed"
        raise UnsupportedError(message(api, "config.json: model_type", rule, model_type, hint))
    architecture = ARCHITECTURES[model_type]
    present = [key for key in _EXPERT_COUNT_KEYS if key in config]
    if not present:
        rule = " or ".join(_EXPERT_COUNT_KEYS)
        raise ConfigError(message(api, "config.json", rule, "none of them"))
    parsed = ModelConfig(
        architecture=architecture,
        hidden_size=_positive(config, "hidden_size", api),
        moe_dim=_positive(config, architecture.moe_dim_key, api),
        num_experts=_positive(config, present[0], api),
        top_k=_positive(config, "num_experts_per_tok", api),
        renormalize=_renormalize(config, architecture, api),
        activation=_activation(config, architecture, api),
        **_groups(config, architecture, api),
    )
    if parsed.top_k > parsed.num_experts:
        arg = "config.json: num_experts_per_tok"
        raise ConfigError(message(api, arg, f"at most {parsed.num_experts}", parsed.top_k))
    return parsed


def _activation(config: Mapping[str, Any], architecture: Architecture, api: str) -> GatedActivation:
    activation = config.get("hidden_act")
    if activation != "silu":
        raise UnsupportedError(message(api, "config.json: hidden_act", "silu", activation))
    limit = config.get("swiglu_limit")
    if architecture.alpha == 0:
        if limit is not None:
            rule = f"no limit in {architecture.model_type}"
            raise UnsupportedError(message(api, "config.json: swiglu_limit", rule, limit))
        return GatedActivation()
    limit = _number(config, "swiglu_limit", api)
    return GatedActivation("swigluoai", alpha=architecture.alpha, limit=limit)


def _groups(config: Mapping[str, Any], architecture: Architecture, api: str) -> dict[str, Any]:
    if not architecture.is_grouped:
        return {}
    for key, expected in _DEEPSEEK_RULES.items():
        if (value := config.get(key, expected)) != expected:
            raise UnsupportedError(message(api, f"config.json: {key}", expected, repr(value)))
    shared = config.get("n_shared_experts")
    return {
        "n_group": _positive(config, "n_group", api),
        "topk_group": _positive(config, "topk_group", api),
        "scaling_factor": _number(config, "routed_scaling_factor", api),
        "num_shared": _positive(config, "n_shared_experts", api) if shared else 0,
    }


def _positive(config: Mapping[str, Any], key: str, api: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise ConfigError(message(api, f"config.json: {key}", "a positive integer", repr(value)))
    return value


def _number(config: Mapping[str, Any], key: str, api: str) -> float:
    value: Any = config.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):
        raise ConfigError(message(api, f"config.json: {key}", "a positive number", repr(value)))
    return float(value)


def _renormalize(config: Mapping[str, Any], architecture: Architecture, api: str) -> bool:
    key = architecture.renormalize_key
    if key is None:
        return True
    value = config.get(key)
    if type(value) is not bool:
        raise ConfigError(message(api, f"config.json: {key}", "true or false", repr(value)))
    return value
