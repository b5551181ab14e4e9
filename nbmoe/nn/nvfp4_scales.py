"""`Nvfp4Scales`: the float32 factors around the two matmuls of NVFP4 experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nbmoe.checkpoints.scales import check_scale
from nbmoe.checkpoints.stack import ExpertStack

F32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False, kw_only=True)
class Nvfp4Scales:
    """Input scales, and what results are multiplied by, for each expert.

    The first matmul has one input scale for all experts, the largest of theirs: a token is
    quantized the same way whichever experts it goes to. The second has one an expert. This is what
    Modular MAX, vLLM and TensorRT-LLM do.

    Attributes:
        gate_up_input: f32 [E], the largest input scale of gate and up, E times.
        down_input: f32 [E], input scales of down.
        gate_up_expert: f32 [E], weight scale of gate and up x `gate_up_input`.
        down_expert: f32 [E], weight scale of down x `down_input`.
    """

    gate_up_input: F32Array
    down_input: F32Array
    gate_up_expert: F32Array
    down_expert: F32Array

    @classmethod
    def of_stack(cls, stack: ExpertStack) -> Nvfp4Scales:
        """Works the factors out from a checkpoint's scales.

        Args:
            stack: NVFP4 experts; a shared expert that is slot 0 of them counts for the maximum.

        Raises:
            ScaleError: A product of scales leaves float32's normal range.
        """
        inputs = stack.gate_up_input_scale, stack.down_input_scale
        weights = stack.gate_up_weight_scale, stack.down_weight_scale
        assert inputs[0] is not None and inputs[1] is not None, "checked by the stack"
        assert weights[0] is not None and weights[1] is not None, "checked by the stack"
        gate_up_input = np.full(stack.num_experts, inputs[0].max(), np.float32)
        scales = cls(
            gate_up_input=gate_up_input,
            down_input=inputs[1],
            gate_up_expert=weights[0] * gate_up_input,
            down_expert=weights[1] * inputs[1],
        )
        for leg in ("gate_up", "down"):
            for expert, value in enumerate(getattr(scales, f"{leg}_expert")):
                where = f"{stack.source}, expert {expert}, {leg}: weight scale x input scale"
                check_scale(float(value), "MoEQuantized", where)
        return scales
