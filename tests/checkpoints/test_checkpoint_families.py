"""Every family: the numbers are the model's, the rules are config.json's, wrong readings differ."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from nbmoe.activation import GatedActivation
from nbmoe.checkpoints import ExpertWeights, read_layer
from nbmoe.errors import ConfigError, ScaleError, ShapeError, UnsupportedError
from tests.checkpoints.dequantize import e4m3, nibbles, projections, relative_error
from tests.checkpoints.synthetic import EXPERTS, HIDDEN, PREFIX, Synthetic, families

FAMILIES = families()
ERRORS = {"nvfp4": (0.09, 0.10), "mxfp4": (0.10, 0.125), "mxfp8": (0.02, 0.03), "fp8": (0.02, 0.03)}
"""Relative L2 errors that the formats cost."""


def bounds(format_name: str) -> tuple[float, float]:
    return ERRORS[format_name.partition("_")[0]]


@pytest.fixture(params=FAMILIES)
def made(request: pytest.FixtureRequest) -> Synthetic:
    return FAMILIES[request.param]


def read(made: Synthetic, folder, **tensors: np.ndarray) -> ExpertWeights:
    """Reads a checkpoint with some tensors replaced; None leaves one out."""
    changed = {k: v for k, v in (made.tensors | tensors).items() if v is not None}
    return read_layer(dataclasses.replace(made, tensors=changed).write(folder / "checkpoint"))


def test_numbers_are_the_models(made, tmp_path):
    weights = read(made, tmp_path)
    assert (weights.format, weights.activation_format) == (made.format, made.input_format)
    low, high = bounds(made.format)
    found = projections(weights)
    assert len(found) == 3
    for name, values in found.items():
        for e in range(EXPERTS):
            assert low < relative_error(values[e], made.original[name][e]) < high, (name, e)
    assert weights.source == "checkpoint, layer 1"
    assert (weights.num_experts, weights.hidden_size, weights.top_k) == (EXPERTS, HIDDEN, 2)


def test_shared_experts(made, tmp_path):
    weights = read(made, tmp_path)
    assert (weights.shared is None) == (not made.shared)
    for name, values in (projections(weights.shared) if weights.shared else {}).items():
        low, high = bounds(made.format)
        assert low < relative_error(values, made.shared[name]) < high, name


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt_oss"])
def test_bytes_are_the_files(family, tmp_path):
    made = FAMILIES[family]
    weights = read(made, tmp_path)
    suffix = "weight_packed" if f"{PREFIX}experts.0.up_proj.weight_packed" in made.tensors else ""
    for e in range(EXPERTS):
        stored = {
            name: made.tensors[f"{PREFIX}experts.{e}.{name}_proj.{suffix or 'weight'}"]
            for name in ("gate", "up", "down")
        }
        gate_up = stored["gate"].tobytes() + stored["up"].tobytes()
        assert weights.gate_up[e].tobytes() == gate_up
        assert weights.down[e].tobytes() == stored["down"].tobytes()


# Wrong readings are not within the bounds, so the test above would see them.


def test_swapped_gate_and_up_would_be_seen(made, tmp_path):
    found = projections(read(made, tmp_path))
    assert relative_error(found["up_proj"], made.original["gate_proj"]) > 1


def test_inverted_scales_would_be_seen(made, tmp_path):
    weights = read(made, tmp_path)
    if weights.format.startswith("mx"):
        inverse = (254 - weights.down_scales.astype(np.int64)).astype(np.uint8)
    else:
        inverse = (1 / weights.down_scales).astype(np.float32)
    wrong = projections(dataclasses.replace(weights, down_scales=inverse))["down_proj"]
    assert relative_error(wrong, made.original["down_proj"]) > 10


def test_nibble_order_would_be_seen(tmp_path):
    weights = read(FAMILIES["ct_mxfp4"], tmp_path)
    original = FAMILIES["ct_mxfp4"].original["down_proj"]
    scales = np.repeat(np.exp2(weights.down_scales.astype(np.float64) - 127), 32, axis=-1)
    low, high = ERRORS["mxfp4"]
    assert low < relative_error(nibbles(weights.down) * scales, original) < high
    assert relative_error(nibbles(weights.down, high_first=True) * scales, original) > 1


def test_cast_e8m0_would_be_seen(tmp_path):
    """Byte 120 is 2^-7, not 120."""
    made = FAMILIES["ct_mxfp8"]
    weights = read(made, tmp_path)
    cast = np.repeat(weights.down_scales.astype(np.float64), 32, axis=-1)
    assert relative_error(e4m3(weights.down) * cast, made.original["down_proj"]) > 10


def test_e8m0_type_is_viewed(tmp_path):
    made = FAMILIES["ct_mxfp8"]
    plain = read(made, tmp_path)
    typed = {
        name: data.view(ml_dtypes.float8_e8m0fnu)
        for name, data in made.tensors.items()
        if name.endswith("weight_scale")
    }
    assert read(made, tmp_path, **typed).down_scales.tobytes() == plain.down_scales.tobytes()


# Rules


def test_deepseek_router(tmp_path):
    made = FAMILIES["deepseek_v3"]
    router = read(made, tmp_path).router
    assert (router.scoring, router.renormalize, router.top_k) == ("sigmoid", True, 2)
    assert (router.n_group, router.topk_group, router.scaling_factor) == (2, 1, 2.5)
    assert router.bias is None
    expected = made.tensors[f"{PREFIX}gate.e_score_correction_bias"]
    assert router.correction_bias.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("scoring_func", "softmax", UnsupportedError),
        ("topk_method", "group_limited_greedy", UnsupportedError),
        ("n_group", None, ConfigError),
        ("n_group", 3, ConfigError),
        ("topk_group", 0, ConfigError),
        ("routed_scaling_factor", "2.5", ConfigError),
        ("routed_scaling_factor", 0, ConfigError),
        ("n_shared_experts", 1.5, ConfigError),
        ("norm_topk_prob", None, ConfigError),
        ("swiglu_limit", 10, UnsupportedError),
    ],
)
def test_deepseek_rules_that_are_not_known(tmp_path, key, value, error):
    made = FAMILIES["deepseek_v3"]
    changed = dataclasses.replace(made, config=made.config | {key: value})
    with pytest.raises(error, match=key):
        read(changed, tmp_path)


def test_deepseek_without_shared_experts(tmp_path):
    made = FAMILIES["kimi_k2"]
    config = made.config | {"n_shared_experts": None}
    changed = dataclasses.replace(made, config=config)
    with pytest.raises(UnsupportedError, match="shared_experts"):
        read(changed, tmp_path)
    left = {name: None for name in made.tensors if "shared_experts" in name}
    assert read(changed, tmp_path / "other", **left).shared is None


def test_shared_experts_that_were_not_quantized(tmp_path):
    made = FAMILIES["kimi_k2"]
    plain = {name: None for name in made.tensors if "shared_experts" in name}
    for name, stack in made.shared.items():
        key = f"{PREFIX}shared_experts.{name}.weight"
        plain[key] = stack[0].astype(ml_dtypes.bfloat16)
    weights = read(made, tmp_path, **plain)
    assert (weights.format, weights.shared.format) == ("fp8_block", "bf16")
    found = projections(weights.shared)["gate_proj"]
    assert np.array_equal(found, made.shared["gate_proj"].astype(np.float64))


def test_missing_correction_bias(tmp_path):
    key = f"{PREFIX}gate.e_score_correction_bias"
    with pytest.raises(ConfigError, match=r"layer 1, router, .*e_score_correction_bias"):
        read(FAMILIES["deepseek_v3"], tmp_path, **{key: None})


def test_gpt_oss_rules(tmp_path):
    made = FAMILIES["gpt_oss"]
    weights = read(made, tmp_path)
    assert weights.activation == GatedActivation("swigluoai", alpha=1.702, limit=7.0)
    router = weights.router
    assert (router.scoring, router.top_k) == ("softmax_after_topk", 2)
    assert router.bias.tobytes() == made.tensors[f"{PREFIX}router.bias"].tobytes()


def test_gpt_oss_rows(tmp_path):
    """Rows, scales and biases g0, u0, g1, u1, … become g0, g1, …, u0, u1, …"""
    made = FAMILIES["gpt_oss"]
    weights = read(made, tmp_path)
    start = f"{PREFIX}experts.gate_up_proj_"
    blocks = made.tensors[start + "blocks"].reshape(EXPERTS, 128, -1)
    for stored, found in (
        (blocks, weights.gate_up),
        (made.tensors[start + "scales"], weights.gate_up_scales),
        (made.tensors[start + "bias"], weights.gate_up_bias),
    ):
        assert np.array_equal(found[:, :64], stored[:, 0::2])
        assert np.array_equal(found[:, 64:], stored[:, 1::2])
    assert np.array_equal(weights.down_bias, made.tensors[f"{PREFIX}experts.down_proj_bias"])


@pytest.mark.parametrize(
    ("tensor", "replacement", "error"),
    [
        ("gate_up_proj_scales", None, ScaleError),
        ("gate_up_proj_blocks", None, ConfigError),
        ("down_proj_bias", None, ConfigError),
        ("down_proj_bias", np.full((EXPERTS, HIDDEN), np.nan, ml_dtypes.bfloat16), ScaleError),
        ("gate_up_proj_blocks", np.zeros((EXPERTS, 128, HIDDEN // 2), np.uint8), ShapeError),
    ],
)
def test_gpt_oss_broken(tmp_path, tensor, replacement, error):
    with pytest.raises(error, match=r"layer 1.*" + tensor.removesuffix("_bias")[:4]):
        read(FAMILIES["gpt_oss"], tmp_path, **{f"{PREFIX}experts.{tensor}": replacement})


def test_gpt_oss_nan_scale_names_the_expert(tmp_path):
    key = f"{PREFIX}experts.down_proj_scales"
    scales = FAMILIES["gpt_oss"].tensors[key].copy()
    scales[2, 5, 1] = 0xFF
    pattern = r"layer 1, expert 2, down_proj, .*down_proj_scales: .*0xFF in row 5, block 1"
    with pytest.raises(ScaleError, match=pattern):
        read(FAMILIES["gpt_oss"], tmp_path, **{key: scales})


def test_gpt_oss_format_in_another_model(tmp_path):
    made = FAMILIES["ct_mxfp4"]
    config = made.config | {"quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(UnsupportedError, match="gpt-oss MXFP4 in a qwen3_moe model"):
        read(dataclasses.replace(made, config=config), tmp_path)


# Scales


def test_partial_blocks(tmp_path):
    """D = 192 is one and a half blocks, for gate and up each."""
    weights = read(FAMILIES["deepseek_v3"], tmp_path)
    assert weights.moe_dim == 192
    assert weights.gate_up_scales.shape == (EXPERTS, 4, 1)
    assert weights.down_scales.shape == (EXPERTS, 1, 2)
    for e in range(EXPERTS):
        for i, name in enumerate(("gate_proj", "up_proj")):
            stored = FAMILIES["deepseek_v3"].tensors[f"{PREFIX}experts.{e}.{name}.weight_scale_inv"]
            assert np.array_equal(weights.gate_up_scales[e, 2 * i : 2 * i + 2], stored)


@pytest.mark.parametrize("bad", [0.0, -1.0, 1e-40, np.inf, np.nan])
@pytest.mark.parametrize("family", ["qwen3_fp8", "ct_fp8_channel", "modelopt_fp8"])
def test_bad_float_scale(tmp_path, family, bad):
    made = FAMILIES[family]
    (key,) = (k for k in made.tensors if "experts.2.up_proj.weight_scale" in k)
    scales = made.tensors[key].copy()
    scales.reshape(-1)[-1] = bad
    with pytest.raises(ScaleError, match=r"layer 1, expert 2, up_proj, .*weight_scale"):
        read(made, tmp_path, **{key: scales})


def test_scale_of_an_expert_that_never_trained(tmp_path):
    """1e-23 is tiny but a number: no NaN comes of it."""
    key = f"{PREFIX}experts.2.up_proj.weight_scale_inv"
    weights = read(FAMILIES["deepseek_v3"], tmp_path, **{key: np.full((2, 1), 1e-23, np.float32)})
    assert np.isfinite(projections(weights)["up_proj"]).all()


def test_zero_scale_of_zero_codes_is_legal(tmp_path):
    made, start = FAMILIES["qwen3_fp8"], f"{PREFIX}experts.1.down_proj."
    zero = np.zeros((HIDDEN, 64), np.uint8)
    zero[::2] = 0x80  # -0
    scales = np.zeros((1, 1), ml_dtypes.bfloat16)
    codes = zero.view(ml_dtypes.float8_e4m3fn)
    weights = read(made, tmp_path, **{start + "weight": codes, start + "weight_scale_inv": scales})
    assert not projections(weights)["down_proj"][1].any()


def test_zero_scale_of_one_block_of_zeros_is_legal(tmp_path):
    """The second block of up's rows is the partial one, 128..191."""
    made, start = FAMILIES["deepseek_v3"], f"{PREFIX}experts.1.up_proj."
    codes, scales = made.tensors[start + "weight"].copy(), np.ones((2, 1), np.float32)
    codes[128:] = 0
    scales[1] = 0
    tensors = {start + "weight": codes, start + "weight_scale_inv": scales}
    assert read(made, tmp_path, **tensors).gate_up_scales[1, 3, 0] == 0
    codes[191, 5] = 1
    with pytest.raises(ScaleError, match=r"expert 1, up_proj, .*0.0 at \[1, 0\]"):
        read(made, tmp_path, **tensors)


