"""`read_layer`: from a checkpoint folder to one MoE layer."""

from __future__ import annotations

import os
from pathlib import Path

from nbmoe.checkpoints.architectures import parse_model_config
from nbmoe.checkpoints.detect import detect_family
from nbmoe.checkpoints.experts import LayerReader
from nbmoe.checkpoints.families import GPT_OSS_MXFP4, unsupported
from nbmoe.checkpoints.named import NamedTensors
from nbmoe.checkpoints.tensors import CheckpointTensors, read_json
from nbmoe.checkpoints.weights import ExpertWeights
from nbmoe.errors import ConfigError, RangeError, message

_API = "read_layer"


def read_layer(path: str | os.PathLike[str], layer: int | None = None) -> ExpertWeights:
    """Reads the experts and the router of one MoE layer of a checkpoint folder.

    The family is taken from config.json (docs/checkpoints.md lists them). Only the bytes of this
    layer are read, also from sharded checkpoints.

    Args:
        path: Folder with config.json and safetensors files.
        layer: Number of the decoder layer; the first MoE layer if None.

    Returns:
        The layer in host memory. Scales multiply, whatever the file stored.

    Raises:
        FileNotFoundError: The folder, config.json or a needed safetensors file does not exist.
        UnsupportedError: The family, the model type or a part of the layer is not supported.
        ConfigError: Files contradict each other, or a tensor that is not a scale is missing.
        RangeError: The layer does not exist or has no experts.
        DTypeError, ShapeError: A tensor is not what the family and config.json say.
        ScaleError: A scale is missing, zero, negative, denormal or not finite, or gate and up have
            scales without an exact common one. Names layer, expert and tensor.
    """
    reader = open_checkpoint(path)
    layers = reader.layers()
    if not layers:
        rule = f"tensors named {reader.model.architecture.layer_prefix(0)}.experts.…"
        found = ", ".join(reader.tensors.names[:3]) + ", …"
        raise ConfigError(message(_API, "path", rule, found))
    if layer is not None and layer not in layers:
        rule = f"one of the MoE layers {', '.join(map(str, layers))}"
        raise RangeError(message(_API, "layer", rule, layer))
    return reader.read(layers[0] if layer is None else layer)


def open_checkpoint(path: str | os.PathLike[str]) -> LayerReader:
    """Reads a checkpoint's configuration and tensor names, but no tensor.

    Raises:
        FileNotFoundError, UnsupportedError, ConfigError: As `read_layer`.
    """
    folder = Path(path)
    config_path = folder / "config.json"
    if not config_path.is_file():
        found = "no such file" if folder.exists() else f"no folder {folder}"
        rule = f"a checkpoint folder with {config_path}"
        raise FileNotFoundError(message(_API, "path", rule, found))
    config = read_json(config_path, _API)
    old_path = folder / "hf_quant_config.json"
    old_config = read_json(old_path, _API) if old_path.is_file() else None
    family = detect_family(config, old_config, _API)
    model = parse_model_config(config, _API)
    if (family is GPT_OSS_MXFP4) != model.architecture.is_fused:
        raise unsupported(_API, f"{family.name} in a {model.architecture.model_type} model")
    tensors = NamedTensors(CheckpointTensors(folder, _API), family.name, _API)
    return LayerReader(tensors, model, family, folder.name)
