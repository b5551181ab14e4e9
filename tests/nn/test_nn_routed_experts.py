"""`RoutedExperts`: a layer's bytes behind its router, from whatever routed."""

from typing import Any

import numpy as np
import pytest

from nbmoe.errors import RoutingError, ShapeError
from nbmoe.nn import RoutedExperts, make_layer, random_tokens
from tests.nn.weights import random_layer

PAIRS = [("nvfp4", ""), ("mxfp4", "mxfp8"), ("mxfp4", "bf16"), ("fp8_block", ""), ("bf16", "")]


def of(weights: Any, backend: str) -> RoutedExperts:
    return RoutedExperts(weights, backend=backend)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_bytes_are_the_layer_s(pair: tuple[str, str], fast_backend: str) -> None:
    """With ids and weights of the layer's router, again and again."""
    weights = random_layer(4, *pair, biased=True)
    layer, experts = make_layer(weights, backend="reference"), of(weights, fast_backend)
    for tokens in (3, 7, 3):
        x = random_tokens(tokens, 64, seed=tokens)
        trace = layer.trace(x)
        got = experts(x, trace.topk_ids, trace.topk_weights)
        assert np.asarray(got).tobytes() == trace.output.tobytes()
    out = np.zeros_like(x)
    assert experts(x, trace.topk_ids, trace.topk_weights, out=out) is out
    assert out.tobytes() == trace.output.tobytes()


def test_masked_ids_count_for_nothing(fast_backend: str) -> None:
    experts = of(random_layer(4, "mxfp8", ""), fast_backend)
    x = random_tokens(3, 64, seed=1)
    ids = np.array([[0, -1], [2, 1], [-1, -1]], np.int32)
    factors = np.array([[0.5, 9.0], [0.25, 1.0], [9.0, 9.0]], np.float32)
    got = np.asarray(experts(x, ids, factors))
    first = np.asarray(experts(x[:1], ids[:1, :1].copy(), factors[:1, :1].copy()))
    assert got[:1].tobytes() == first.tobytes() and not got[2].view(np.uint16).any()
    assert experts(x[:0], ids[:0], factors[:0]).shape == (0, 64)


def test_what_is_refused() -> None:
    experts = of(random_layer(4, "mxfp8", ""), "reference")
    x, ids = random_tokens(2, 64, seed=1), np.array([[0, 1], [1, 2]], np.int32)
    factors = np.ones((2, 2), np.float32)
    with pytest.raises(ShapeError, match=r"RoutedExperts.*x: .*H = 64"):
        experts(random_tokens(2, 32, seed=1), ids, factors)
    with pytest.raises(ShapeError, match=r"expert_ids: .*\(2, k\)"):
        experts(x, ids[:1], factors)
    with pytest.raises(ShapeError, match=r"weights: .*\(2, 2\), one an id"):
        experts(x, ids, factors[:, :1].copy())
    with pytest.raises(RoutingError, match="different experts"):
        experts(x, np.zeros((2, 2), np.int32), factors)
    with pytest.raises(RoutingError, match=r"-1"):
        experts(x, ids + 100, factors)
