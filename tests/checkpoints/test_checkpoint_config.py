"""Which checkpoints are accepted, and what is said about the others."""

import json

import ml_dtypes
import numpy as np
import pytest

from nbmoe.checkpoints import read_layer
from nbmoe.errors import ConfigError, DTypeError, RangeError, ShapeError, UnsupportedError


def set_config(checkpoint, path, value):
    """Sets `a.b.c` in the configuration; value None deletes the key."""
    *parents, key = path.split(".")
    target = checkpoint.config
    for parent in parents:
        target = target[parent]
    if value is None:
        del target[key]
    else:
        target[key] = value
    return checkpoint.write()


def test_no_quantization_config_is_bf16(editable):
    checkpoint = editable("tiny_ct_NVFP4_bf16")
    weights = read_layer(checkpoint.folder)
    assert (weights.format, weights.gate_up_scales) == ("bf16", None)
    key = "model.layers.0.mlp.experts.3.up_proj.weight"
    checkpoint.tensors[key] = checkpoint.tensors[key].astype(np.float32)
    with pytest.raises(DTypeError, match=r"expert 3, up_proj, .*expected BF16, got F32"):
        read_layer(checkpoint.write())


def test_experts_that_were_not_quantized_stay_bf16(editable, fixtures):
    """A quantized model whose exporter was told to ignore this layer."""
    checkpoint, original = editable("tiny_modelopt_nvfp4"), editable("tiny_ct_NVFP4_bf16")
    checkpoint.config["moe_intermediate_size"] = 128
    checkpoint.tensors = original.tensors
    assert read_layer(checkpoint.write(), 1).format == "bf16"


@pytest.mark.parametrize(
    ("name", "path", "value", "found"),
    [
        ("tiny_modelopt_nvfp4", "quantization_config.quant_algo", "W4A8_AWQ", "'W4A8_AWQ'"),
        ("tiny_modelopt_nvfp4", "quantization_config.quant_method", "awq", "'awq'"),
        ("tiny_modelopt_nvfp4", "quantization_config.group_size", 32, "32"),
        ("tiny_modelopt_nvfp4", "model_type", "qwen2_moe", "qwen2_moe"),
        ("tiny_modelopt_nvfp4", "hidden_act", "gelu", "gelu"),
        (
            "tiny_ct_NVFP4",
            "quantization_config.config_groups.group_0.format",
            "int-quantized",
            "'int-quantized'",
        ),
        (
            "tiny_ct_NVFP4",
            "quantization_config.config_groups.group_0.weights.group_size",
            32,
            "32",
        ),
        (
            "tiny_ct_NVFP4",
            "quantization_config.config_groups.group_0.input_activations",
            None,
            "NVFP4A16",
        ),
        ("tiny_ct_NVFP4", "quantization_config.config_groups", {}, "no config_groups"),
    ],
)
def test_unsupported_says_what_was_found(editable, name, path, value, found):
    folder = set_config(editable(name), path, value)
    with pytest.raises(UnsupportedError) as caught:
        read_layer(folder)
    assert found in str(caught.value).split(", got ", 1)[1]


def test_unsupported_lists_what_is_supported(editable):
    folder = set_config(editable("tiny_ct_NVFP4"), "quantization_config.quant_method", "quark")
    with pytest.raises(UnsupportedError, match=r"modelopt NVFP4.*compressed-tensors NVFP4"):
        read_layer(folder)


def test_format_of_the_whole_config_serves_groups_without_one(editable):
    checkpoint = editable("tiny_ct_NVFP4")
    path = "quantization_config.config_groups.group_0.format"
    assert read_layer(set_config(checkpoint, path, None)).num_experts == 4


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_old_modelopt_export_of_mx(editable, name):
    checkpoint = editable(f"tiny_mo_{name.upper()}_DEFAULT_CFG")
    assert read_layer(set_config(checkpoint, "quantization_config", None)).format == name


def test_old_modelopt_export_with_hf_quant_config_only(editable):
    checkpoint = editable("tiny_modelopt_nvfp4")
    assert read_layer(set_config(checkpoint, "quantization_config", None)).num_experts == 4
    path = checkpoint.folder / "hf_quant_config.json"
    old = json.loads(path.read_text())
    old["quantization"]["quant_algo"] = "INT4_AWQ"
    path.write_text(json.dumps(old))
    with pytest.raises(UnsupportedError, match="'INT4_AWQ'"):
        read_layer(checkpoint.folder)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("num_experts_per_tok", 5),
        ("num_experts_per_tok", 0),
        ("num_experts_per_tok", None),
        ("num_local_experts", None),
        ("norm_topk_prob", None),
        ("hidden_size", "128"),
        ("moe_intermediate_size", True),
    ],
)
def test_config_values(editable, path, value):
    folder = set_config(editable("tiny_ct_NVFP4"), path, value)
    with pytest.raises(ConfigError, match="num_local_experts" if "local" in path else path):
        read_layer(folder)


