"""P1: transformers reads the same numbers from the same tensors."""

from pathlib import Path

import numpy as np
import pytest

from nbmoe.checkpoints import read_layer
from tests.checkpoints.dequantize import projections, relative_error
from tests.checkpoints.synthetic import EXPERTS, PREFIX, families

pytestmark = pytest.mark.oracles
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FIXTURES = Path(__file__).parents[1] / "fixtures"


def test_gpt_oss_weights(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    made = families()["gpt_oss"]
    found = projections(read_layer(made.write(tmp_path)))
    theirs = {}
    for name in ("gate_up", "down"):
        blocks, scales = (
            torch.from_numpy(made.tensors[f"{PREFIX}experts.{name}_proj_{part}"])
            for part in ("blocks", "scales")
        )
        dense = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        theirs[name] = dense.transpose(1, 2).double().numpy()  # they return [E, K, N]
    assert np.array_equal(found["gate_proj"], theirs["gate_up"][:, 0::2])
    assert np.array_equal(found["up_proj"], theirs["gate_up"][:, 1::2])
    assert np.array_equal(found["down_proj"], theirs["down"])


def test_gpt_oss_layer(tmp_path: Path) -> None:
    """Which rows are gate and up, biases, activation and router, as their model computes them."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter

    made = families()["gpt_oss"]
    weights = read_layer(made.write(tmp_path))
    keys = ("hidden_size", "intermediate_size", "num_local_experts", "num_experts_per_tok")
    config = GptOssConfig(**{key: made.config[key] for key in keys})
    experts, router = GptOssExperts(config).float(), GptOssTopKRouter(config).float()
    dense = projections(weights)
    gate_up = np.empty((EXPERTS, 128, config.hidden_size), np.float32)
    gate_up[:, 0::2], gate_up[:, 1::2] = dense["gate_proj"], dense["up_proj"]
    parameters = {
        "gate_up_proj": gate_up.transpose(0, 2, 1),
        "down_proj": dense["down_proj"].transpose(0, 2, 1),
        "gate_up_proj_bias": made.tensors[f"{PREFIX}experts.gate_up_proj_bias"],
        "down_proj_bias": made.tensors[f"{PREFIX}experts.down_proj_bias"],
    }
    with torch.no_grad():
        for name, value in parameters.items():
            getattr(experts, name).copy_(torch.from_numpy(value.astype(np.float32).copy()))
        router.weight.copy_(torch.from_numpy(weights.router.weight.astype(np.float32)))
        router.bias.copy_(torch.from_numpy(weights.router.bias.astype(np.float32)))
        x = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(0))
        _, their_weights, their_ids = router(x)
        their_output = experts(x, their_ids, their_weights).numpy()

    tokens = x.numpy().astype(np.float64)
    logits = tokens @ weights.router.weight.astype(np.float64).T + weights.router.bias.astype(float)
    ids = np.argsort(-logits, axis=1)[:, : weights.top_k]
    assert (np.sort(ids) == np.sort(their_ids.numpy())).all()
    chosen = np.exp(np.take_along_axis(logits, ids, 1))
    chosen /= chosen.sum(axis=1, keepdims=True)
    output = np.zeros_like(tokens)
    limit, alpha = weights.activation.limit, weights.activation.alpha
    biases = weights.gate_up_bias.astype(float)
    for t, token in enumerate(tokens):
        for e, weight in zip(ids[t], chosen[t], strict=True):
            gate = np.minimum(dense["gate_proj"][e] @ token + biases[e, :64], limit)
            up = np.clip(dense["up_proj"][e] @ token + biases[e, 64:], -limit, limit)
            inner = gate / (1 + np.exp(-alpha * gate)) * (up + 1)
            down = dense["down_proj"][e] @ inner + weights.down_bias[e].astype(float)
            output[t] += weight * down
    assert relative_error(their_output, output) < 1e-5


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("tiny_modelopt_nvfp4", 0.0938, 0.0969),
        ("tiny_mo_MXFP4_DEFAULT_CFG", 0.117, 0.1215),
        ("tiny_mo_MXFP8_DEFAULT_CFG", 0.026, 0.0275),
    ],
)
def test_modelopt_exports_are_the_model_of_their_seed(name: str, low: float, high: float) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).to(torch.bfloat16)
    for layer in range(2):
        experts = model.model.layers[layer].mlp.experts
        gate_up = experts.gate_up_proj.detach().double().numpy()
        original = {"gate_proj": gate_up[:, :64], "up_proj": gate_up[:, 64:]}
        original["down_proj"] = experts.down_proj.detach().double().numpy()
        for projection, values in projections(read_layer(FIXTURES / name, layer)).items():
            for e in range(4):
                error = relative_error(values[e], original[projection][e])
                assert low < error < high, (layer, projection, e, error)
