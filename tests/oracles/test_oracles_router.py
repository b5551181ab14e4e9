"""P2: the router's rule is transformers' own: its modules on the same float32 logits."""

from types import SimpleNamespace

import numpy as np
import pytest

from nbmoe import reference

pytestmark = pytest.mark.oracles
torch = pytest.importorskip("torch", reason="the oracles extra installs it")
transformers = pytest.importorskip("transformers", reason="the oracles extra installs it")

HIDDEN, TOKENS = 48, 64


def router(module, name, experts, top_k, **config):
    """A router of transformers with random parameters, and the logits of random tokens."""
    models = __import__(f"transformers.models.{module}.modeling_{module}", fromlist=[name])
    config |= {"hidden_size": HIDDEN, "num_experts_per_tok": top_k}
    config |= {"num_experts": experts, "num_local_experts": experts}
    made = getattr(models, name)(SimpleNamespace(**config))
    generator = torch.Generator().manual_seed(experts)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    with torch.no_grad():
        made.weight.copy_(torch.randn(experts, HIDDEN, generator=generator) / HIDDEN**0.5)
        logits = torch.nn.functional.linear(x, made.weight).numpy()
    return made, x, logits, generator


def check(found, ids, weights):
    """Equal choices; transformers may leave them unsorted."""
    ids, weights = ids.numpy(), weights.detach().numpy()
    mine, theirs = np.argsort(found[0], axis=1), np.argsort(ids, axis=1)
    assert (np.take_along_axis(found[0], mine, 1) == np.take_along_axis(ids, theirs, 1)).all()
    np.testing.assert_allclose(
        np.take_along_axis(found[1], mine, 1), np.take_along_axis(weights, theirs, 1), rtol=5e-6
    )


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("experts", [60, 128])
def test_qwen3(experts, normalize):
    made, x, logits, _ = router(
        "qwen3_moe", "Qwen3MoeTopKRouter", experts, 8, norm_topk_prob=normalize
    )
    _, weights, ids = made(x)
    check(reference.route(logits, 8, renormalize=normalize), ids, weights)


def test_mixtral():
    made, x, logits, _ = router("mixtral", "MixtralTopKRouter", 8, 2)
    _, weights, ids = made(x)
    check(reference.route(logits, 2, renormalize=True), ids, weights)


def test_gpt_oss():
    made, x, logits, generator = router("gpt_oss", "GptOssTopKRouter", 32, 4)
    with torch.no_grad():
        made.bias.copy_(torch.randn(32, generator=generator))
    _, weights, ids = made(x)
    bias = made.bias.detach().numpy()
    check(reference.route(logits, 4, scoring="softmax_after_topk", bias=bias), ids, weights)


def test_llama4():
    """It scatters the weights over all experts; those not chosen have 0."""
    made, x, logits, _ = router("llama4", "Llama4Router", 16, 1)
    scores, _ = made(x)
    weights, ids = scores.topk(1, dim=1)
    check(reference.route(logits, 1, scoring="sigmoid_after_topk"), ids, weights)


@pytest.mark.parametrize(("experts", "groups", "topk_group"), [(256, 8, 4), (384, 1, 1)])
def test_deepseek_v3(experts, groups, topk_group):
    made, x, logits, generator = router(
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        experts,
        8,
        n_group=groups,
        topk_group=topk_group,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    correction = torch.randn(experts, generator=generator) / 5
    made.e_score_correction_bias.copy_(correction)
    _, weights, ids = made(x)
    found = reference.route(
        logits,
        8,
        scoring="sigmoid",
        renormalize=True,
        correction_bias=correction.numpy(),
        n_groups=groups,
        topk_group=topk_group,
        routed_scaling_factor=2.5,
    )
    check(found, ids, weights)
