"""Tiny checkpoints of families without a vendor's fixture, written from their documented names.

Weights are drawn at random and quantized here with `ml_dtypes`, not with the project's codecs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.checkpoints.conftest import Checkpoint
from tests.checkpoints.dequantize import BLOCK

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
EXPERTS, HIDDEN = 4, 128
PREFIX = "model.layers.1.mlp."
Tensors = dict[str, np.ndarray]
Quantizer = Callable[[np.ndarray], Tensors]


@dataclass
class Synthetic:
    """A checkpoint, and the weights that it was made from.

    Attributes:
        format: Format of the weights in `ExpertStack`.
        input_format: Format of activations.
        config: Content of config.json.
        tensors: Its tensors.
        original: f32 gate and up [E, D, H], down [E, H, D].
        shared: The same of shared experts, E = 1.
    """

    format: str
    input_format: str
    config: dict[str, Any]
    tensors: Tensors = field(default_factory=dict)
    original: Tensors = field(default_factory=dict)
    shared: Tensors = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Writes a folder that `read_layer` takes."""
        folder.mkdir(parents=True, exist_ok=True)
        return Checkpoint(folder, json.loads(json.dumps(self.config)), self.tensors).write()


# Quantizers of one weight [N, K]: tensors by suffix.


def mx_scale(values: np.ndarray, largest: float) -> np.ndarray:
    """u8 [N, K / 32], e8m0 of the smallest power of two that keeps a block in range."""
    amax = np.abs(values.reshape(len(values), -1, 32)).max(axis=-1)
    mantissa, exponent = np.frexp(amax / largest)
    return (exponent - (mantissa == 0.5) + 127).astype(np.uint8)


