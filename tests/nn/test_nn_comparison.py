"""The float64 comparison notices what it exists to notice."""

import dataclasses

import numpy as np
import pytest

from nbmoe.checkpoints import read_layer
from nbmoe.nn import MoEQuantized, random_tokens, random_weights
from nbmoe.nn.comparison import compare_with_float64, relative_error


@pytest.fixture(scope="module")
def run(fixtures):
    weights = read_layer(fixtures / "tiny_modelopt_nvfp4")
    x = random_tokens(40, 128, seed=1)
    return weights, x, MoEQuantized(weights, backend="reference").trace(x)


def test_wrong_output_row_shows(run):
    weights, x, trace = run
    output = trace.output.copy()
    output[7] = output[8]
    errors = compare_with_float64(weights, x, dataclasses.replace(trace, output=output))
    assert errors.arithmetic > 0.1


def test_wrong_inner_activation_shows(run):
    weights, x, trace = run
    codes = trace.inner_codes.copy()
    codes[5] ^= 0x88  # flips every sign of one routed row
    errors = compare_with_float64(weights, x, dataclasses.replace(trace, inner_codes=codes))
    assert errors.inner > 0.2
    assert errors.arithmetic > 0.1  # the output was not made from these


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_tokens_that_are_not_finite_are_left_out(run, bad):
    weights, x, _ = run
    broken = x.copy()
    broken[3, 9] = bad
    trace = MoEQuantized(weights, backend="reference").trace(broken)
    errors = compare_with_float64(weights, broken, trace)
    assert errors.arithmetic < 1e-2
    assert errors.total < 0.25


def test_no_tokens(run):
    weights, x, _ = run
    trace = MoEQuantized(weights, backend="reference").trace(x[:0])
    errors = compare_with_float64(weights, x[:0], trace)
    assert (errors.arithmetic, errors.inner, errors.total) == (0, 0, 0)


def test_relative_error():
    assert relative_error(np.array([3.0, 5.0]), np.array([3.0, 4.0])) == pytest.approx(0.2)
    assert relative_error(np.zeros(2), np.zeros(2)) == 0
    assert relative_error(np.ones(2), np.zeros(2)) == np.inf


def test_random_layer_is_reproducible_and_uses_the_scale_range():
    sizes = {"num_experts": 3, "hidden_size": 96, "moe_dim": 64, "top_k": 2}
    first, again = random_weights(**sizes, seed=1), random_weights(**sizes, seed=1)
    other = random_weights(**sizes, seed=2)
    assert np.array_equal(first.gate_up, again.gate_up)
    assert not np.array_equal(first.gate_up, other.gate_up)
    # The largest block scale is e4m3's largest, 448 (0x7E): nothing is saturated or wasted.
    assert (first.gate_up_scales.max(axis=(1, 2)) == 0x7E).all()
    assert (first.down_scales.max(axis=(1, 2)) == 0x7E).all()
