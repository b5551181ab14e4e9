"""P1: gated activation of a matmul's result, plain and quantized, from the definitions."""

import ml_dtypes
import numpy as np
import pytest

from nbmoe import codecs, layouts, reference
from nbmoe.activation import GatedActivation
from nbmoe.errors import ConfigError, ScaleError, ShapeError
from nbmoe.formats import FORMATS
from nbmoe.reference.quantize import quantize_blocks

BF16 = ml_dtypes.bfloat16
START, OFFSETS = np.uint32([0, 3, 3, 133]), np.uint32([0, 1, 1])


def pairs(rows, d):
    x = np.random.default_rng(rows).standard_normal((rows, 2 * d)).astype(np.float32)
    return (3 * x).astype(BF16)


def silu_float64(x):
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def test_gated_activation_is_rounded_once_from_nearly_the_exact_value():
    x = pairs(40, 48)
    got = reference.gated_activation(x).astype(np.float64)
    exact = silu_float64(x)
    assert (np.abs(got - exact) <= np.abs(exact) * 2.0**-8 * 1.001).all()
    # Rounding z to bf16 is the only coarse step: most results are the nearest bf16.
    assert (got == exact.astype(np.float32).astype(BF16)).mean() > 0.999


def test_interleaved_columns():
    x = pairs(3, 16)
    alternate = np.empty_like(x)
    alternate[:, 0::2], alternate[:, 1::2] = x[:, :16], x[:, 16:]
    for fn in (None, GatedActivation("gelu_tanh"), GatedActivation("swigluoai", 1.702, 7.0)):
        got = reference.gated_activation(alternate, activation=fn, interleaved=True)
        np.testing.assert_array_equal(got, reference.gated_activation(x, activation=fn))


@pytest.mark.parametrize("name", FORMATS)
def test_quantizes_without_rounding_to_bf16(name):
    """Blocks of the float32 activation; after a rounding to bf16 some codes would differ."""
    fmt, x = FORMATS[name], pairs(134, 64)
    scales = np.float32([0.7, 1, 90]) if fmt.has_tensor_scale else None
    codes, tiles = reference.fused_silu_quantize(
        x, START, OFFSETS, np.int32([5, 0, 2]), scales, format=name
    )
    gate, up = np.split(codecs.decode_bf16(x), 2, axis=1)
    z = (gate * (np.float32(1) / (np.float32(1) + reference.float32.exp(-gate)))) * up
    rounded = differing = 0
    for slot, tile in ((0, 0), (2, 1)):
        own = slice(int(START[slot]), int(START[slot + 1]))
        factor = 1 if scales is None else scales[slot]
        want, want_scales = quantize_blocks(z[own], fmt, factor)
        np.testing.assert_array_equal(codes[own].view(np.uint8), want)
        padded = layouts.interleave_scales(want_scales)
        np.testing.assert_array_equal(tiles[tile : tile + len(padded)].view(np.uint8), padded)
        coarse = z[own].astype(BF16).astype(np.float32)
        differing += (quantize_blocks(coarse, fmt, factor)[0] != want).sum()
        rounded += want.size
    assert 0 < differing < rounded / 10
    assert not codes[133:].view(np.uint8).any() and not tiles[3:].view(np.uint8).any()


def test_input_scales_are_by_slot_and_masked_slots_are_zero():
    x = pairs(133, 16)
    scales = np.float32([1, 1, 4])
    codes, tiles = reference.fused_silu_quantize(
        x, START, OFFSETS, np.int32([-1, 9, 0]), scales, format="nvfp4"
    )
    assert not codes[:3].any() and not tiles[0].any()
    alone, _ = reference.fused_silu_quantize(
        x[3:], np.uint32([0, 130]), np.zeros(1, np.uint32), np.int32([7]), scales[2:]
    )
    np.testing.assert_array_equal(codes[3:], alone)


def test_bad_arguments():
    x = pairs(133, 16)
    args = (START, OFFSETS, np.int32([0, 1, 2]))
    with pytest.raises(ScaleError, match="input_scales is required"):
        reference.fused_silu_quantize(x, *args)
    with pytest.raises(ConfigError, match="input_scales: expected None"):
        reference.fused_silu_quantize(x, *args, np.ones(3, np.float32), format="mxfp8")
    with pytest.raises(ConfigError, match="format"):
        reference.fused_silu_quantize(x, *args, format="fp4")
    with pytest.raises(ShapeError, match="2D"):
        reference.gated_activation(x[:, :31])