def test_negative_scale_of_zero_codes_is_still_broken(tmp_path):
    made, start = FAMILIES["qwen3_fp8"], f"{PREFIX}experts.1.down_proj."
    codes = np.zeros((HIDDEN, 64), ml_dtypes.float8_e4m3fn)
    scales = np.full((1, 1), -1, ml_dtypes.bfloat16)
    with pytest.raises(ScaleError, match=r"expert 1, down_proj, .*-1.0 at \[0, 0\]"):
        read(made, tmp_path, **{start + "weight": codes, start + "weight_scale_inv": scales})


@pytest.mark.parametrize("suffix", ["weight_scale", "input_scale"])
def test_a_tensor_has_one_scale(tmp_path, suffix):
    key = f"{PREFIX}experts.1.down_proj.{suffix}"
    with pytest.raises(ShapeError, match=rf"{suffix}: expected one element, got \(2,\)"):
        read(FAMILIES["modelopt_fp8"], tmp_path, **{key: np.ones(2, np.float32)})


def test_smallest_codes_count_as_codes(tmp_path):
    """e4m3 code 8 is 2^-6, though 8 is the sign of a packed code."""
    made, start = FAMILIES["ct_mxfp8"], f"{PREFIX}experts.1.down_proj."
    codes = made.tensors[start + "weight"].view(np.uint8).copy()
    scales = made.tensors[start + "weight_scale"].copy()
    codes[9], scales[9] = 0x80, 0
    typed = codes.view(ml_dtypes.float8_e4m3fn)
    tensors = {start + "weight": typed, start + "weight_scale": scales}
    assert not read(made, tmp_path, **tensors).down_scales[1, 9].any()
    codes[9, 3] = 0x08
    with pytest.raises(ScaleError, match="only zeros in row 9"):
        read(made, tmp_path, **tensors)


