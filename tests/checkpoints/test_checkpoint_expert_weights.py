"""`ExpertWeights` built by hand is checked like one read from a file."""

import dataclasses

import numpy as np
import pytest

from nbmoe.checkpoints import ExpertWeights, read_layer
from nbmoe.errors import ArgTypeError, DTypeError, RangeError, ScaleError, ShapeError


@pytest.fixture(scope="module")
def weights(fixtures) -> ExpertWeights:
    return read_layer(fixtures / "tiny_modelopt_nvfp4")


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("gate_up", lambda a: a.tolist(), ArgTypeError),
        ("gate_up", lambda a: a.view(np.int8), DTypeError),
        ("gate_up", lambda a: a[0], ShapeError),
        ("gate_up", lambda a: a[:3], ShapeError),
        ("gate_up", lambda a: a[:, :, :-1], ShapeError),
        ("gate_up_scales", lambda a: a[:, :, :4], ShapeError),
        ("down", lambda a: a[:, :, :5], ShapeError),
        ("down_scales", lambda a: a.astype(np.float32), DTypeError),
        ("router", lambda a: a.astype(np.float64), DTypeError),
        ("router", lambda a: a.T, ShapeError),
        ("down_input_scale", lambda a: a[:3], ShapeError),
        ("down_input_scale", lambda a: a.astype(np.float64), DTypeError),
        ("down_input_scale", lambda a: a * 0, ScaleError),
        ("gate_up_weight_scale", lambda a: a / 0, ScaleError),
        ("gate_up_scales", lambda a: a | 0x80, ScaleError),
        ("top_k", lambda k: 5, RangeError),
        ("top_k", lambda k: 0, RangeError),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_bad_attribute(weights, name, change, error):
    with pytest.raises(error, match=r"^ExpertWeights\(\): "):
        dataclasses.replace(weights, **{name: change(getattr(weights, name))})


def test_scale_error_names_the_expert(weights):
    scales = weights.down_weight_scale.copy()
    scales[2] = np.nan
    with pytest.raises(ScaleError, match="layer 0, expert 2, down_weight_scale"):
        dataclasses.replace(weights, down_weight_scale=scales)
