"""`ExpertWeights` and `Router` built by hand are checked like those read from a file."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from nbmoe.checkpoints import ExpertWeights, read_layer
from nbmoe.checkpoints.router import Router
from nbmoe.checkpoints.stack import WEIGHT_FORMATS, ExpertStack
from nbmoe.errors import (
    ArgTypeError,
    ConfigError,
    DTypeError,
    RangeError,
    ScaleError,
    ShapeError,
)

FORMATS = {
    "nvfp4": "tiny_modelopt_nvfp4",
    "mxfp4": "tiny_mo_MXFP4_DEFAULT_CFG",
    "mxfp8": "tiny_mo_MXFP8_DEFAULT_CFG",
    "fp8_block": "tiny_ct_FP8_BLOCK",
    "bf16": "tiny_ct_NVFP4_bf16",
}


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
        ("gate_up", lambda a: a.view(ml_dtypes.bfloat16), DTypeError),
        ("gate_up_scales", lambda a: a[:, :, :4], ShapeError),
        ("gate_up_scales", lambda a: None, ScaleError),
        ("down", lambda a: a[:, :, :5], ShapeError),
        ("down_scales", lambda a: a.astype(np.float32), DTypeError),
        ("down_input_scale", lambda a: a[:3], ShapeError),
        ("down_input_scale", lambda a: a.astype(np.float64), DTypeError),
        ("down_input_scale", lambda a: a * 0, ScaleError),
        ("down_input_scale", lambda a: None, ScaleError),
        ("gate_up_weight_scale", lambda a: a / 0, ScaleError),
        ("gate_up_scales", lambda a: a | 0x80, ScaleError),
        ("gate_up_bias", lambda _: np.zeros((4, 128), np.float32), DTypeError),
        ("gate_up_bias", lambda _: np.zeros((4, 64), ml_dtypes.bfloat16), ShapeError),
        ("down_bias", lambda _: np.full((4, 128), np.inf, ml_dtypes.bfloat16), ScaleError),
        ("format", lambda _: "nvfp5", ConfigError),
        ("input_format", lambda _: "fp8", ConfigError),
        ("activation", lambda _: "silu", ArgTypeError),
        ("router", lambda r: r.weight, ArgTypeError),
        ("router", lambda r: dataclasses.replace(r, weight=r.weight[:, :64]), ShapeError),
        ("shared", lambda _: "gate", ArgTypeError),
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


@pytest.mark.parametrize("format_name", FORMATS)
def test_attributes_of_other_formats_are_refused(fixtures, format_name):
    read = read_layer(fixtures / FORMATS[format_name])
    for name in ("gate_up_weight_scale", "down_input_scale"):
        if getattr(read, name) is None:
            with pytest.raises(ConfigError, match=f"{name}: expected None for {format_name}"):
                dataclasses.replace(read, **{name: np.ones(4, np.float32)})


def stack(format_name: str, hidden: int, moe: int, **changes) -> ExpertStack:
    """Two experts of ones in a format, with scales of 1."""
    fmt = WEIGHT_FORMATS[format_name]
    one = {"e4m3": 0x38, "e8m0": 127, "f32": 1.0}
    fields = {"format": format_name, "source": "made"}
    for name, n, k in (("gate_up", moe, hidden), ("down", hidden, moe)):
        times = 2 if name == "gate_up" else 1
        rows, columns = fmt.codes_shape(times * n, k)
        dtype = np.uint8 if fmt.per_byte else ml_dtypes.bfloat16
        fields[name] = np.ones((2, rows, columns), dtype)
        if fmt.scales:
            rows, columns = fmt.scales_shape(n, k)
            dtype = np.float32 if fmt.scales == "f32" else np.uint8
            shape = (2, times * rows, columns)
            fields[f"{name}_scales"] = np.full(shape, one[fmt.scales], dtype)
    for name in ("gate_up", "down"):
        if fmt.weight_scales:
            fields[f"{name}_weight_scale"] = np.ones(2, np.float32)
        if fmt.input_scales:
            fields[f"{name}_input_scale"] = np.ones(2, np.float32)
    return ExpertStack(**fields | changes)


@pytest.mark.parametrize("moe", [32, 96, 192])
@pytest.mark.parametrize("format_name", WEIGHT_FORMATS)
def test_every_format_by_hand(format_name, moe):
    made = stack(format_name, 160, moe)
    assert (made.num_experts, made.hidden_size, made.moe_dim) == (2, 160, moe)
    assert made.activation_format == format_name
    assert stack(format_name, 160, moe, input_format="bf16").activation_format == "bf16"


def test_partial_blocks_of_gate_end_before_up():
    """Rows 128..191 of gate are its second block; up's rows that follow are none of it."""
    good = stack("fp8_block", 160, 192)
    codes, scales = good.gate_up.copy(), good.gate_up_scales.copy()
    codes[:, 128:192], scales[:, 1] = 0, 0
    made = dataclasses.replace(good, gate_up=codes, gate_up_scales=scales)
    assert not made.gate_up_scales[:, 1].any()
    codes[1, 191, 159] = 1
    with pytest.raises(ScaleError, match=r"expert 1, gate_up_scales: .*0.0 at \[1, 1\]"):
        dataclasses.replace(good, gate_up=codes, gate_up_scales=scales)


