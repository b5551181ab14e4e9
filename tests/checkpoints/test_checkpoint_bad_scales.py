"""P10: a scale that cannot be right is an error that names layer, expert and tensor."""

import re

import ml_dtypes
import numpy as np
import pytest

from nbmoe.checkpoints import read_layer
from nbmoe.errors import ScaleError

SECOND_LEVEL = {
    "tiny_modelopt_nvfp4": ("weight_scale_2", "input_scale"),
    "tiny_ct_NVFP4": ("weight_global_scale", "input_global_scale"),
}
CASES = [(name, tensor) for name, tensors in SECOND_LEVEL.items() for tensor in tensors]
BAD_VALUES = {
    "zero": 0.0,
    "negative zero": -0.0,
    "negative": -1.5e-3,
    "denormal": 1e-40,
    "reciprocal denormal": 3e38,
    "infinite": np.inf,
    "NaN": np.nan,
}


def expect_scale_error(folder, layer, expert, projection, tensor):
    with pytest.raises(ScaleError) as caught:
        read_layer(folder, layer)
    text = str(caught.value)
    pattern = rf"^read_layer\(\): layer {layer}, expert {expert}, {projection}, .*{tensor}: "
    assert re.match(pattern, text), text
    assert "expected" in text and "got" in text


@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize(("name", "tensor"), CASES)
def test_missing(editable, name, tensor, projection):
    checkpoint = editable(name)
    del checkpoint.tensors[f"model.layers.1.mlp.experts.2.{projection}.{tensor}"]
    expect_scale_error(checkpoint.write(), 1, 2, projection, tensor)


@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES)
@pytest.mark.parametrize(("name", "tensor"), CASES)
def test_bad_second_level_scale(editable, name, tensor, value):
    checkpoint = editable(name)
    key = f"model.layers.0.mlp.experts.3.down_proj.{tensor}"
    checkpoint.tensors[key] = np.full_like(checkpoint.tensors[key], value)
    expect_scale_error(checkpoint.write(), 0, 3, "down_proj", tensor)


def test_bad_scale_in_another_layer_does_not_matter(editable):
    checkpoint = editable("tiny_ct_NVFP4")
    key = "model.layers.0.mlp.experts.3.down_proj.weight_global_scale"
    checkpoint.tensors[key] = np.zeros(1, np.float32)
    assert read_layer(checkpoint.write(), 1).num_experts == 4


@pytest.mark.parametrize("name", SECOND_LEVEL)
def test_missing_block_scales(editable, name):
    checkpoint = editable(name)
    del checkpoint.tensors["model.layers.0.mlp.experts.1.gate_proj.weight_scale"]
    expect_scale_error(checkpoint.write(), 0, 1, "gate_proj", "weight_scale")


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x80, 0xB8], ids=lambda byte: f"{byte:02X}")
@pytest.mark.parametrize("name", SECOND_LEVEL)
def test_bad_block_scale_byte(editable, name, byte):
    checkpoint = editable(name)
    key = "model.layers.0.mlp.experts.1.up_proj.weight_scale"
    checkpoint.tensors[key].view(np.uint8)[17, 5] = byte
    folder = checkpoint.write()
    expect_scale_error(folder, 0, 1, "up_proj", "weight_scale")
    with pytest.raises(ScaleError, match=f"0x{byte:02X} in row 17, block 5"):
        read_layer(folder)


def test_row_of_zero_block_scales_with_codes(editable):
    checkpoint = editable("tiny_modelopt_nvfp4")
    key = "model.layers.0.mlp.experts.1.down_proj.weight_scale"
    checkpoint.tensors[key].view(np.uint8)[9] = 0
    folder = checkpoint.write()
    expect_scale_error(folder, 0, 1, "down_proj", "weight_scale")
    with pytest.raises(ScaleError, match="row 9"):
        read_layer(folder)


def test_row_of_zeros_is_legal(editable):
    checkpoint = editable("tiny_modelopt_nvfp4")
    prefix = "model.layers.0.mlp.experts.1.down_proj."
    checkpoint.tensors[prefix + "weight_scale"].view(np.uint8)[9] = 0
    checkpoint.tensors[prefix + "weight"][9] = 0x88  # codes of -0
    read = read_layer(checkpoint.write())
    assert not read.down_scales[1, 9].any()


@pytest.mark.parametrize("byte", [0x00, 0x01, 0x7E])
def test_extreme_block_scales_are_legal(editable, byte):
    checkpoint = editable("tiny_ct_NVFP4")
    key = "model.layers.0.mlp.experts.1.up_proj.weight_scale"
    checkpoint.tensors[key].view(np.uint8)[17, 5] = byte
    assert read_layer(checkpoint.write()).gate_up_scales[1, 128 + 17, 5] == byte


# Gate and up with different weight scales: exact or refused.


def with_up_scale(checkpoint, factor, tensor="weight_scale_2"):
    key = f"model.layers.0.mlp.experts.2.up_proj.{tensor}"
    checkpoint.tensors[key] = (checkpoint.tensors[key] * np.float32(factor)).astype(np.float32)
    return checkpoint


def e4m3(scales):
    return scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


@pytest.mark.parametrize("factor", [0.5, 0.25, 2.0])
def test_power_of_two_between_gate_and_up_folds_exactly(editable, factor):
    plain = editable("tiny_modelopt_nvfp4")
    before = read_layer(plain.folder)
    after = read_layer(with_up_scale(plain, factor).write())
    rows = {"gate": (slice(0, 64), 1.0), "up": (slice(64, 128), factor)}
    for rows_slice, expected_factor in rows.values():
        old = e4m3(before.gate_up_scales[2, rows_slice]) * float(before.gate_up_weight_scale[2])
        new = e4m3(after.gate_up_scales[2, rows_slice]) * float(after.gate_up_weight_scale[2])
        assert np.array_equal(new, old * expected_factor)
    others = [0, 1, 3]
    assert np.array_equal(before.gate_up_scales[others], after.gate_up_scales[others])


def test_divisors_fold_too(editable):
    checkpoint = with_up_scale(editable("tiny_ct_NVFP4"), 2.0, "weight_global_scale")
    before = read_layer(checkpoint.folder)
    after = read_layer(checkpoint.write())
    old = e4m3(before.gate_up_scales[2, 128:]) * float(before.gate_up_weight_scale[2])
    new = e4m3(after.gate_up_scales[2, 128:]) * float(after.gate_up_weight_scale[2])
    assert np.array_equal(new, old / 2)


@pytest.mark.parametrize(
    "factor", [1.5, float(np.nextafter(np.float32(1), np.float32(2))), 2.0**-16]
)
def test_inexact_fold_is_refused(editable, factor):
    folder = with_up_scale(editable("tiny_modelopt_nvfp4"), factor).write()
    pattern = r"layer 0, expert 2, weight_scale_2 of gate_proj and up_proj: .*round the weights"
    with pytest.raises(ScaleError, match=pattern):
        read_layer(folder)
