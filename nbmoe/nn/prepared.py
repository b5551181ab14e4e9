"""`PreparedExperts`: a layer's weights and scales in the form that the kernels take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nbmoe.checkpoints.scales import check_scale
from nbmoe.checkpoints.weights import ExpertWeights
from nbmoe.layouts import interleave_scales, sigma_permute

F32Array = npt.NDArray[np.float32]
U8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedExperts:
    """Operands of the two grouped matmuls and of the quantization before each.

    E experts, H = hidden size, D = moe dim. All per-expert vectors are indexed by expert id; slots
    and expert ids are the same here, because routing keeps every expert in its own slot.

    Attributes:
        gate_up: u8 [E, 2D, H/2], codes, gate and up rows side by side (sigma-permuted).
        gate_up_scales: u8 [E, ceil(2D/128), ceil(H/64), 32, 4, 4], rows permuted alike.
        gate_up_expert_scales: f32 [E], weight scale x input scale of the first matmul.
        gate_up_inverse_input_scales: f32 [E], 1 / input scale of the first matmul.
        down: u8 [E, H, D/2], codes.
        down_scales: u8 [E, ceil(H/128), ceil(D/64), 32, 4, 4].
        down_expert_scales: f32 [E], weight scale x input scale of the second matmul.
        down_inverse_input_scales: f32 [E], 1 / input scale of the second matmul.
    """

    gate_up: U8Array
    gate_up_scales: U8Array
    gate_up_expert_scales: F32Array
    gate_up_inverse_input_scales: F32Array
    down: U8Array
    down_scales: U8Array
    down_expert_scales: F32Array
    down_inverse_input_scales: F32Array


def prepare_experts(weights: ExpertWeights) -> PreparedExperts:
    """Permutes, tiles and folds a layer once, at load time.

    The first matmul has one input scale for all experts, the largest of theirs: a token is
    quantized the same way whichever experts it goes to. The second has one an expert. This is what
    Modular MAX, vLLM and TensorRT-LLM do.

    Raises:
        ScaleError: The product of a weight scale and an input scale leaves float32's normal range.
    """
    experts = weights.num_experts
    input_scale = np.full(experts, weights.gate_up_input_scale.max(), np.float32)
    down_input_scale = weights.down_input_scale
    gate_up_alpha = weights.gate_up_weight_scale * input_scale
    down_alpha = weights.down_weight_scale * down_input_scale
    for name, alpha in (("gate_up", gate_up_alpha), ("down", down_alpha)):
        for expert, value in enumerate(alpha):
            where = f"{weights.source}, expert {expert}, {name}: weight scale x input scale"
            check_scale(float(value), "MoEQuantized", where)
    one = np.float32(1)
    return PreparedExperts(
        gate_up=sigma_permute(weights.gate_up),
        gate_up_scales=interleave_scales(sigma_permute(weights.gate_up_scales)),
        gate_up_expert_scales=gate_up_alpha,
        gate_up_inverse_input_scales=one / input_scale,
        down=weights.down,
        down_scales=interleave_scales(weights.down_scales),
        down_expert_scales=down_alpha,
        down_inverse_input_scales=one / down_input_scale,
    )