@pytest.mark.parametrize(("count", "text"), [(3, "also \\[3\\]"), (6, "missing \\[4, 5\\]")])
def test_number_of_experts(editable, count, text):
    folder = set_config(editable("tiny_ct_NVFP4"), "num_local_experts", count)
    with pytest.raises(ConfigError, match=text):
        read_layer(folder)


def test_renormalize_is_the_configs(editable):
    folder = set_config(editable("tiny_ct_NVFP4"), "norm_topk_prob", False)
    assert read_layer(folder).renormalize is False


def test_layer_that_does_not_exist(fixtures):
    with pytest.raises(RangeError, match=r"MoE layers 0, 1, got 2"):
        read_layer(fixtures / "tiny_ct_NVFP4", 2)


def test_default_is_the_first_moe_layer(editable):
    checkpoint = editable("tiny_ct_NVFP4")
    dense = [name for name in checkpoint.tensors if ".layers.0.mlp.experts." in name]
    for name in dense:
        del checkpoint.tensors[name]
    folder = checkpoint.write()
    assert read_layer(folder).source.endswith("layer 1")
    with pytest.raises(RangeError, match=r"MoE layers 1, got 0"):
        read_layer(folder, 0)


def test_no_moe_layer(editable):
    checkpoint = editable("tiny_ct_NVFP4")
    checkpoint.rename(".mlp.experts.", ".mlp.fused.")
    with pytest.raises(ConfigError, match=r"tensors named model\.layers\.0\.mlp\.experts\."):
        read_layer(checkpoint.write())


@pytest.mark.parametrize(
    "extra",
    ["mlp.shared_expert.gate_proj.weight", "mlp.gate.e_score_correction_bias", "mlp.gate.bias"],
)
def test_parts_that_would_be_left_out_are_refused(editable, extra):
    checkpoint = editable("tiny_ct_NVFP4")
    checkpoint.tensors[f"model.layers.0.{extra}"] = np.zeros(4, np.float32)
    with pytest.raises(UnsupportedError, match=extra):
        read_layer(checkpoint.write())


def test_mixtral_names_and_rule(editable, fixtures):
    checkpoint = editable("tiny_ct_NVFP4")
    checkpoint.rename(".mlp.", ".block_sparse_moe.")
    for old, new in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        checkpoint.rename(f".{old}.", f".{new}.")
    checkpoint.config["model_type"] = "mixtral"
    checkpoint.config["intermediate_size"] = checkpoint.config.pop("moe_intermediate_size")
    del checkpoint.config["norm_topk_prob"]
    mixtral = read_layer(checkpoint.write())
    qwen = read_layer(fixtures / "tiny_ct_NVFP4")
    assert mixtral.renormalize is True
    assert np.array_equal(mixtral.gate_up, qwen.gate_up)
    assert np.array_equal(mixtral.down_scales, qwen.down_scales)


# Tensors of the wrong kind.


@pytest.mark.parametrize(
    ("tensor", "replacement", "error"),
    [
        ("down_proj.weight_packed", np.zeros((128, 128), ml_dtypes.bfloat16), DTypeError),
        ("down_proj.weight_packed", np.zeros((128, 32), np.uint8), ShapeError),
        ("down_proj.weight_scale", np.ones((128, 8), np.float32), DTypeError),
        ("down_proj.weight_scale", np.ones((8, 128), ml_dtypes.float8_e4m3fn), ShapeError),
        ("down_proj.weight_scale", np.ones((128, 8), np.uint8), DTypeError),
        ("down_proj.weight_global_scale", np.ones(1, ml_dtypes.bfloat16), DTypeError),
        ("down_proj.weight_global_scale", np.ones(2, np.float32), ShapeError),
        ("down_proj.weight_global_scale", np.ones(1, np.float64), DTypeError),
    ],
)
def test_wrong_tensor(editable, tensor, replacement, error):
    checkpoint = editable("tiny_ct_NVFP4")
    checkpoint.tensors[f"model.layers.0.mlp.experts.1.{tensor}"] = replacement
    with pytest.raises(error, match=tensor):
        read_layer(checkpoint.write())


def test_missing_codes(editable):
    checkpoint = editable("tiny_ct_NVFP4")
    del checkpoint.tensors["model.layers.0.mlp.experts.1.up_proj.weight_packed"]
    pattern = r"layer 0, expert 1, up_proj, .*weight_packed"
    with pytest.raises(ConfigError, match=pattern):
        read_layer(checkpoint.write())


def test_missing_router(editable):
    checkpoint = editable("tiny_ct_NVFP4")
    del checkpoint.tensors["model.layers.0.mlp.gate.weight"]
    with pytest.raises(ConfigError, match=r"layer 0, router, .*gate\.weight"):
        read_layer(checkpoint.write())


@pytest.mark.parametrize(("key", "size"), [("hidden_size", 120), ("moe_intermediate_size", 72)])
def test_size_that_blocks_do_not_divide(editable, key, size):
    folder = set_config(editable("tiny_ct_NVFP4"), key, size)
    with pytest.raises(ShapeError, match=r"a multiple of 16, as nvfp4 demands, got \d+"):
        read_layer(folder)
