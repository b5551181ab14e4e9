"""What vendors' tools wrote, dequantized, is the bf16 original within the error of its format."""

import ml_dtypes
import numpy as np
import pytest

from nbmoe.checkpoints import read_layer
from tests.checkpoints.dequantize import projections, relative_error

NAMES = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("tiny_ct_NVFP4", 0.09, 0.10),
        ("tiny_ct_FP8_BLOCK", 0.024, 0.028),
        ("tiny_ct_NVFP4_bf16", 0, 0),
    ],
)
def test_compressed_tensors_is_the_bf16_original(fixtures, raw_tensors, name, low, high, layer):
    original = raw_tensors("tiny_ct_NVFP4_bf16")
    read = read_layer(fixtures / name, layer)
    for projection, values in projections(read).items():
        for expert in range(4):
            key = f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"
            error = relative_error(values[expert], original[key].astype(np.float64))
            assert low <= error <= high, key
    gate = original[f"model.layers.{layer}.mlp.gate.weight"]
    assert read.router.weight.dtype == ml_dtypes.bfloat16
    assert read.router.weight.tobytes() == gate.tobytes()


def test_global_scales_read_without_inverting_would_be_absurd(fixtures, raw_tensors):
    original = raw_tensors("tiny_ct_NVFP4_bf16")
    read = read_layer(fixtures / "tiny_ct_NVFP4", 0)
    inverted = projections(read)["gate_proj"] / read.gate_up_weight_scale[:, None, None] ** 2
    expected = original["model.layers.0.mlp.experts.0.gate_proj.weight"].astype(np.float64)
    assert relative_error(inverted[0], expected) > 1e8


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("tiny_modelopt_nvfp4", 0.094, 0.103), ("tiny_mo_MXFP4_DEFAULT_CFG", 0.105, 0.128)],
)
def test_modelopt_exports_are_of_one_model(fixtures, name, low, high, layer):
    """MXFP8 is within 0.026 of the common original, so it stands in for it: errors add squared."""
    close = projections(read_layer(fixtures / "tiny_mo_MXFP8_DEFAULT_CFG", layer))
    found = projections(read_layer(fixtures / name, layer))
    for projection in NAMES:
        for expert in range(4):
            error = relative_error(found[projection][expert], close[projection][expert])
            assert low < error < high, (projection, expert)
    assert relative_error(found["gate_proj"], close["up_proj"]) > 1


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    "name", ["tiny_modelopt_nvfp4", "tiny_mo_MXFP4_DEFAULT_CFG", "tiny_mo_MXFP8_DEFAULT_CFG"]
)
def test_modelopt_has_the_distribution_it_was_made_from(fixtures, name, layer):
    # The exporter ran on transformers' default initialization: normal, deviation 0.02.
    for values in projections(read_layer(fixtures / name, layer)).values():
        assert values.std() == pytest.approx(0.02, rel=0.03)
        assert abs(values.mean()) < 1e-3


@pytest.mark.parametrize("layer", [0, 1])
def test_modelopt_scales_are_the_files(fixtures, raw_tensors, layer):
    raw = raw_tensors("tiny_modelopt_nvfp4")
    read = read_layer(fixtures / "tiny_modelopt_nvfp4", layer)
    prefix = f"model.layers.{layer}.mlp.experts."
    for expert in range(4):
        gate, down = f"{prefix}{expert}.gate_proj.", f"{prefix}{expert}.down_proj."
        assert read.gate_up_weight_scale[expert] == raw[gate + "weight_scale_2"]
        assert read.gate_up_input_scale[expert] == raw[gate + "input_scale"]
        assert read.down_weight_scale[expert] == raw[down + "weight_scale_2"]
        assert read.down_input_scale[expert] == raw[down + "input_scale"]
        assert read.gate_up_scales[expert, :64].tobytes() == raw[gate + "weight_scale"].tobytes()
        assert read.down[expert].tobytes() == raw[down + "weight"].tobytes()


def test_compressed_tensors_scales_are_reciprocals(fixtures, raw_tensors):
    raw = raw_tensors("tiny_ct_NVFP4")
    read = read_layer(fixtures / "tiny_ct_NVFP4", 1)
    for expert in range(4):
        prefix = f"model.layers.1.mlp.experts.{expert}.down_proj."
        weight_divisor = raw[prefix + "weight_global_scale"][0]
        input_divisor = raw[prefix + "input_global_scale"][0]
        assert read.down_weight_scale[expert] * weight_divisor == pytest.approx(1, abs=1e-6)
        assert read.down_input_scale[expert] * input_divisor == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "format_name", "moe_dim"),
    [
        ("tiny_modelopt_nvfp4", "nvfp4", 64),
        ("tiny_mo_MXFP4_DEFAULT_CFG", "mxfp4", 64),
        ("tiny_mo_MXFP8_DEFAULT_CFG", "mxfp8", 64),
        ("tiny_ct_NVFP4", "nvfp4", 128),
        ("tiny_ct_FP8_BLOCK", "fp8_block", 128),
        ("tiny_ct_NVFP4_bf16", "bf16", 128),
    ],
)
def test_sizes_formats_and_router_rule(fixtures, name, format_name, moe_dim):
    read = read_layer(fixtures / name)
    assert (read.format, read.activation_format) == (format_name, format_name)
    assert (read.num_experts, read.hidden_size, read.moe_dim) == (4, 128, moe_dim)
    assert (read.top_k, read.renormalize, read.router.scoring) == (2, True, "softmax")
    assert (read.shared, read.router.bias, read.gate_up_bias) == (None, None, None)
    assert name in read.source and "layer 0" in read.source


def test_every_fixture_is_read(fixtures):
    names = {folder.name for folder in fixtures.iterdir() if folder.is_dir()}
    assert {read_layer(fixtures / name).source.split(",")[0] for name in names} == names
