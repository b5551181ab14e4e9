"""Gates: the operations with the parameters that a model has; P10."""

import ml_dtypes
import numpy as np
import pytest

from nbmoe import reference
from nbmoe.arrays import to_backend, to_numpy
from nbmoe.codecs import decode_bf16
from nbmoe.errors import (
    ConfigError,
    DTypeError,
    RangeError,
    ShapeError,
    UnsupportedError,
)
from nbmoe.nn import MoEGate, SigmoidTopKRouter, random_tokens
from nbmoe.nn.gate import _bf16_parts
from tests.nn.weights import random_router

BF16 = ml_dtypes.bfloat16


def routed(gate, x):
    ids, weights = gate(to_backend(x, gate.backend.name))
    return to_numpy(ids), to_numpy(weights)


def weight(experts=6, hidden=64, dtype=BF16):
    return np.random.default_rng(0).standard_normal((experts, hidden)).astype(dtype)


def same(found, expected):
    for left, right in zip(found, expected, strict=True):
        assert left.tobytes() == right.tobytes()


def test_gate_is_the_largest_logits(backend):
    x, w = random_tokens(5, 64, seed=0), weight()
    gate = MoEGate(w, 2, backend=backend)
    assert (gate.hidden_dim, gate.num_experts, gate.num_experts_per_token) == (64, 6, 2)
    logits = reference.router_logits(x, w)
    same(routed(gate, x), reference.route(logits, 2, scoring="none"))


def test_sigmoid_router(backend):
    x, w = random_tokens(5, 64, seed=1), weight(8)
    correction = np.linspace(-1, 1, 8, dtype=np.float32)
    router = SigmoidTopKRouter(
        w,
        2,
        correction_bias=correction,
        routed_scaling_factor=2.5,
        n_groups=4,
        topk_group=2,
        backend=backend,
    )
    expected = reference.route(
        reference.router_logits(x, w),
        2,
        scoring="sigmoid",
        renormalize=True,
        correction_bias=correction,
        routed_scaling_factor=2.5,
        n_groups=4,
        topk_group=2,
    )
    same(routed(router, x), expected)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_after_topk"])
def test_gate_of_a_checkpoints_router(scoring):
    x = random_tokens(5, 64, seed=2)
    bias = np.linspace(-1, 1, 6).astype(BF16)
    router = random_router(3, 6, 64, 2, scoring=scoring, bias=bias, scaling_factor=0.5)
    gate = MoEGate.of_router(router, backend="reference")
    assert isinstance(gate, SigmoidTopKRouter) == (scoring == "sigmoid")
    expected = reference.route(
        reference.router_logits(x, router.weight),
        2,
        scoring=scoring,
        renormalize=True,
        bias=decode_bf16(bias),
        routed_scaling_factor=0.5,
    )
    same(routed(gate, x), expected)


def test_correction_bias_in_bf16():
    correction = np.linspace(-1, 1, 6).astype(BF16)
    options = {"backend": "reference", "correction_bias_dtype": "bfloat16"}
    router = SigmoidTopKRouter(weight(), 2, correction_bias=correction, **options)
    exact = SigmoidTopKRouter(
        weight(), 2, correction_bias=decode_bf16(correction), backend="reference"
    )
    x = random_tokens(4, 64, seed=3)
    same(routed(router, x), routed(exact, x))


@pytest.mark.parametrize(("given", "named"), [(BF16, "float32"), (np.float32, "bfloat16")])
def test_correction_bias_of_another_type_than_named(given, named):
    correction = np.linspace(-1, 1, 6).astype(given)
    options = {"correction_bias": correction, "correction_bias_dtype": named}
    rule = rf"^SigmoidTopKRouter\(\): correction_bias: expected {named}, the correction_bias_dtype"
    with pytest.raises(DTypeError, match=rule):
        SigmoidTopKRouter(weight(), 2, backend="reference", **options)


def test_float32_weights_are_kept_whole(fast_backend):
    """A gate that bf16 cannot hold: the parts sum to it, and the logits are its logits."""
    w = weight(dtype=np.float32)
    parts = _bf16_parts(w)
    assert len(parts) == 3
    total = np.sum([p.astype(np.float64) for p in parts], axis=0)
    assert np.array_equal(total, w.astype(np.float64))
    assert len(_bf16_parts(w.astype(BF16).astype(np.float32))) == 1
    x = random_tokens(5, 64, seed=4)
    _, weights = routed(MoEGate(w, 6, backend=fast_backend), x)
    exact = -np.sort(-(x.astype(np.float64) @ w.T.astype(np.float64)), axis=1)
    assert np.abs(weights - exact).max() < 64 * 2.0**-20
    rounded = -np.sort(-(x.astype(np.float64) @ w.astype(BF16).T.astype(np.float64)), axis=1)
    assert np.abs(rounded - exact).max() > 1e-2


BAD = [
    ({"num_experts_per_token": 7}, RangeError, "top_k"),
    ({"scoring": "argmax"}, ConfigError, "scoring"),
    ({"renormalize": True}, ConfigError, "renormalize"),
    ({"routed_scaling_factor": -1.0}, RangeError, "routed_scaling_factor"),
    ({"weight": np.zeros((6, 64), np.float16)}, DTypeError, "weight"),
    ({"weight": np.zeros(6, np.float32)}, ShapeError, "weight"),
    ({"bias": np.zeros(5, np.float32)}, ShapeError, "bias"),
]


@pytest.mark.parametrize(("change", "error", "arg"), BAD)
def test_refused_when_it_is_made(change, error, arg):
    options = {"weight": weight(), "num_experts_per_token": 2, "backend": "reference", **change}
    with pytest.raises(error, match=rf"\(\): {arg}: "):
        MoEGate(**options)


def test_sigmoid_router_refused():
    with pytest.raises(UnsupportedError, match="correction_bias_dtype"):
        SigmoidTopKRouter(weight(), 2, correction_bias_dtype="float16", backend="reference")
    with pytest.raises(ConfigError, match="n_groups"):
        SigmoidTopKRouter(weight(), 2, n_groups=5, backend="reference")
    with pytest.raises(ShapeError, match=r"^SigmoidTopKRouter\(\): correction_bias: "):
        SigmoidTopKRouter(weight(), 2, correction_bias=np.zeros(5, np.float32), backend="reference")
