"""P1: whatever the sizes and the routing, every backend computes the specification's bytes."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nbmoe.nn import MoEQuantized, random_tokens, random_weights
from nbmoe.nn.comparison import compare_with_float64


@given(
    hidden=st.integers(1, 9).map(lambda n: 16 * n),
    moe=st.integers(1, 6).map(lambda n: 16 * n),
    tokens=st.integers(0, 70),
    num_experts=st.integers(1, 9),
    data=st.data(),
)
def test_layer_is_the_specification(fast_backend, hidden, moe, tokens, num_experts, data):
    top_k = data.draw(st.integers(1, num_experts))
    seed = data.draw(st.integers(0, 99))
    weights = random_weights(
        num_experts=num_experts, hidden_size=hidden, moe_dim=moe, top_k=top_k, seed=seed
    )
    # A strong router sends most tokens to few experts and leaves others empty.
    strength = np.float32(data.draw(st.sampled_from([0, 1, 30])))
    gate = weights.router.weight.astype(np.float32) * strength
    router = dataclasses.replace(weights.router, weight=gate)
    weights = dataclasses.replace(weights, router=router)
    x = random_tokens(tokens, hidden, seed)
    trace = MoEQuantized(weights, backend=fast_backend).trace(x)
    expected = MoEQuantized(weights, backend="reference").trace(x)
    for name in ("token_expert_order", "hidden_codes", "inner_codes", "down", "output"):
        assert getattr(trace, name).tobytes() == getattr(expected, name).tobytes(), name
    assert compare_with_float64(weights, x, trace).arithmetic < 1e-2
