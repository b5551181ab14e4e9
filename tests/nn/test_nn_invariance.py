"""P3, P8 of whole layers: a token's result is its own, whatever stands beside it and in what order.

In every format but FP8 with one dynamic scale for all activations: that scale is the largest value
of the batch over 448, so each token's codes depend on the others by definition, and a NaN spreads.
"""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbmoe.config import QuantConfig
from nbmoe.nn import MoEQuantized, make_layer, random_tokens
from tests.nn.weights import FORMATS, random_layer, random_stack

TOKENS = 5
EXAMPLES = 4


@functools.cache
def layer_of(pair, backend):
    """With biases, and with shared experts that are computed apart, since they are wider."""
    shared = random_stack(1, *pair, experts=1, moe=64)
    return make_layer(random_layer(2, *pair, biased=True, shared=shared), backend=backend)


@pytest.mark.parametrize("pair", FORMATS, ids="-".join)
@settings(max_examples=EXAMPLES)
@given(
    seed=st.integers(0, 999),
    bad=st.integers(0, TOKENS - 1),
    element=st.integers(0, 63),
    value=st.sampled_from([np.nan, -np.nan, np.inf]),
)
def test_each_token_is_as_if_alone(pair, fast_backend, seed, bad, element, value):
    layer = layer_of(pair, fast_backend)
    x = random_tokens(TOKENS, 64, seed)
    clean = layer(x).tobytes()
    x[bad, element] = value
    y = layer(x)
    for token in range(TOKENS):
        alone = layer(x[token : token + 1]).tobytes()
        assert alone == y[token : token + 1].tobytes()
        assert token == bad or alone == clean[128 * token : 128 * token + 128]
    if np.isnan(value):
        assert np.isnan(y[bad].astype(np.float32)).all()


@pytest.mark.parametrize("pair", FORMATS, ids="-".join)
@settings(max_examples=EXAMPLES)
@given(seed=st.integers(0, 999), order=st.permutations(range(TOKENS)))
def test_order_of_tokens(pair, fast_backend, seed, order):
    layer = layer_of(pair, fast_backend)
    x = random_tokens(TOKENS, 64, seed)
    assert layer(x[order]).tobytes() == layer(x)[order].tobytes()


def test_one_dynamic_scale_is_the_exception():
    weights = random_layer(3, "fp8_tensor")
    layer = MoEQuantized(weights, quant_config=QuantConfig.tensor_fp8(), backend="reference")
    x = random_tokens(TOKENS, 64, seed=4)
    assert layer(x[:1]).tobytes() != layer(x)[:1].tobytes()
    x[1, 2] = np.nan
    assert np.isnan(layer(x).astype(np.float32)).all()
