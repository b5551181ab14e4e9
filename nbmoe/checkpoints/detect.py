"""Which family wrote a checkpoint, from what its configuration files say."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nbmoe.checkpoints import families
from nbmoe.checkpoints.families import Family, unsupported

_MODELOPT = {
    family.name.removeprefix("modelopt "): family
    for family in (
        families.MODELOPT_NVFP4,
        families.MODELOPT_MXFP4,
        families.MODELOPT_MXFP8,
        families.MODELOPT_FP8,
    )
}
_BLOCKS = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
_FP8_BLOCK = [128, 128]
_CT_PACKED = {
    "nvfp4-pack-quantized": families.CT_NVFP4,
    "mxfp4-pack-quantized": families.CT_MXFP4,
    "mxfp8-quantized": families.CT_MXFP8,
}


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
        UnsupportedError: Anything but the known families, with what was found.
    """
    quantization = config.get("quantization_config")
    if quantization is None and hf_quant_config is not None:
        old = hf_quant_config.get("quantization", {})
        producer = hf_quant_config.get("producer", {}).get("name")
        quantization = {"quant_method": producer, **old}
    if quantization is None:
        return families.BF16
    if not isinstance(quantization, Mapping):
        raise unsupported(api, f"a {type(quantization).__name__}")
    method = quantization.get("quant_method")
    if method == "modelopt":
        return _modelopt(quantization, api)
    if method == "compressed-tensors":
        return _compressed_tensors(quantization, api)
    if method == "fp8":
        return _fp8(quantization, api)
    if method == "mxfp4":
        return families.GPT_OSS_MXFP4
    raise unsupported(api, f"quant_method {method!r}")


def _modelopt(quantization: Mapping[str, Any], api: str) -> Family:
    algo = quantization.get("quant_algo")
    # modelopt 0.47 writes "mxfp4" in lower case.
    family = _MODELOPT.get(str(algo).upper())
    if family is None:
        raise unsupported(api, f"modelopt with quant_algo {algo!r}")
    block = _BLOCKS.get(family.format)
    group_size = quantization.get("group_size", block)
    if block is not None and group_size != block:
        raise unsupported(api, f"{family.name} with group_size {group_size!r}")
    return family


def _fp8(quantization: Mapping[str, Any], api: str) -> Family:
    expected = {
        "weight_block_size": (_FP8_BLOCK,),
        "activation_scheme": ("dynamic", None),
        "fmt": ("e4m3", None),
    }
    for key, values in expected.items():
        if quantization.get(key) not in values:
            raise unsupported(api, f"fp8 with {key} {quantization.get(key)!r}")
    return families.FP8_BLOCK


def _compressed_tensors(quantization: Mapping[str, Any], api: str) -> Family:
    fallback = quantization.get("format")
    groups = quantization.get("config_groups") or {}
    found = [_group(group, group.get("format") or fallback, api) for group in groups.values()]
    if not found:
        raise unsupported(api, f"compressed-tensors with format {fallback!r} and no config_groups")
    if any(family != found[0] for family in found):
        names = " and ".join(dict.fromkeys(family.name for family in found))
        raise unsupported(api, f"config_groups of different formats: {names}")
    return found[0]


def _group(group: Mapping[str, Any], format_name: object, api: str) -> Family:
    weights = group.get("weights") or {}
    if format_name == "float-quantized":
        return _float_group(weights, group.get("input_activations"), api)
    family = _CT_PACKED.get(str(format_name))
    if family is None:
        raise unsupported(api, f"compressed-tensors with format {format_name!r}")
    if weights.get("group_size") != _BLOCKS[family.format]:
        raise unsupported(api, f"{family.name} with group_size {weights.get('group_size')!r}")
    inputs = _block_inputs(group.get("input_activations"))
    if inputs == family.format:
        return family
    if family.format == "mxfp4" and inputs in ("bf16", "mxfp8"):
        return dataclasses.replace(family, input_format=inputs)
    if family.format == "nvfp4" and inputs == "bf16":
        raise unsupported(api, "compressed-tensors NVFP4A16 (weights only, no input scales)")
    raise unsupported(api, f"{family.name} with input_activations {group['input_activations']!r}")


def _block_inputs(inputs: Mapping[str, Any] | None) -> str:
    """The block format of activations, empty if there is none such."""
    if inputs is None:
        return "bf16"
    known: dict[Any, str] = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}
    return known.get((inputs.get("num_bits"), inputs.get("group_size")), "")


def _float_group(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, api: str) -> Family:
    strategy = weights.get("strategy")
    rule = None if inputs is None else (inputs.get("strategy"), bool(inputs.get("dynamic")))
    if weights.get("num_bits") != 8 or weights.get("type") != "float" or inputs is None:
        found = f"float-quantized with weights {weights!r} and input_activations {inputs!r}"
        raise unsupported(api, found)
    if strategy == "block" and rule == ("group", True):
        sizes = weights.get("block_structure"), inputs.get("group_size")
        if sizes == (_FP8_BLOCK, _FP8_BLOCK[1]):
            return families.CT_FP8_BLOCK
        raise unsupported(api, f"FP8 with block_structure, group_size {sizes!r}")
    if strategy == "channel" and rule == ("token", True):
        return families.CT_FP8_ROW
    if strategy == "tensor" and rule == ("tensor", False):
        return families.CT_FP8_TENSOR
    if strategy == "tensor" and rule == ("token", True):
        return dataclasses.replace(families.CT_FP8_TENSOR, format="fp8_row", input_scale="")
    found = f"float-quantized with weight strategy {strategy!r}, inputs (strategy, dynamic) {rule}"
    raise unsupported(api, found)
