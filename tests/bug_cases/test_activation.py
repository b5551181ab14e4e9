"""Clamped activations that lost a clamp, a constant or the order of two steps."""

import ml_dtypes
import numpy as np
import pytest

from nbmoe import ops
from nbmoe.activation import GatedActivation
from nbmoe.formats import MXFP8
from nbmoe.layouts import deinterleave_scales, scales_offset
from tests.bug_cases.grouped import starts_of

BF16 = ml_dtypes.bfloat16
OAI = GatedActivation("swigluoai", alpha=1.702, limit=7.0)


def activate(kernels, gate, up, activation):
    x = np.zeros((1, 32), np.float32)
    x[0, 0], x[0, 16] = gate, up
    y = kernels(ops.gated_activation, x.astype(BF16), activation=activation)
    return float(y.view(BF16)[0, 0])


def test_limit_is_not_dropped(kernels):
    """vllm-project/vllm#43589, #41985, #42287, lightseekorg/tokenspeed#1647: -10000 came out."""
    got = activate(kernels, 100, -100, GatedActivation("silu", limit=10.0))
    assert got == pytest.approx(-99.9955, rel=2**-8)


def test_one_is_added_to_up(kernels):
    """sgl-project/sglang#39939: (up + 1) lost its 1."""
    assert activate(kernels, 3, 0, OAI) == pytest.approx(2.98193, rel=2**-8)


def test_clamp_comes_before_quantization(kernels):
    """vllm-project/vllm-ascend#9590: the block's scale came from values that were not clamped."""
    x = np.zeros((1, 64), np.float32)
    x[0, :32], x[0, 32:] = 1, 1
    x[0, 3] = 1e4
    starts = starts_of([1])
    _, tiles = kernels(
        ops.fused_silu_quantize,
        *(x.astype(BF16), starts, scales_offset(starts), np.zeros(1, np.int32)),
        format=MXFP8,
        activation=GatedActivation("silu", limit=10.0),
    )
    byte = int(deinterleave_scales(tiles.view(np.uint8), 1, 1)[0, 0])
    assert byte == 127 + int(np.ceil(np.log2(10 / 448)))