def mx_divided(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return values / np.repeat(np.exp2(scales.astype(np.float64) - 127), 32, axis=1)


def pack(codes: np.ndarray) -> np.ndarray:
    flat = codes.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return flat[:, 0::2] | flat[:, 1::2] << 4


def mxfp4(codes: str) -> Quantizer:
    def quantize(w: np.ndarray) -> Tensors:
        scales = mx_scale(w, 6.0)
        return {codes: pack(mx_divided(w, scales)), "weight_scale": scales}

    return quantize


def mxfp8(w: np.ndarray) -> Tensors:
    scales = mx_scale(w, 448.0)
    return {"weight": mx_divided(w, scales).astype(E4M3), "weight_scale": scales}


def fp8_block(suffix: str, dtype: Any) -> Quantizer:
    def quantize(w: np.ndarray) -> Tensors:
        n, k = w.shape
        blocks = -(-n // BLOCK), -(-k // BLOCK)
        padded = np.zeros((blocks[0] * BLOCK, blocks[1] * BLOCK))
        padded[:n, :k] = w
        amax = np.abs(padded.reshape(blocks[0], BLOCK, blocks[1], BLOCK)).max(axis=(1, 3))
        scales = (amax / 448).astype(dtype)
        wide = np.repeat(np.repeat(scales.astype(np.float64), BLOCK, 0), BLOCK, 1)
        codes = np.clip(padded / wide, -448, 448).astype(E4M3)
        return {"weight": codes[:n, :k], suffix: scales}

    return quantize


def fp8_row(w: np.ndarray) -> Tensors:
    scales = (np.abs(w).max(axis=1, keepdims=True) / 448).astype(BF16)
    codes = np.clip(w / scales.astype(np.float64), -448, 448).astype(E4M3)
    return {"weight": codes, "weight_scale": scales}


def fp8_tensor(shape: tuple[int, ...]) -> Quantizer:
    def quantize(w: np.ndarray) -> Tensors:
        scale = np.float32(np.abs(w).max() / 448)
        return {
            "weight": (w / np.float64(scale)).astype(E4M3),
            "weight_scale": np.full(shape, scale, np.float32),
            "input_scale": np.full(shape, 0.01, np.float32),
        }

    return quantize


# Models


def qwen3(moe_dim: int, quantization: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": moe_dim,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "quantization_config": quantization,
    }


def deepseek(moe_dim: int, model_type: str, quantization: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": moe_dim,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "quantization_config": quantization,
    }


def compressed_tensors(
    format_name: str, weights: dict[str, Any], inputs: dict[str, Any] | None
) -> dict[str, Any]:
    group = {
        "format": format_name,
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": {"group_0": group},
    }


def draw(rng: np.random.Generator, experts: int, moe_dim: int) -> Tensors:
    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(BF16).astype(np.float32)

    return {
        "gate_proj": normal(experts, moe_dim, HIDDEN),
        "up_proj": normal(experts, moe_dim, HIDDEN),
        "down_proj": normal(experts, HIDDEN, moe_dim),
    }


def per_expert(made: Synthetic, quantize: Quantizer, moe_dim: int) -> Synthetic:
    """Fills in the tensors of a layer whose experts have tensors of their own."""
    rng = np.random.default_rng(7)
    made.original = draw(rng, EXPERTS, moe_dim)
    for name, stack in made.original.items():
        for e, w in enumerate(stack):
            for suffix, data in quantize(w).items():
                made.tensors[f"{PREFIX}experts.{e}.{name}.{suffix}"] = data
    gate = rng.standard_normal((EXPERTS, HIDDEN)).astype(BF16)
    made.tensors[f"{PREFIX}gate.weight"] = gate
    if made.config.get("n_shared_experts"):
        made.shared = draw(rng, 1, moe_dim)
        for name, stack in made.shared.items():
            for suffix, data in quantize(stack[0]).items():
                made.tensors[f"{PREFIX}shared_experts.{name}.{suffix}"] = data
        bias = np.linspace(-0.2, 0.2, EXPERTS, dtype=np.float32)
        made.tensors[f"{PREFIX}gate.e_score_correction_bias"] = bias
    return made


def gpt_oss() -> Synthetic:
    """Fused MXFP4 tensors with biases; gate and up rows interleaved."""
    moe_dim = 64
    config = {
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": moe_dim,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "swiglu_limit": 7.0,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    rng = np.random.default_rng(11)
    made = Synthetic("mxfp4", "bf16", config, original=draw(rng, EXPERTS, moe_dim))
    gate_up = np.empty((EXPERTS, 2 * moe_dim, HIDDEN), np.float32)
    gate_up[:, 0::2], gate_up[:, 1::2] = made.original["gate_proj"], made.original["up_proj"]
    for name, stack in (("gate_up", gate_up), ("down", made.original["down_proj"])):
        start = f"{PREFIX}experts.{name}_proj_"
        quantized = [mxfp4("blocks")(w) for w in stack]
        experts, n, k = stack.shape
        blocks = np.stack([q["blocks"] for q in quantized])
        made.tensors[start + "blocks"] = blocks.reshape(experts, n, k // 32, 16)
        made.tensors[start + "scales"] = np.stack([q["weight_scale"] for q in quantized])
        made.tensors[start + "bias"] = rng.standard_normal((experts, n)).astype(BF16)
    made.tensors[f"{PREFIX}router.weight"] = rng.standard_normal((EXPERTS, HIDDEN)).astype(BF16)
    made.tensors[f"{PREFIX}router.bias"] = rng.standard_normal(EXPERTS).astype(BF16)
    return made


_MX_INPUTS = {"num_bits": 8, "group_size": 32, "type": "float", "dynamic": True}
_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def families() -> dict[str, Synthetic]:
    """One checkpoint a family, by a short name."""
    mx4 = {"num_bits": 4, "group_size": 32, "type": "float", "strategy": "group"}
    mx8 = mx4 | {"num_bits": 8}
    row = {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}
    token = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8"}
    inverse = fp8_block("weight_scale_inv", np.float32)
    return {
        "modelopt_fp8": per_expert(
            Synthetic("fp8_tensor", "fp8_tensor", qwen3(64, modelopt)), fp8_tensor(()), 64
        ),
        "ct_mxfp4": per_expert(
            Synthetic(
                "mxfp4",
                "mxfp4",
                qwen3(
                    96,
                    compressed_tensors("mxfp4-pack-quantized", mx4, mx4 | {"dynamic": True}),
                ),
            ),
            mxfp4("weight_packed"),
            96,
        ),
        "ct_mxfp4_mxfp8": per_expert(
            Synthetic(
                "mxfp4",
                "mxfp8",
                qwen3(64, compressed_tensors("mxfp4-pack-quantized", mx4, _MX_INPUTS)),
            ),
            mxfp4("weight_packed"),
            64,
        ),
        "ct_mxfp4_bf16": per_expert(
            Synthetic(
                "mxfp4", "bf16", qwen3(64, compressed_tensors("mxfp4-pack-quantized", mx4, None))
            ),
            mxfp4("weight_packed"),
            64,
        ),
        "ct_mxfp8": per_expert(
            Synthetic(
                "mxfp8", "mxfp8", qwen3(64, compressed_tensors("mxfp8-quantized", mx8, _MX_INPUTS))
            ),
            mxfp8,
            64,
        ),
        "ct_fp8_channel": per_expert(
            Synthetic(
                "fp8_row",
                "fp8_row",
                deepseek(64, "glm4_moe", compressed_tensors("float-quantized", row, token)),
            ),
            fp8_row,
            64,
        ),
        "ct_fp8_tensor": per_expert(
            Synthetic(
                "fp8_tensor",
                "fp8_tensor",
                qwen3(
                    64,
                    compressed_tensors(
                        "float-quantized",
                        row | {"strategy": "tensor"},
                        token | {"strategy": "tensor", "dynamic": False},
                    ),
                ),
            ),
            fp8_tensor((1,)),
            64,
        ),
        "qwen3_fp8": per_expert(
            Synthetic("fp8_block", "fp8_block", qwen3(64, _BLOCKS)),
            fp8_block("weight_scale_inv", BF16),
            64,
        ),
        "deepseek_v3": per_expert(
            Synthetic("fp8_block", "fp8_block", deepseek(192, "deepseek_v3", _BLOCKS)),
            inverse,
            192,
        ),
        "kimi_k2": per_expert(
            Synthetic("fp8_block", "fp8_block", deepseek(64, "kimi_k2", _BLOCKS)), inverse, 64
        ),
        "gpt_oss": gpt_oss(),
    }