@pytest.mark.parametrize("family", ["ct_mxfp4", "ct_mxfp8"])
def test_bad_e8m0(tmp_path, family):
    made, key = FAMILIES[family], f"{PREFIX}experts.3.gate_proj.weight_scale"
    scales = made.tensors[key].copy()
    scales[7, 2] = 0xFF
    with pytest.raises(ScaleError, match=r"layer 1, expert 3, gate_proj, .*0xFF in row 7, block 2"):
        read(made, tmp_path, **{key: scales})
    with pytest.raises(ScaleError, match="only zeros in row 0"):
        read(made, tmp_path, **{key: np.zeros_like(scales)})
    scales[7, 2] = 0  # 2^-127 in one block of a row is a number like others
    assert read(made, tmp_path, **{key: scales}).gate_up_scales[3, 7, 2] == 0


def test_missing_scale_is_an_error_in_every_family(made, tmp_path):
    scales = [n for n in made.tensors if "_scale" in n.rpartition(".")[2] and "experts" in n]
    for name in {name.rpartition(".")[2]: name for name in scales}.values():
        with pytest.raises(ScaleError, match="got nothing"):
            read(made, tmp_path, **{name: None})


def test_static_input_scale_serves_gate_and_up(tmp_path):
    """Quantized once for both, with the larger scale: neither saturates."""
    made = FAMILIES["modelopt_fp8"]
    key = f"{PREFIX}experts.1.up_proj.input_scale"
    weights = read(made, tmp_path, **{key: np.float32(0.5).reshape(())})
    assert weights.gate_up_input_scale.tolist() == [np.float32(0.01), 0.5] + [np.float32(0.01)] * 2
    key = f"{PREFIX}experts.1.down_proj.input_scale"
    with pytest.raises(ScaleError, match=r"expert 1, down_proj, .*input_scale"):
        read(made, tmp_path, **{key: np.float32(0).reshape(())})


