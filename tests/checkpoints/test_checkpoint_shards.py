"""Sharded checkpoints, and reading only what is asked for."""

import json

import numpy as np
import pytest

from nbmoe.checkpoints import read_layer
from nbmoe.errors import ConfigError


def shard(checkpoint, write_layers=(0, 1)):
    """Replaces the single file by one shard a layer; only `write_layers` are written."""
    (checkpoint.folder / "model.safetensors").unlink()
    weight_map = {}
    for name in checkpoint.tensors:
        layer = 1 if ".layers.1." in name else 0
        weight_map[name] = f"model-{layer}.safetensors"
    for layer in write_layers:
        names = [n for n, f in weight_map.items() if f == f"model-{layer}.safetensors"]
        checkpoint.write_shard(f"model-{layer}.safetensors", names)
    write_index(checkpoint, weight_map)
    return weight_map


def write_index(checkpoint, weight_map):
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (checkpoint.folder / "model.safetensors.index.json").write_text(index)


@pytest.mark.parametrize("layer", [0, 1])
def test_shards_hold_the_same_layer(editable, fixtures, layer):
    checkpoint = editable("tiny_ct_NVFP4")
    shard(checkpoint)
    sharded = read_layer(checkpoint.folder, layer)
    single = read_layer(fixtures / "tiny_ct_NVFP4", layer)
    for name in ("gate_up", "gate_up_scales", "down", "down_scales"):
        assert np.array_equal(getattr(sharded, name), getattr(single, name)), name
    assert np.array_equal(sharded.router.weight, single.router.weight)


def test_only_the_layers_shards_are_opened(editable):
    checkpoint = editable("tiny_ct_NVFP4")
    shard(checkpoint, write_layers=(1,))
    assert read_layer(checkpoint.folder, 1).num_experts == 4
    with pytest.raises(FileNotFoundError, match=r"model-0\.safetensors"):
        read_layer(checkpoint.folder, 0)


def test_index_that_names_the_wrong_shard(editable):
    checkpoint = editable("tiny_ct_NVFP4")
    weight_map = shard(checkpoint)
    name = "model.layers.0.mlp.experts.1.down_proj.weight_packed"
    write_index(checkpoint, {**weight_map, name: "model-1.safetensors"})
    with pytest.raises(ConfigError, match=r"experts\.1\.down_proj\.weight_packed"):
        read_layer(checkpoint.folder, 0)


def test_index_cannot_reach_outside_the_folder(editable):
    checkpoint = editable("tiny_ct_NVFP4")
    weight_map = shard(checkpoint)
    write_index(checkpoint, {**weight_map, "lm_head.weight": "../model-1.safetensors"})
    with pytest.raises(ConfigError, match="plain file names"):
        read_layer(checkpoint.folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_broken_index(editable, content):
    checkpoint = editable("tiny_ct_NVFP4")
    (checkpoint.folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match=r"index\.json"):
        read_layer(checkpoint.folder)


def test_truncated_file(editable):
    checkpoint = editable("tiny_ct_NVFP4")
    path = checkpoint.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="a readable safetensors file"):
        read_layer(checkpoint.folder)


def test_no_safetensors(editable):
    checkpoint = editable("tiny_ct_NVFP4")
    (checkpoint.folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        read_layer(checkpoint.folder)


def test_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        read_layer(tmp_path / "absent")


def test_folder_without_config(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        read_layer(tmp_path)
