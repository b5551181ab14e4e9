"""gpt-oss: all experts of a layer in one tensor a projection, gate and up rows interleaved."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe.checkpoints.architectures import ModelConfig
from nbmoe.checkpoints.families import Family
from nbmoe.checkpoints.named import NamedTensors
from nbmoe.checkpoints.scales import check_e8m0_scales
from nbmoe.checkpoints.stack import WEIGHT_FORMATS
from nbmoe.errors import ShapeError, message


def read_fused(
    tensors: NamedTensors, family: Family, model: ModelConfig, prefix: str, where: str
) -> dict[str, Any]:
    """Fields of an `ExpertStack` from fused tensors.

    `experts.{gate_up,down}_proj_blocks` is u8 [E, N, K / 32, 16], packed codes; `…_scales` u8
    [E, N, K / 32], e8m0; `…_bias` bf16 [E, N]. Row 2i of gate_up is gate row i, row 2i + 1 up row
    i; they are put apart here.

    Args:
        tensors: The checkpoint.
        family: The checkpoint's family.
        model: Sizes.
        prefix: Beginning of the block's tensor names.
        where: The layer, for messages.

    Raises:
        ConfigError: A tensor that is not a scale is missing.
        DTypeError, ShapeError: A tensor is not what the table above says.
        ScaleError: A scale is missing or unusable.
    """
    block = WEIGHT_FORMATS[family.format].multiple
    hidden, moe = model.hidden_size, model.moe_dim
    for name, size in (("hidden_size", hidden), ("moe_dim", moe)):
        if size % block:
            rule = f"a multiple of {block}, as {family.format} demands"
            raise ShapeError(message(tensors.api, f"config.json: {name}", rule, size))
    fields: dict[str, Any] = {"format": family.format, "input_format": family.input_format}
    for name, n, k in (("gate_up", 2 * moe, hidden), ("down", hidden, moe)):
        start = f"{prefix}experts.{name}_proj_"
        at = f"{where}, {name}_proj"
        blocks = (model.num_experts, n, k // block)
        shape = (*blocks, block // 2)
        codes = tensors.read(start + family.codes, at, family.codes_type, shape)
        codes = codes.reshape(model.num_experts, n, k // 2)
        scales = tensors.scale(start + family.scales, at, family.scales_type, blocks)
        for e in range(model.num_experts):
            label = f"{where}, expert {e}, {name}_proj, {start}{family.scales}"
            check_e8m0_scales(scales[e], codes[e], tensors.api, label)
        bias = tensors.read(start + "bias", at, "BF16", (model.num_experts, n))
        order = _apart if name == "gate_up" else np.array
        fields[name], fields[f"{name}_scales"] = order(codes), order(scales)
        fields[f"{name}_bias"] = order(bias)
    return fields


def _apart(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Gate rows, then up rows, of rows g0, u0, g1, u1, … along axis 1."""
    return np.concatenate([rows[:, 0::2], rows[:, 1::2]], axis=1)