def test_gate_and_up_keep_their_own_tensor_scales(tmp_path):
    weights = read(FAMILIES["modelopt_fp8"], tmp_path)
    for e in range(EXPERTS):
        for i, name in enumerate(("gate_proj", "up_proj")):
            stored = FAMILIES["modelopt_fp8"].tensors[f"{PREFIX}experts.{e}.{name}.weight_scale"]
            assert (weights.gate_up_scales[e, 64 * i : 64 * (i + 1)] == stored).all()


# Other tensors


def test_wrong_number_of_blocks(tmp_path):
    """192 rows are two blocks: a floor instead of a ceiling is refused."""
    key = f"{PREFIX}experts.0.up_proj.weight_scale_inv"
    with pytest.raises(ShapeError, match=r"expected \(2, 1\), got \(1, 1\)"):
        read(FAMILIES["deepseek_v3"], tmp_path, **{key: np.ones((1, 1), np.float32)})


def test_a_bias_in_an_expert_is_refused(tmp_path):
    key = f"{PREFIX}experts.0.up_proj.bias"
    with pytest.raises(UnsupportedError, match=r"experts\.0\.up_proj\.bias"):
        read(FAMILIES["ct_mxfp8"], tmp_path, **{key: np.zeros(64, ml_dtypes.bfloat16)})


