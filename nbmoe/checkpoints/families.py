"""Checkpoint families: how a vendor's tool names NVFP4 tensors and which way scales point.

modelopt stores factors that multiply. compressed-tensors stores their inverses under the name
"global scale" and says so only in its code; reading one as the other is wrong by nine orders of
magnitude (docs/checkpoints.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbmoe.errors import UnsupportedError, message
from nbmoe.formats import NVFP4


@dataclass(frozen=True)
class Family:
    """Tensor names of one projection, below the projection's own name.

    Attributes:
        name: Name shown to people.
        detected_by: What config.json says in checkpoints of this family.
        codes: Packed e2m1 codes, u8 [out, in / 2], low nibble first.
        block_scales: e4m3 [out, in / 16], row-major.
        weight_scale: Second-level scale of the weights, one float32.
        input_scale: Second-level scale of the activations, one float32.
        is_divisor: Whether the two second-level scales divide instead of multiplying.
    """

    name: str
    detected_by: str
    codes: str
    block_scales: str
    weight_scale: str
    input_scale: str
    is_divisor: bool


MODELOPT_NVFP4 = Family(
    name="modelopt NVFP4",
    detected_by='quant_method "modelopt" with quant_algo "NVFP4"',
    codes="weight",
    block_scales="weight_scale",
    weight_scale="weight_scale_2",
    input_scale="input_scale",
    is_divisor=False,
)
COMPRESSED_TENSORS_NVFP4 = Family(
    name="compressed-tensors NVFP4",
    detected_by='quant_method "compressed-tensors" with format "nvfp4-pack-quantized"',
    codes="weight_packed",
    block_scales="weight_scale",
    weight_scale="weight_global_scale",
    input_scale="input_global_scale",
    is_divisor=True,
)
FAMILIES = (MODELOPT_NVFP4, COMPRESSED_TENSORS_NVFP4)
_ARG = "quantization_config"


def detect_family(
    config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None, api: str
) -> Family:
    """Decides which family wrote a checkpoint.

    Args:
        config: Content of config.json.
        hf_quant_config: Content of hf_quant_config.json, which older modelopt versions write
            instead of `quantization_config`; None if there is no such file.
        api: Name of the public function, for messages.

    Raises:
        UnsupportedError: Anything but the families above, with what was found.
    """
    quantization = config.get("quantization_config")
    if quantization is None and hf_quant_config is not None:
        old = hf_quant_config.get("quantization", {})
        producer = hf_quant_config.get("producer", {}).get("name")
        quantization = {"quant_method": producer, **old}
    if not isinstance(quantization, Mapping):
        raise _unsupported(api, "no quantization_config in config.json", "is it a bf16 model?")
    method = quantization.get("quant_method")
    if method == "modelopt":
        return _modelopt(quantization, api)
    if method == "compressed-tensors":
        return _compressed_tensors(quantization, api)
    raise _unsupported(api, f"quant_method {method!r}")


def _modelopt(quantization: Mapping[str, Any], api: str) -> Family:
    algo = quantization.get("quant_algo")
    if algo != "NVFP4":
        raise _unsupported(api, f"modelopt with quant_algo {algo!r}")
    group_size = quantization.get("group_size", NVFP4.block)
    if group_size != NVFP4.block:
        raise _unsupported(api, f"modelopt NVFP4 with group_size {group_size!r}")
    return MODELOPT_NVFP4


def _compressed_tensors(quantization: Mapping[str, Any], api: str) -> Family:
    fallback = quantization.get("format")
    groups = quantization.get("config_groups") or {}
    if not groups:
        raise _unsupported(api, f"compressed-tensors with format {fallback!r} and no config_groups")
    for group in groups.values():
        found = group.get("format") or fallback
        if found != "nvfp4-pack-quantized":
            raise _unsupported(api, f"compressed-tensors with format {found!r}")
        group_size = (group.get("weights") or {}).get("group_size")
        if group_size != NVFP4.block:
            raise _unsupported(api, f"compressed-tensors NVFP4 with group_size {group_size!r}")
        if group.get("input_activations") is None:
            found = "compressed-tensors NVFP4A16 (weights only, no input scales)"
            raise _unsupported(api, found)
    return COMPRESSED_TENSORS_NVFP4


def _unsupported(api: str, found: str, hint: str = "") -> UnsupportedError:
    rule = " or ".join(f"{family.name} ({family.detected_by})" for family in FAMILIES)
    hint = hint or "other formats are not readable in this release"
    return UnsupportedError(message(api, _ARG, rule, found, hint))
