"""Weights quantized here are within their format's error of the original, like an exporter's."""

import numpy as np
import pytest

from nbmoe.checkpoints.quantize_weights import quantize_weights
from nbmoe.checkpoints.stack import WEIGHT_FORMATS, ExpertStack
from nbmoe.errors import ConfigError
from tests.checkpoints.dequantize import projections, relative_error

ERRORS = {"nvfp4": (0.09, 0.10), "mxfp4": (0.10, 0.125), "bf16": (0.001, 0.002)}


@pytest.mark.parametrize("format_name", WEIGHT_FORMATS)
@pytest.mark.parametrize("moe", [96, 192])
def test_error_of_the_format(format_name, moe):
    rng = np.random.default_rng(3)
    gate_up = rng.standard_normal((3, 2 * moe, 160), np.float32)
    down = rng.standard_normal((3, 160, moe), np.float32)
    gate_up[0, :moe] *= 100  # scales of gate and up must not mix
    down[1] = 0
    fields = quantize_weights(gate_up, down, format_name)
    inputs = WEIGHT_FORMATS[format_name].input_scales
    scales = {f"{n}_input_scale": np.ones(3, np.float32) for n in ("gate_up", "down") if inputs}
    found = projections(ExpertStack(format=format_name, source="made", **fields, **scales))
    low, high = ERRORS.get(format_name, (0.02, 0.03))
    original = {"gate_proj": gate_up[:, :moe], "up_proj": gate_up[:, moe:], "down_proj": down}
    for name, values in found.items():
        for e in range(3):
            if not original[name][e].any():
                assert not values[e].any()
            elif not (format_name == "nvfp4" and name == "up_proj" and e == 0):
                assert low < relative_error(values[e], original[name][e]) < high, (name, e)


def test_unknown_format():
    one = np.ones((1, 32, 32), np.float32)
    with pytest.raises(ConfigError, match="'fp4'"):
        quantize_weights(one, one, "fp4")