@pytest.mark.parametrize(
    ("family", "change", "found"),
    [
        ("qwen3_fp8", {"weight_block_size": [64, 64]}, "64, 64"),
        ("qwen3_fp8", {"weight_block_size": None}, "None"),
        ("qwen3_fp8", {"activation_scheme": "static"}, "static"),
        ("qwen3_fp8", {"fmt": "e5m2"}, "e5m2"),
        ("modelopt_fp8", {"quant_algo": "FP8_PB_WO"}, "FP8_PB_WO"),
        ("ct_mxfp4", {"config_groups": {"a": {"format": "int-quantized"}}}, "int-quantized"),
    ],
)
def test_unknown_variants_say_what_was_found(tmp_path, family, change, found):
    made = FAMILIES[family]
    quantization = made.config["quantization_config"] | change
    config = made.config | {"quantization_config": quantization}
    with pytest.raises(UnsupportedError) as caught:
        read(dataclasses.replace(made, config=config), tmp_path)
    assert found in str(caught.value).split(", got ", 1)[1]


@pytest.mark.parametrize(
    ("family", "part", "change"),
    [
        ("ct_fp8_channel", "input_activations", {"strategy": "tensor"}),
        ("ct_fp8_channel", "weights", {"num_bits": 4}),
        ("ct_mxfp4", "weights", {"group_size": 64}),
        ("ct_mxfp8", "input_activations", {"num_bits": 4}),
    ],
)
def test_unknown_groups(tmp_path, family, part, change):
    made = FAMILIES[family]
    quantization = made.config["quantization_config"]
    group = dict(quantization["config_groups"]["group_0"])
    group[part] = group[part] | change
    config = made.config | {
        "quantization_config": quantization | {"config_groups": {"group_0": group}}
    }
    with pytest.raises(UnsupportedError):
        read(dataclasses.replace(made, config=config), tmp_path)


def test_groups_that_differ_are_refused(tmp_path):
    made, other = FAMILIES["ct_mxfp4"], FAMILIES["ct_mxfp8"]
    groups = {
        str(i): m.config["quantization_config"]["config_groups"]["group_0"]
        for i, m in enumerate((made, other))
    }
    quantization = made.config["quantization_config"] | {"config_groups": groups}
    config = made.config | {"quantization_config": quantization}
    with pytest.raises(UnsupportedError, match="MXFP4 and compressed-tensors MXFP8"):
        read(dataclasses.replace(made, config=config), tmp_path)
