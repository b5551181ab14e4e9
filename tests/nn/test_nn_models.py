"""P1: real models' layers, scaled down: each is the specification's bytes and near float64."""

import numpy as np
import pytest

from nbmoe.activation import GatedActivation
from nbmoe.nn import make_layer, random_tokens
from nbmoe.nn.comparison import compare_with_float64
from tests.nn.weights import join, random_layer, random_router, random_stack

SWIGLUOAI = GatedActivation("swigluoai", alpha=1.702, limit=7.0)


def deepseek_v3():
    """256 experts in 8 groups -> 32, sigmoid with correction bias, one shared expert."""
    correction = np.random.default_rng(0).uniform(-0.2, 0.2, 32).astype(np.float32)
    router = random_router(
        1,
        32,
        128,
        8,
        scoring="sigmoid",
        correction_bias=correction,
        n_group=8,
        topk_group=4,
        scaling_factor=2.5,
    )
    sizes = {"hidden": 128, "moe": 32}
    shared = random_stack(2, "fp8_block", experts=1, **sizes)
    return random_layer(3, "fp8_block", experts=32, router=router, shared=shared, **sizes)


def kimi_k2():
    """384 experts in one group -> 24, NVFP4, one shared expert in bf16."""
    router = random_router(
        4, 24, 64, 8, scoring="sigmoid", correction_bias=np.zeros(24, np.float32)
    )
    shared = random_stack(5, "bf16", experts=1, moe=32)
    return random_layer(6, "nvfp4", experts=24, router=router, shared=shared)


def qwen3():
    """128 experts -> 16, softmax, renormalized, FP8 with a scale a row."""
    return random_layer(7, "fp8_row", experts=16, top_k=8, moe=48)


def minimax_m3():
    """128 experts -> 16, sigmoid, MXFP8, swigluoai, in one fused matmul."""
    router = random_router(8, 16, 64, 4, scoring="sigmoid")
    return random_layer(9, "mxfp8", experts=16, router=router, activation=SWIGLUOAI)


def gemma_4():
    """D = 704 -> 176 (not a multiple of 64), NVFP4, gelu_tanh."""
    gelu = GatedActivation("gelu_tanh")
    return random_layer(10, "nvfp4", experts=8, moe=176, top_k=4, activation=gelu)


def gemma_4_on_two_gpus():
    """D = 704 -> 352 a GPU, as it is: 5.5 blocks of 64 and half a tile through the fused matmul."""
    gelu = GatedActivation("gelu_tanh")
    return random_layer(16, "nvfp4", experts=8, moe=352, top_k=4, activation=gelu)


def llama_4():
    """16 experts -> 4, top-1, the sigmoid on the input, one shared expert."""
    router = random_router(11, 4, 64, 1, scoring="sigmoid_after_topk", renormalize=False)
    shared = random_stack(12, "bf16", experts=1, moe=32)
    stack = random_stack(13, "bf16")
    return join(stack, router, shared=shared, apply_router_weight_first=True)


def gpt_oss():
    """H = D = 2880 -> 96, biases, MXFP4 weights under bf16 activations, swigluoai."""
    bias = np.random.default_rng(1).standard_normal(8).astype(np.float32)
    router = random_router(14, 8, 96, 4, scoring="softmax_after_topk", bias=bias)
    sizes = {"experts": 8, "hidden": 96, "moe": 96}
    return random_layer(
        15, "mxfp4", "bf16", router=router, biased=True, activation=SWIGLUOAI, **sizes
    )


MODELS = (deepseek_v3, kimi_k2, qwen3, minimax_m3, gemma_4, gemma_4_on_two_gpus, llama_4, gpt_oss)


@pytest.mark.parametrize("model", MODELS)
def test_model(model, fast_backend):
    weights = model()
    x = random_tokens(5, weights.hidden_size, seed=1)
    trace = make_layer(weights, backend=fast_backend).trace(x)
    expected = make_layer(weights, backend="reference").trace(x)
    for name in ("topk_ids", "topk_weights", "down", "output"):
        assert getattr(trace, name).tobytes() == getattr(expected, name).tobytes(), name
    errors = compare_with_float64(weights, x, trace)
    assert errors.arithmetic < 6e-3
