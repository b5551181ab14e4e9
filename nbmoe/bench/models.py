"""Mixture-of-experts layers of known models, by name."""

from __future__ import annotations

from dataclasses import dataclass

from nbmoe.activation import GatedActivation
from nbmoe.errors import ConfigError, message

SILU = GatedActivation()


@dataclass(frozen=True)
class Model:
    """The sizes of a layer's routed experts.

    Attributes:
        name: What it is called on the command line.
        experts: Experts on one GPU, E.
        top_k: Experts a token on one GPU, k.
        hidden: Hidden size, H.
        moe_dim: Size between the matmuls, D.
        scoring: How the router weights experts (`nbmoe.ops.route`).
        activation: What joins gate and up.
    """

    name: str
    experts: int
    top_k: int
    hidden: int
    moe_dim: int
    scoring: str = "softmax"
    activation: GatedActivation = SILU

    @property
    def matmuls(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(N, K) of gate/up and of down."""
        return (2 * self.moe_dim, self.hidden), (self.hidden, self.moe_dim)


_GPT_OSS = GatedActivation("swigluoai", alpha=1.702, limit=7.0)

MODELS = {
    model.name: model
    for model in (
        Model("Qwen3-30B-A3B", 128, 8, 2048, 768),
        Model("Qwen3-235B-A22B", 128, 8, 4096, 1536),
        Model("Qwen3-Next-80B", 512, 10, 2048, 512),
        Model("DeepSeek-V3", 256, 8, 7168, 2048, "sigmoid"),
        Model("DeepSeek-V4-Flash", 256, 6, 4096, 2048, "sigmoid"),
        Model("DeepSeek-V4-Pro", 384, 6, 7168, 3072, "sigmoid"),
        Model("Kimi-K2", 384, 8, 7168, 2048, "sigmoid"),
        Model("gpt-oss-20b", 32, 4, 2880, 2880, "softmax_after_topk", _GPT_OSS),
        Model("gpt-oss-120b", 128, 4, 2880, 2880, "softmax_after_topk", _GPT_OSS),
        Model("Mixtral-8x7B", 8, 2, 4096, 14336),
        Model("GLM-4.5", 160, 8, 5120, 1536, "sigmoid"),
        Model("GLM-4.5-Air", 128, 8, 4096, 1408, "sigmoid"),
        Model("MiniMax-M2", 256, 8, 3072, 1536, "sigmoid"),
        # One rank of a group of GPUs: its share of the experts and of each token's choices.
        Model("DeepSeek-V3-EP8", 32, 1, 7168, 2048, "sigmoid"),
        Model("Qwen3-235B-A22B-EP2", 64, 4, 4096, 1536),
    )
}

DEFAULT_MODELS = ("Qwen3-30B-A3B", "DeepSeek-V3-EP8", "gpt-oss-20b")


def find_model(name: str) -> Model:
    """The model of a name, whatever its case.

    Raises:
        ConfigError: There is none.
    """
    for known, model in MODELS.items():
        if known.lower() == name.lower():
            return model
    raise ConfigError(message("bench", "--models", f"names out of {', '.join(MODELS)}", name))
