"""Checkpoint families: how a vendor's tool names tensors, and what their scales mean.

modelopt stores second-level NVFP4 factors that multiply; compressed-tensors stores their inverses
under the name "global scale" and says so only in its code. DeepSeek's `weight_scale_inv` multiplies
although its name says otherwise. Reading one as the other is wrong by orders of magnitude
(docs/checkpoints.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from nbmoe.errors import UnsupportedError, message

_FLOATS = "F32 or BF16"
_E8M0 = "U8 or F8_E8M0"


@dataclass(frozen=True)
class Family:
    """Tensor names of one projection, below the projection's own name, and their types.

    Attributes:
        name: Name shown to people.
        detected_by: What config.json says in checkpoints of this family.
        format: Format of the weights, a key of `nbmoe.checkpoints.stack.WEIGHT_FORMATS`.
        codes: The weight itself.
        codes_type: Its type in the file.
        scales: Its scales, row-major; empty for none.
        scales_type: Their types in the file.
        weight_scale: Second-level scale of the weights, one float32; empty for none.
        input_scale: Calibrated scale of the activations, one float32; empty for none.
        is_divisor: Whether the last two divide instead of multiplying.
        is_per_tensor: Whether `scales` is one number for a whole projection.
        input_format: Format of activations if it is not that of the weights.
    """

    name: str
    detected_by: str
    format: str
    codes: str
    codes_type: str
    scales: str = ""
    scales_type: str = ""
    weight_scale: str = ""
    input_scale: str = ""
    is_divisor: bool = False
    is_per_tensor: bool = False
    input_format: str = ""


_MODELOPT = 'quant_method "modelopt" with quant_algo '
_CT = 'quant_method "compressed-tensors" with format '

BF16 = Family("bf16", "no quantization_config", "bf16", "weight", "BF16", input_format="bf16")
MODELOPT_NVFP4 = Family(
    "modelopt NVFP4",
    _MODELOPT + '"NVFP4"',
    "nvfp4",
    codes="weight",
    codes_type="U8",
    scales="weight_scale",
    scales_type="F8_E4M3",
    weight_scale="weight_scale_2",
    input_scale="input_scale",
)
MODELOPT_MXFP4 = Family(
    "modelopt MXFP4", _MODELOPT + '"MXFP4"', "mxfp4", "weight", "U8", "weight_scale", _E8M0
)
MODELOPT_MXFP8 = Family(
    "modelopt MXFP8", _MODELOPT + '"MXFP8"', "mxfp8", "weight", "F8_E4M3", "weight_scale", _E8M0
)
MODELOPT_FP8 = Family(
    "modelopt FP8",
    _MODELOPT + '"FP8"',
    "fp8_tensor",
    codes="weight",
    codes_type="F8_E4M3",
    scales="weight_scale",
    scales_type=_FLOATS,
    input_scale="input_scale",
    is_per_tensor=True,
)
CT_NVFP4 = Family(
    "compressed-tensors NVFP4",
    _CT + '"nvfp4-pack-quantized"',
    "nvfp4",
    codes="weight_packed",
    codes_type="U8",
    scales="weight_scale",
    scales_type="F8_E4M3",
    weight_scale="weight_global_scale",
    input_scale="input_global_scale",
    is_divisor=True,
)
CT_MXFP4 = Family(
    "compressed-tensors MXFP4",
    _CT + '"mxfp4-pack-quantized"',
    "mxfp4",
    codes="weight_packed",
    codes_type="U8",
    scales="weight_scale",
    scales_type=_E8M0,
)
CT_MXFP8 = Family(
    "compressed-tensors MXFP8",
    _CT + '"mxfp8-quantized"',
    "mxfp8",
    codes="weight",
    codes_type="F8_E4M3",
    scales="weight_scale",
    scales_type=_E8M0,
)
_CT_FLOAT = _CT + '"float-quantized" and weights of strategy '
CT_FP8_BLOCK = Family(
    "compressed-tensors FP8 block",
    _CT_FLOAT + '"block"',
    "fp8_block",
    codes="weight",
    codes_type="F8_E4M3",
    scales="weight_scale",
    scales_type=_FLOATS,
)
CT_FP8_ROW = Family(
    "compressed-tensors FP8 channel",
    _CT_FLOAT + '"channel"',
    "fp8_row",
    codes="weight",
    codes_type="F8_E4M3",
    scales="weight_scale",
    scales_type=_FLOATS,
)
CT_FP8_TENSOR = Family(
    "compressed-tensors FP8 tensor",
    _CT_FLOAT + '"tensor"',
    "fp8_tensor",
    codes="weight",
    codes_type="F8_E4M3",
    scales="weight_scale",
    scales_type=_FLOATS,
    input_scale="input_scale",
    is_per_tensor=True,
)
FP8_BLOCK = Family(
    "FP8 block",
    'quant_method "fp8" with weight_block_size [128, 128]',
    "fp8_block",
    codes="weight",
    codes_type="F8_E4M3",
    scales="weight_scale_inv",
    scales_type=_FLOATS,
)
GPT_OSS_MXFP4 = Family(
    "gpt-oss MXFP4",
    'quant_method "mxfp4"',
    "mxfp4",
    codes="blocks",
    codes_type="U8",
    scales="scales",
    scales_type=_E8M0,
    input_format="bf16",
)
FAMILIES = (
    MODELOPT_NVFP4,
    MODELOPT_MXFP4,
    MODELOPT_MXFP8,
    MODELOPT_FP8,
    CT_NVFP4,
    CT_MXFP4,
    CT_MXFP8,
    CT_FP8_BLOCK,
    CT_FP8_ROW,
    CT_FP8_TENSOR,
    FP8_BLOCK,
    GPT_OSS_MXFP4,
    BF16,
)


def unsupported(api: str, found: str) -> UnsupportedError:
    """The error for a quantization that no family stands for, with what was found."""
    rule = " or ".join(f"{family.name} ({family.detected_by})" for family in FAMILIES)
    hint = "other formats are not readable in this release"
    return UnsupportedError(message(api, "quantization_config", rule, found, hint))
