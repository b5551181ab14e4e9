"""`PreparedExperts`: a layer's weights and scales in the form that the kernels take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe.checkpoints.stack import ExpertStack
from nbmoe.layouts import interleave_scales, sigma_permute
from nbmoe.nn.nvfp4_scales import Nvfp4Scales
from nbmoe.nn.preparation import Prepare
from nbmoe.prepared import PreparedWeights

F32Array = npt.NDArray[np.float32]
U8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedExperts:
    """Operands of the two grouped matmuls and of the quantization before each.

    E experts, H = hidden size, D = moe dim. All per-expert vectors are indexed by expert id; slots
    and expert ids are the same here, because routing keeps every expert in its own slot. Shapes of
    codes are those of an unpacked format, and scale columns those of NVFP4.

    Attributes:
        gate_up: u8 [E, 2D, H], codes; with `permute` gate and up rows side by side. Or the same as
            PreparedWeights.
        gate_up_scales: u8 [E, ceil(2D/128), ceil(H/64), 32, 4, 4], rows permuted alike; None beside
            PreparedWeights.
        gate_up_expert_scales: f32 [E], weight scale x input scale of the first matmul; None for MX.
        gate_up_inverse_input_scales: f32 [E], 1 / input scale of the first matmul; None for MX.
        gate_up_bias: bf16 [E, 2D], permuted alike, or None.
        down: u8 [E, H, D], codes, or PreparedWeights.
        down_scales: u8 [E, ceil(H/128), ceil(D/64), 32, 4, 4], or None.
        down_expert_scales: f32 [E], as for the first matmul.
        down_inverse_input_scales: f32 [E], as for the first matmul.
        down_bias: bf16 [E, H] or None.
    """

    gate_up: U8Array | PreparedWeights
    gate_up_scales: U8Array | None
    gate_up_expert_scales: F32Array | None
    gate_up_inverse_input_scales: F32Array | None
    gate_up_bias: npt.NDArray[Any] | None
    down: U8Array | PreparedWeights
    down_scales: U8Array | None
    down_expert_scales: F32Array | None
    down_inverse_input_scales: F32Array | None
    down_bias: npt.NDArray[Any] | None

    def map(self, function: Callable[[Any], Any]) -> PreparedExperts:
        """The same with a function applied to each array; None stays None."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in values.items():
            values[name] = None if value is None else function(value)
        return PreparedExperts(**values)


def prepare_experts(stack: ExpertStack, *, permute: bool = True) -> PreparedExperts:
    """Permutes, tiles and folds experts in a block format once, at load time.

    `Nvfp4Scales` says which factors NVFP4 has.

    Args:
        stack: Experts in NVFP4, MXFP4 or MXFP8.
        permute: Whether gate and up rows alternate, as the fused matmul takes them.

    Raises:
        ScaleError: The product of a weight scale and an input scale leaves float32's normal range.
    """
    order: Callable[[Any], Any] = sigma_permute if permute else np.ascontiguousarray
    bias = stack.gate_up_bias
    if bias is not None:
        bias = order(bias[..., np.newaxis])[..., 0]
    assert stack.gate_up_scales is not None and stack.down_scales is not None, (
        "checked by the stack"
    )
    return PreparedExperts(
        gate_up=order(stack.gate_up),
        gate_up_scales=interleave_scales(order(stack.gate_up_scales)),
        gate_up_bias=bias,
        down=stack.down,
        down_scales=interleave_scales(stack.down_scales),
        down_bias=stack.down_bias,
        **_factors(stack),
    )


def prepare_weights(placed: PreparedExperts, prepare: Prepare, fmt: str) -> PreparedExperts:
    """The same with weights as sm_90 matmuls read them.

    Args:
        placed: Operands on a backend.
        prepare: Prepares weights there.
        fmt: Format of the weights.
    """
    for leg in ("gate_up", "down"):
        codes, scales = getattr(placed, leg), getattr(placed, f"{leg}_scales")
        made: dict[str, Any] = {leg: prepare(codes, scales, fmt), f"{leg}_scales": None}
        placed = dataclasses.replace(placed, **made)
    return placed


def _factors(stack: ExpertStack) -> dict[str, F32Array | None]:
    """Factors of results, and inverse scales of inputs."""
    if stack.format != "nvfp4":
        names = ("expert_scales", "inverse_input_scales")
        return {f"{leg}_{name}": None for leg in ("gate_up", "down") for name in names}
    scales, one = Nvfp4Scales.of_stack(stack), np.float32(1)
    return {
        "gate_up_expert_scales": scales.gate_up_expert,
        "gate_up_inverse_input_scales": one / scales.gate_up_input,
        "down_expert_scales": scales.down_expert,
        "down_inverse_input_scales": one / scales.down_input,
    }
