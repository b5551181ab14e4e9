"""What a layer hands to the kernels, against loops written from the definition of each layout."""

import dataclasses

import numpy as np
import pytest

from nbmoe.checkpoints import read_layer
from nbmoe.errors import ScaleError
from nbmoe.nn.prepared import prepare_experts
from tests.nn.weights import random_stack


@pytest.fixture(params=["tiny_modelopt_nvfp4", "tiny_ct_NVFP4"])
def weights(fixtures, request):
    return read_layer(fixtures / request.param)


def test_gate_and_up_rows_alternate(weights):
    prepared, moe = prepare_experts(weights), weights.moe_dim
    for i in range(moe):
        assert np.array_equal(prepared.gate_up[:, 2 * i], weights.gate_up[:, i])
        assert np.array_equal(prepared.gate_up[:, 2 * i + 1], weights.gate_up[:, moe + i])


def test_scales_of_alternating_rows_lie_in_tiles(weights):
    prepared, moe = prepare_experts(weights), weights.moe_dim
    tiles = prepared.gate_up_scales
    seen = np.zeros(tiles.shape, bool)
    for i in range(moe):
        for row, source in ((2 * i, i), (2 * i + 1, moe + i)):
            for c in range(weights.hidden_size // 16):
                at = (slice(None), row // 128, c // 4, row % 32, row % 128 // 32, c % 4)
                assert np.array_equal(tiles[at], weights.gate_up_scales[:, source, c])
                seen[at] = True
    assert not tiles[~seen].any()


def test_down_scales_lie_in_tiles(weights):
    tiles = prepare_experts(weights).down_scales
    for row in range(weights.hidden_size):
        for c in range(weights.moe_dim // 16):
            at = (slice(None), row // 128, c // 4, row % 32, row % 128 // 32, c % 4)
            assert np.array_equal(tiles[at], weights.down_scales[:, row, c])


def test_one_input_scale_for_gate_up_and_one_an_expert_for_down(weights):
    input_scale = np.float32([1e-3, 4e-3, 2e-3, 3e-3])
    down_input = np.float32([5e-4, 6e-4, 7e-4, 8e-4])
    changed = dataclasses.replace(
        weights, gate_up_input_scale=input_scale, down_input_scale=down_input
    )
    prepared = prepare_experts(changed)
    largest = np.float32(4e-3)
    assert (prepared.gate_up_inverse_input_scales == np.float32(1) / largest).all()
    assert np.array_equal(prepared.gate_up_expert_scales, weights.gate_up_weight_scale * largest)
    assert np.array_equal(prepared.down_inverse_input_scales, np.float32(1) / down_input)
    assert np.array_equal(prepared.down_expert_scales, weights.down_weight_scale * down_input)
    for field in dataclasses.fields(prepared):
        array = getattr(prepared, field.name)
        if field.name.endswith("bias"):
            assert array is None
        else:
            assert array.dtype in (np.uint8, np.float32), field.name


def test_product_of_scales_that_underflows_is_refused(weights):
    scales = weights.down_weight_scale.copy()
    scales[3] = 1e-37
    broken = dataclasses.replace(weights, down_weight_scale=scales)
    with pytest.raises(ScaleError, match="expert 3, down: weight scale x input scale"):
        prepare_experts(broken)


def test_biases_are_permuted_with_the_rows():
    stack = random_stack(0, "mxfp8", moe=32, biased=True)
    prepared = prepare_experts(stack)
    assert np.array_equal(prepared.gate_up_bias[:, ::2], stack.gate_up_bias[:, :32])
    assert np.array_equal(prepared.gate_up_bias[:, 1::2], stack.gate_up_bias[:, 32:])
    assert np.array_equal(prepared.down_bias, stack.down_bias)
    assert prepared.gate_up_expert_scales is prepared.down_inverse_input_scales is None
    plain = prepare_experts(stack, permute=False)
    assert np.array_equal(plain.gate_up_bias, stack.gate_up_bias)
    assert np.array_equal(plain.gate_up, stack.gate_up)
    assert np.array_equal(prepared.gate_up[:, ::2], stack.gate_up[:, :32])
