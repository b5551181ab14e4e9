"""What the readers return is the model: dequantized, it is the bf16 original within NVFP4's error.

The decode tables here are ml_dtypes', not the project's.
"""

import ml_dtypes
import numpy as np
import pytest

from nbmoe.checkpoints import ExpertWeights, read_layer


def dequantize(codes: np.ndarray, block_scales: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """f64 [E, N, K] of codes [E, N, K/2], block scales [E, N, K/16] and scales [E]."""
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    elements = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    blocks = block_scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return elements * np.repeat(blocks, 16, axis=-1) * scale.astype(np.float64)[:, None, None]


def projections(weights: ExpertWeights, invert: bool = False) -> dict[str, np.ndarray]:
    power = -1 if invert else 1
    gate_up = dequantize(
        weights.gate_up, weights.gate_up_scales, weights.gate_up_weight_scale**power
    )
    down = dequantize(weights.down, weights.down_scales, weights.down_weight_scale**power)
    moe = weights.moe_dim
    return {"gate_proj": gate_up[:, :moe], "up_proj": gate_up[:, moe:], "down_proj": down}


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("layer", [0, 1])
def test_compressed_tensors_is_the_bf16_original(fixtures, raw_tensors, layer):
    original = raw_tensors("tiny_ct_NVFP4_bf16")
    read = read_layer(fixtures / "tiny_ct_NVFP4", layer)
    for name, values in projections(read).items():
        for expert in range(4):
            key = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
            error = relative_error(values[expert], original[key].astype(np.float64))
            assert 0.09 < error < 0.10, key
    gate = original[f"model.layers.{layer}.mlp.gate.weight"]
    assert read.router.dtype == ml_dtypes.bfloat16
    assert read.router.tobytes() == gate.tobytes()


def test_global_scales_read_without_inverting_would_be_absurd(fixtures, raw_tensors):
    original = raw_tensors("tiny_ct_NVFP4_bf16")
    values = projections(read_layer(fixtures / "tiny_ct_NVFP4", 0), invert=True)
    key = "model.layers.0.mlp.experts.0.gate_proj.weight"
    expected = original[key].astype(np.float64)
    assert relative_error(values["gate_proj"][0], expected) > 1e8


@pytest.mark.parametrize("layer", [0, 1])
def test_modelopt_has_the_distribution_it_was_made_from(fixtures, layer):
    # The exporter ran on transformers' default initialization: normal, deviation 0.02.
    for values in projections(read_layer(fixtures / "tiny_modelopt_nvfp4", layer)).values():
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


@pytest.mark.parametrize(("name", "moe_dim"), [("tiny_modelopt_nvfp4", 64), ("tiny_ct_NVFP4", 128)])
def test_sizes_and_router_rule(fixtures, name, moe_dim):
    read = read_layer(fixtures / name)
    assert (read.num_experts, read.hidden_size, read.moe_dim) == (4, 128, moe_dim)
    assert (read.top_k, read.renormalize) == (2, True)
    assert name in read.source and "layer 0" in read.source
