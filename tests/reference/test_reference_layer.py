"""P1, P2, P3, P8: the stages together make the layer that float64 computes."""

import ml_dtypes
import numpy as np
import pytest

from nbmoe import layouts, reference
from nbmoe.formats import NVFP4
from nbmoe.reference import oracle

BF16 = ml_dtypes.bfloat16


class Layer:
    """A random NVFP4 layer: E experts, H hidden, D inner."""

    def __init__(self, experts=6, hidden=208, inner=80, seed=0):
        rng = np.random.default_rng(seed)
        self.experts, self.hidden, self.inner = experts, hidden, inner

        def codes(*shape):
            return rng.integers(0, 256, shape).astype(np.uint8)

        def scales(*shape):
            return rng.integers(0x28, 0x40, shape).astype(np.uint8)

        self.gate_up = codes(experts, 2 * inner, hidden // 2)
        self.gate_up_scales = scales(experts, 2 * inner, hidden // 16)
        self.down = codes(experts, hidden, inner // 2)
        self.down_scales = scales(experts, hidden, inner // 16)
        self.input_scale = np.float32(1 / 400)
        self.down_input_scale = rng.uniform(0.004, 0.006, experts).astype(np.float32)
        self.gate_up_scale_2 = rng.uniform(0.008, 0.012, experts).astype(np.float32)
        self.down_scale_2 = rng.uniform(0.05, 0.1, experts).astype(np.float32)

    def run(self, x, ids, weights):
        """The chain of reference ops; also returns what the down projection read."""
        index = reference.moe_create_indices(ids, self.experts)
        groups = index.expert_start_indices, index.scales_offset, index.expert_ids
        q, scales = reference.grouped_quantize_dynamic_block_scaled(
            x,
            *groups,
            np.full(self.experts, 1 / self.input_scale, np.float32),
            indices=index.token_expert_order,
            indices_divisor=ids.shape[1],
        )
        c, c_scales = reference.grouped_matmul_blocked_swiglu(
            q,
            layouts.sigma_permute(self.gate_up),
            scales,
            layouts.interleave_scales(layouts.sigma_permute(self.gate_up_scales)),
            *groups,
            expert_scales=self.gate_up_scale_2 * self.input_scale,
            c_input_scales=np.float32(1) / self.down_input_scale,
        )
        down = reference.grouped_matmul_block_scaled(
            c,
            self.down,
            c_scales,
            layouts.interleave_scales(self.down_scales),
            *groups,
            self.down_scale_2 * self.down_input_scale,
        )
        out = reference.moe_finalize(down, index.restore_token_order, weights)
        inner = oracle.dequantize_groups(c, c_scales, index.expert_start_indices, groups[1])
        return out, inner, index.expert_start_indices

    def float64(self, x, ids, weights, inner=None, start=None):
        """The layer on quantized tokens; with `inner`, on the quantized intermediate as well."""
        sf = 1 / float(self.input_scale)
        tokens = oracle.fake_quantize(x.astype(np.float64), NVFP4, sf)
        gate_up = oracle.dequantize(self.gate_up, self.gate_up_scales)
        down = oracle.dequantize(self.down, self.down_scales)

        def seen(z, expert):
            if inner is None:
                return z
            factor = float(self.down_input_scale[expert])
            return inner[int(start[expert]) : int(start[expert + 1])] * factor

        return oracle.moe_layer(
            tokens,
            ids,
            weights,
            gate_up * self.gate_up_scale_2.astype(np.float64)[:, None, None],
            down * self.down_scale_2.astype(np.float64)[:, None, None],
            seen,
        )


def tokens(count, hidden, seed=1):
    return np.random.default_rng(seed).standard_normal((count, hidden)).astype(BF16)


def routing(count, experts, top_k, seed=2):
    logits = np.random.default_rng(seed).standard_normal((count, experts)).astype(np.float32)
    return reference.route(logits, top_k, renormalize=True)


def relative(got, exact):
    return np.linalg.norm(got.astype(np.float64) - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("count", [1, 2, 127, 128, 129])
def test_layer_is_near_float64(count):
    layer = Layer()
    x = tokens(count, layer.hidden)
    ids, weights = routing(count, layer.experts, 2)
    out, inner, start = layer.run(x, ids, weights)
    assert relative(out, layer.float64(x, ids, weights, inner, start)) < 5e-3
    assert relative(out, layer.float64(x, ids, weights)) < 0.12


def test_no_tokens():
    layer = Layer()
    ids, weights = routing(0, layer.experts, 2)
    out, _, _ = layer.run(tokens(0, layer.hidden), ids, weights)
    assert out.shape == (0, layer.hidden)


@pytest.mark.parametrize(
    "ids",
    [
        np.full((9, 1), 3),
        np.tile([[0, 5]], (9, 1)),
        np.array([[0, -1], [-1, -1], [3, 1], [2, 2]]),
    ],
    ids=["one expert", "empty experts", "masked and repeated"],
)
def test_extreme_routings(ids):
    layer = Layer()
    x = tokens(len(ids), layer.hidden)
    weights = np.random.default_rng(3).random(ids.shape).astype(np.float32)
    ids = ids.astype(np.int32)
    out, inner, start = layer.run(x, ids, weights)
    masked = (ids < 0).all(axis=1)
    assert (out[masked].view(np.uint16) == 0).all()
    assert relative(out, layer.float64(x, ids, weights, inner, start)) < 5e-3


def test_a_nan_token_is_the_only_nan_row():
    layer = Layer()
    x = tokens(20, layer.hidden)
    ids, weights = routing(20, layer.experts, 2)
    clean, _, _ = layer.run(x, ids, weights)
    x[7] = np.nan
    out, _, _ = layer.run(x, ids, weights)
    assert (out[7].view(np.uint16) == 0x7FFF).all()
    np.testing.assert_array_equal(np.delete(out, 7, 0), np.delete(clean, 7, 0))


def test_a_token_does_not_depend_on_the_others():
    layer = Layer()
    x = tokens(40, layer.hidden)
    ids, weights = routing(40, layer.experts, 3)
    together, _, _ = layer.run(x, ids, weights)
    for t in (0, 17, 39):
        alone, _, _ = layer.run(x[t : t + 1], ids[t : t + 1], weights[t : t + 1])
        np.testing.assert_array_equal(alone[0], together[t])
    order = np.random.default_rng(4).permutation(40)
    permuted, _, _ = layer.run(x[order], ids[order], weights[order])
    np.testing.assert_array_equal(permuted, together[order])


def test_a_wrong_layer_is_not_near_float64():
    """What the bounds above would catch: two experts swapped."""
    layer = Layer()
    x = tokens(30, layer.hidden)
    ids, weights = routing(30, layer.experts, 2)
    exact = layer.float64(x, ids, weights)
    layer.down[[0, 1]] = layer.down[[1, 0]]
    out, _, _ = layer.run(x, ids, weights)
    assert relative(out, exact) > 0.2