@pytest.mark.parametrize("format_name", WEIGHT_FORMATS)
def test_sizes_that_a_format_cannot_have(format_name):
    multiple = WEIGHT_FORMATS[format_name].multiple
    with pytest.raises(ShapeError, match=f"moe_dim: expected a positive multiple of {multiple}"):
        stack(format_name, 160, 32 + multiple // 2)


def test_shared_experts_have_to_fit(weights):
    with pytest.raises(ShapeError, match="one expert of hidden size 128"):
        dataclasses.replace(weights, shared=stack("bf16", 128, 32))


GATE = np.zeros((8, 16), ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("changes", "error", "arg"),
    [
        ({"weight": GATE.astype(np.float64)}, DTypeError, "weight"),
        ({"weight": GATE[0]}, ShapeError, "weight"),
        ({"weight": [[1.0]]}, ArgTypeError, "weight"),
        ({"bias": np.zeros(7, np.float32)}, ShapeError, "bias"),
        ({"bias": np.full(8, np.nan, np.float32)}, ScaleError, "bias"),
        ({"correction_bias": np.zeros(8, np.float64)}, DTypeError, "correction_bias"),
        ({"correction_bias": np.full(8, np.inf, np.float32)}, ScaleError, "correction_bias"),
        ({"scoring": "tanh"}, ConfigError, "scoring"),
        ({"renormalize": 1}, ArgTypeError, "renormalize"),
        ({"top_k": 0}, RangeError, "top_k"),
        ({"top_k": 9}, RangeError, "top_k"),
        ({"top_k": True}, ArgTypeError, "top_k"),
        ({"top_k": 3, "n_group": 4}, RangeError, "top_k"),
        ({"n_group": 3}, ConfigError, "n_group"),
        ({"n_group": 4, "topk_group": 5}, RangeError, "topk_group"),
        ({"scaling_factor": 0.0}, RangeError, "scaling_factor"),
        ({"scaling_factor": float("nan")}, RangeError, "scaling_factor"),
        ({"scaling_factor": "2"}, ArgTypeError, "scaling_factor"),
    ],
)
def test_bad_router(changes, error, arg):
    with pytest.raises(error, match=rf"^Router\(\): {arg}: "):
        Router(**{"weight": GATE, "top_k": 2} | changes)


def test_good_routers():
    assert Router(weight=GATE, top_k=8).num_experts == 8
    grouped = Router(weight=GATE, top_k=4, n_group=4, topk_group=2, scoring="sigmoid")
    assert (grouped.hidden_size, grouped.scaling_factor) == (16, 1.0)
